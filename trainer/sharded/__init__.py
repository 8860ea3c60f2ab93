"""The critic on several ranks: each holds a slice of its weights, gradients and optimizer state."""
