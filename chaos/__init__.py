"""The crash test and the soak test, which kill processes and check every guarantee."""
