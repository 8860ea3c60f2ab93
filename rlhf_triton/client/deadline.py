"""`timeout`, asyncio's or, for Python 3.10, that of the package async_timeout."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
