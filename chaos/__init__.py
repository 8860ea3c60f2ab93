"""The crash test: processes killed at every moment, then every promise checked."""
