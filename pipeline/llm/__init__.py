"""Language models behind one interface: HTTP endpoints and engines in this process, and what they cost."""
