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
    """

    def __init__(self, task_group: anyio.abc.TaskGroup, *, limit: int) -> None:
        self._task_group = task_group
        self._limit = limit
        self._waiting: dict[Hashable, deque[Job]] = {}
        self._count = 0

    def submit(self, key: Hashable, job: Job) -> bool:
        """Queue a job behind the others of its key; False when the queue is full."""
        if self._count >= self._limit:
            return False
        self._count += 1
        jobs = self._waiting.get(key)
        if jobs is None:
            self._waiting[key] = deque([job])
            self._task_group.start_soon(self._work, key)
        else:
            jobs.append(job)
        return True

    async def _work(self, key: Hashable) -> None:
        jobs = self._waiting[key]
        while jobs:
            await _do(jobs.popleft())
            self._count -= 1
        del self._waiting[key]


async def _do(job: Job) -> None:
    try:
        await job()
    except ForgeError as error:
        logger.error("cannot finish what a message asked for", error=str(error))
    except Exception:
        logger.exception("what a message asked for failed unexpectedly")
