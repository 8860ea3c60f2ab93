"""Checks of a machine and a configuration before a run, and of its server while it runs."""
