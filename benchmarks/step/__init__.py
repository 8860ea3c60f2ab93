"""A PPO step by phase: overlapped beside serial."""
