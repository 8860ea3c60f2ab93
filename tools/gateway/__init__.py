"""The HTTP gateway: rewards from Triton for trainers that speak another protocol."""
