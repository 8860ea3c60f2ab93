"""Worker processes for user code: how they start, talk to their parent, are limited and are killed."""
