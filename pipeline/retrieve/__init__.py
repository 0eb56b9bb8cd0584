"""Retrieval: thousands of queries against one index, by method."""
