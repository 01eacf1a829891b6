"""One piece of work per key at a time, for all who want its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class _Flight(Generic[T]):
    """Work under way."""

    __slots__ = ("done", "failure", "results")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.results: tuple[T, ...] = ()
        self.failure: Exception | None = None


class OncePerKey(Generic[T]):
    """Whoever comes first works; those who come meanwhile wait and get the same, good or bad.

    A failure is not tried again by each who waited for it.  Work that was cancelled has no
    outcome: the next one works.
    """

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The result, and whether it was worked for here."""
        while (flight := self._flights.get(key)) is not None:
            await flight.done.wait()
            if flight.failure is not None:
                raise flight.failure
            if flight.results:
                return flight.results[0], False
        flight = _Flight()
        with self._holding(key, flight):
            try:
                result = await work()
            except Exception as error:
                flight.failure = error
                raise
            flight.results = (result,)
            return result, True

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Keep the key for the block, without a result; False when somebody has it already."""
        if key in self._flights:
            yield False
            return
        with self._holding(key, _Flight()):
            yield True

    @contextmanager
    def _holding(self, key: str, flight: _Flight[T]) -> Iterator[None]:
        self._flights[key] = flight
        try:
            yield
        finally:
            del self._flights[key]
            flight.done.set()
