"""Messages of a chat."""


def user(content):
    """Return what a user says."""
    return {"role": "user", "content": content}


def assistant(content, **more):
    """Return a reply; `more`: its further fields."""
    return {"role": "assistant", "content": content, **more}
