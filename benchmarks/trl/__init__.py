"""Training steps without a critic beside TRL's."""
