"""Calls of agents to the policy, as trajectories of the tokens that it sampled."""
