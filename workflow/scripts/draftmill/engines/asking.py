"""One GET to a server, which only that server sees: no proxy, no ~/.netrc, no redirect may come between."""

from __future__ import annotations

import requests


def get(
    address: str, route: str, key: str, timeout_s: float | tuple[float, float] = (3, 30)
) -> requests.Response:
    """The server's reply. ``timeout_s``: for all, or to connect and to read. Raises requests.RequestException."""
    with requests.Session() as session:
        session.trust_env = False  # no proxy may see the key
        return session.get(
            address.rstrip("/") + route,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            allow_redirects=False,
        )
