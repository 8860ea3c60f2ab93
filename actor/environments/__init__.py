"""Environments of agents: user classes in worker processes, each holding many instances; OpenEnv servers likewise."""
