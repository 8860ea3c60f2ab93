"""The crash test: kills processes at every stage of the work, then checks every guarantee of the system."""
