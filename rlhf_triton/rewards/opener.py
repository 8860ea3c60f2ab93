"""HTTP for requests that carry a key, which must reach no other address. Needs the standard library alone."""

import urllib.parse
import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would send the key to the new address, and turn POST into GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return the opener of requests to `url`; `http_proxy` does not apply to an address of this machine."""
    return urllib.request.build_opener(_NoRedirects, *([urllib.request.ProxyHandler({})] if is_loopback(url) else []))


def is_loopback(url: str) -> bool:
    """Return whether a URL names this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
