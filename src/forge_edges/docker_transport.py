"""The SDK's Unix-socket transport with two faults mended.

The SDK (7.2) leaves a socket unclosed when it cannot connect, and keeps one connection pool for
each URL ever asked for, so that its connections are hardly ever used twice.
"""

from __future__ import annotations

import socket
from typing import Any

from docker.transport.unixconn import (
    UnixHTTPAdapter,
    UnixHTTPConnection,
    UnixHTTPConnectionPool,
)


class _Connection(UnixHTTPConnection):
    def connect(self) -> None:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.settimeout(self.timeout)
            client.connect(self.unix_socket)
        except OSError:
            client.close()
            raise
        self.sock = client


class _Pool(UnixHTTPConnectionPool):
    def _new_conn(self) -> _Connection:  # type: ignore[override]
        timeout_s: Any = self.timeout
        return _Connection(self.base_url, self.socket_path, timeout_s)


class UnixSocketAdapter(UnixHTTPAdapter):
    """One pool for one engine."""

    def get_connection(self, url: str | bytes, proxies: Any = None) -> _Pool:
        """The pool, whatever the URL."""
        with self.pools.lock:
            pool = self.pools.get(self.socket_path)
            if pool is None:
                pool = _Pool(
                    "http+docker://engine", self.socket_path, self.timeout, self.max_pool_size
                )
                self.pools[self.socket_path] = pool
        return pool
