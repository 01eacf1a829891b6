"""What a service tells the service manager that started it: sd_notify(3), sd_watchdog_enabled(3).

One datagram a message, to the socket that ``NOTIFY_SOCKET`` names.  Without that variable nobody
listens, and every method does nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final, Self

import structlog

logger = structlog.get_logger(__name__)

NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"


class ServiceManager:
    """The service manager, or nobody.

    Sending never waits and never fails: a manager that does not listen is no reason to stop.

    :ivar watchdog_ms: the manager restarts a service that is silent for so long; None: it does not.
    """

    def __init__(self, address: str | None = None, watchdog_ms: int | None = None) -> None:
        self._address = address
        self.watchdog_ms = watchdog_ms

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> Self:
        """What the manager has put into the environment of process ``pid``."""
        address = environment.get(NOTIFY_SOCKET, "")
        if not address.startswith(("/", "@")):
            return cls()
        for_us = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        interval_us = environment.get("WATCHDOG_USEC", "")
        watched = for_us and interval_us.isascii() and interval_us.isdecimal()
        return cls(address, int(interval_us) // 1000 or None if watched else None)

    def ready(self) -> None:
        """Start-up is complete."""
        self._send("READY=1")

    def alive(self) -> None:
        """Everything still moves; due at least every :attr:`watchdog_ms`."""
        self._send("WATCHDOG=1")

    def stopping(self, within_ms: int) -> None:
        """The end has begun and takes at most so long, whatever the unit's own timeout says."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={within_ms * 1000}")

    def _send(self, message: str) -> None:
        if self._address is None:
            return
        # A leading @ stands for the NUL of an abstract name (unix(7)).
        address = f"\0{self._address[1:]}" if self._address[0] == "@" else self._address
        flags = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        try:
            with socket.socket(socket.AF_UNIX, flags) as door:
                door.sendto(message.encode(), address)
        except OSError as error:
            logger.warning("cannot tell the service manager", message=message, error=str(error))
