"""Work in order per key, while different keys never wait for one another."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import anyio.abc

Job = Callable[[], Awaitable[None]]


class KeyedQueue:
    """One short-lived worker per key, in the owner's task group.

    :param limit: how many jobs may wait in all keys together.
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
            job = jobs.popleft()
            self._count -= 1
            await job()
        del self._waiting[key]
