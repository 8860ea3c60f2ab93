"""The crash test: kills processes at every stage of the work, then checks every promise of the system."""
