"""Critic-free training steps, compared with TRL's."""
