"""Time of a PPO step by phase, overlapped and serial."""
