"""Environments: user classes, agents and OpenEnv sessions, in worker processes that each hold many instances."""
