"""Blocking SDK calls in worker threads: bounded in number, in time and in what is left behind.

A cancelled await leaves its thread running until the call returns or times out (architecture.md,
Threads), so threads are counted by when they end, not by when their caller stopped waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
from anyio import to_thread

from forge_core.errors import EngineTimedOut
from forge_edges.docker_errors import timed_out, translated

T = TypeVar("T")

_GRACE_S: Final = 2.0
"""On top of the socket's own timeout, which counts per read and not per answer."""


class EngineCalls:
    """Runs blocking calls one per thread.

    :param timeout_ms: how long one call may take.
    :param max_calls: how many may run at once; as many again may be left behind by cancelled
        callers before further calls are refused.
    """

    def __init__(self, *, timeout_ms: int, max_calls: int) -> None:
        self._timeout_s = timeout_ms / 1000 + _GRACE_S
        self._limiter = anyio.CapacityLimiter(max_calls)
        self._max_threads = 2 * max_calls
        self._lock = threading.Lock()
        self._running = 0

    async def run(self, what: str, call: Callable[[], T]) -> T:
        """The result of ``call``.

        :param what: what is being done, as in "cannot <what>".
        :raises ForgeError: an engine error of :mod:`forge_core.errors`.
        """
        with anyio.move_on_after(self._timeout_s), translated(what):
            return await to_thread.run_sync(
                lambda: self._counted(what, call), abandon_on_cancel=True, limiter=self._limiter
            )
        raise timed_out(what)

    def _counted(self, what: str, call: Callable[[], T]) -> T:
        with self._lock:
            if self._running >= self._max_threads:
                raise EngineTimedOut(
                    f"cannot {what}: {self._running} earlier calls still wait for the engine"
                )
            self._running += 1
        try:
            return call()
        finally:
            with self._lock:
                self._running -= 1
