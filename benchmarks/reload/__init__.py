"""Effects of critic reloads and updates on clients."""
