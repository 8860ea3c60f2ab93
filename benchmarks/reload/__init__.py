"""Reloads and updates of the critic: their cost for clients."""
