"""Task groups raise groups of errors; flows want the one error that mattered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import structlog

from forge_core.errors import ForgeError

T = TypeVar("T")
R = TypeVar("R")

logger = structlog.get_logger(__name__)


@contextmanager
def first_error() -> Iterator[None]:
    """Let the first error out of an exception group, and log the others.

    A bug comes before every expected error: whoever waits for one must not take it for that.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = sorted(_leaves(group), key=lambda error: isinstance(error, ForgeError))
        for other in others:
            logger.warning("a task failed besides", error=str(other), type=type(other).__name__)
        raise first from first.__cause__


async def for_each(
    function: Callable[[T], Awaitable[R]], items: Iterable[T], *, at_once: int
) -> tuple[R, ...]:
    """What ``function`` returns for each of the items, in their order; a few run at a time.

    The first error ends them all, as :func:`first_error` says.
    """
    results: dict[int, R] = {}
    waiting = enumerate(items)

    async def work() -> None:
        for number, item in waiting:
            results[number] = await function(item)

    with first_error():
        async with anyio.create_task_group() as tasks:
            for _ in range(at_once):
                tasks.start_soon(work)
    return tuple(results[number] for number in sorted(results))


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
