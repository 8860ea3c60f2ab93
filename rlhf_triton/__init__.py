"""Exact rewards and a live critic for RL on language models, served by a stock Triton server."""
