"""Worker processes for user code: starting, communication, limits and killing."""
