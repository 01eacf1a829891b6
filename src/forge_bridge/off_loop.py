"""What takes processor time, kept away from the event loop, which keeps leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

AT_ONCE_BYTES: Final = 2048
"""What is read in less time (5 ms) than a worker thread is worth, be it a contract in YAML."""

T = TypeVar("T")


async def off_loop(
    read: Callable[[], T],
    size_bytes: int,
    *,
    at_once_bytes: int = AT_ONCE_BYTES,
    limiter: anyio.CapacityLimiter | None = None,
) -> T:
    """The result of ``read``, which runs in a worker thread unless there is little to read.

    :param size_bytes: the most that it reads; of what it takes from a file, the limit, which
        must be above ``at_once_bytes``.
    :param at_once_bytes: how much is little, of what is read here.
    :param limiter: of the worker threads.
    """
    if size_bytes <= at_once_bytes:
        await anyio.lowlevel.checkpoint()
        return read()
    return await anyio.to_thread.run_sync(read, limiter=limiter)
