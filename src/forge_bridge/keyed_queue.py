"""Work in order per key, while different keys never wait for one another."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import anyio.abc
import structlog

from forge_core.errors import ForgeError

Job = Callable[[], Awaitable[None]]

logger = structlog.get_logger(__name__)


class KeyedQueue:
    """One short-lived worker per key, in the owner's task group.

    A job that raises ends alone: what one message brings about must not end the others' work.

    :param limit: how many jobs may wait or run in all keys together.
    :param max_bytes: how much all of them together may hold.
    """

    def __init__(self, task_group: anyio.abc.TaskGroup, *, limit: int, max_bytes: int = 0) -> None:
        self._task_group = task_group
        self._limit = limit
        self._max_bytes = max_bytes
        self._waiting: dict[Hashable, deque[tuple[Job, int]]] = {}
        self._count = 0
        self._size_bytes = 0

    def submit(self, key: Hashable, job: Job, *, size_bytes: int = 0) -> bool:
        """Queue a job behind the others of its key; False when there is no room for it.

        :param size_bytes: what the job holds; one that holds next to nothing says 0.
        """
        if self._count >= self._limit or (
            size_bytes and self._size_bytes + size_bytes > self._max_bytes
        ):
            return False
        self._count += 1
        self._size_bytes += size_bytes
        jobs = self._waiting.get(key)
        if jobs is None:
            self._waiting[key] = deque([(job, size_bytes)])
            self._task_group.start_soon(self._work, key)
        else:
            jobs.append((job, size_bytes))
        return True

    async def _work(self, key: Hashable) -> None:
        jobs = self._waiting[key]
        while jobs:
            job, size_bytes = jobs.popleft()
            await _do(job)
            self._count -= 1
            self._size_bytes -= size_bytes
        del self._waiting[key]


async def _do(job: Job) -> None:
    try:
        await job()
    except ForgeError as error:
        logger.error("cannot finish what a message asked for", error=str(error))
    except Exception:
        logger.exception("what a message asked for failed unexpectedly")
