"""What a model needs of the card (GPU) that it runs on: errors, memory, copies."""
