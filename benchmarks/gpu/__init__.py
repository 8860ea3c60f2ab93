"""Check of a real GPU: whether everything works there, and how fast."""
