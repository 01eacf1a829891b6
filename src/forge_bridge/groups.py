"""Task groups raise groups of errors; flows want the one error that mattered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from forge_core.errors import ForgeError

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


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
