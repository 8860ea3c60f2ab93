"""HTTP sessions in which agents call the policy, recorded as trajectories of the tokens that it sampled."""
