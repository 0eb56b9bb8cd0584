"""A language model at question time: recognition memory, retrieval by a chain of thought, answers."""
