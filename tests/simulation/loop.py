"""An event loop in virtual time: when nothing is ready, the clock jumps to the next timer.

Everything that runs belongs to a *process*, named by a context variable that tasks and timers
inherit.  A process can be killed, after which nothing of it ever runs again, not even a
``finally``; or frozen, after which it runs on where it stood (signal(7): SIGKILL, SIGSTOP).
One callback is one step.  Iteration over sets of tasks and scopes, which asyncio and anyio do,
follows the order of creation, so that a run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio._backends._asyncio as anyio_backend
import anyio.to_thread

PROCESS: Final = contextvars.ContextVar("process", default="world")

START_S: Final = 1_000.0
"""How long the simulated host has been up at the first step."""

BUSY_STEPS: Final = 2_000
"""So many steps take some time even where nobody waits: time passes for a busy loop too."""


class NothingLeftError(Exception):
    """No callback is ready and no timer is set: everybody waits for ever."""


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number, for the order of sets, and that knows its process."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self.number = number
        context = kwargs.pop("context", None) or contextvars.copy_context()
        self.process = _process_of(context)
        super().__init__(*args, context=context, **kwargs)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """One callback at a time.

    :ivar steps: how many callbacks have run.
    :ivar after_step: called after each.
    """

    # What BaseEventLoop keeps, which its stubs do not say.
    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.after_step: Callable[[], None] = lambda: None
        self._now_s = START_S
        self._since_advance = 0
        self._dead: set[str] = set()
        self._parked: dict[str, list[asyncio.Handle]] = {}
        self._corpses: list[asyncio.Task[Any]] = []
        numbers = itertools.count(1)

        def task(loop: Any, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
            return _Task(coroutine, loop=loop, number=next(numbers), **kwargs)

        self.set_task_factory(task)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def kill(self, process: str) -> None:
        """Nothing of this process runs again; its tasks are kept until the end, and never told."""
        self._dead.add(process)
        self._parked.pop(process, None)
        self._corpses += [
            task
            for task in asyncio.all_tasks(self)
            if isinstance(task, _Task) and task.process == process
        ]

    def is_dead(self, process: str) -> bool:
        """Whether it was killed."""
        return process in self._dead

    def freeze(self, process: str) -> None:
        """Nothing of this process runs until :meth:`thaw`; timers pass meanwhile."""
        if process not in self._dead:
            self._parked.setdefault(process, [])

    def thaw(self, process: str) -> None:
        """It runs on; idempotent."""
        self._ready.extend(self._parked.pop(process, ()))

    def is_frozen(self, process: str) -> bool:
        """Whether it is stopped at the moment."""
        return process in self._parked

    def _run_once(self) -> None:
        if not self._ready or self._since_advance >= BUSY_STEPS:
            self._advance()
        handle = self._ready.popleft()
        if handle._cancelled:
            return
        process = _process_of(handle._context)
        if process in self._dead:
            return
        if process in self._parked:
            self._parked[process].append(handle)
            return
        self.steps += 1
        self._since_advance += 1
        handle._run()
        self.after_step()

    def _advance(self) -> None:
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not timers:
            if self._ready:
                return
            raise NothingLeftError
        self._since_advance = 0
        self._now_s = max(self._now_s, timers[0]._when)
        while timers and timers[0]._when <= self._now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            self._ready.append(timer)

    def _write_to_self(self) -> None:
        raise AssertionError("a thread has called into the simulation")

    def _process_events(self, event_list: Any) -> None:
        raise AssertionError("the simulation has no sockets")


def _process_of(context: contextvars.Context) -> str:
    return context.get(PROCESS, "world")


def context_of(process: str) -> contextvars.Context:
    """A context in which whatever is scheduled belongs to ``process``."""
    context = contextvars.copy_context()
    context.run(PROCESS.set, process)
    return context


@contextmanager
def ordered_scopes() -> Iterator[None]:
    """Make the sets of cancel scopes inside anyio iterate in the order of creation."""
    numbers = itertools.count(1)
    original = anyio_backend.CancelScope

    class OrderedScope(original):  # type: ignore[misc, valid-type]
        __slots__ = ("number",)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.number = next(numbers)
            super().__init__(*args, **kwargs)

        def __hash__(self) -> int:
            return self.number

    anyio_backend.CancelScope = OrderedScope  # type: ignore[misc]
    try:
        yield
    finally:
        anyio_backend.CancelScope = original  # type: ignore[misc]


@contextmanager
def no_threads() -> Iterator[None]:
    """Refuse worker threads: when they come back is no function of a seed."""
    original = anyio.to_thread.run_sync

    async def refuse(function: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError(f"the simulation has no threads: {function}")

    anyio.to_thread.run_sync = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        anyio.to_thread.run_sync = original


@contextmanager
def virtual_loop() -> Iterator[VirtualLoop]:
    """A loop for the block; what still runs at its end is thrown away without a word.

    The collector stands still meanwhile, so that no finalizer runs in the middle of a step.
    """
    loop = VirtualLoop()
    hook = sys.unraisablehook
    gc.disable()
    try:
        with ordered_scopes(), no_threads():
            yield loop
    finally:
        sys.unraisablehook = lambda _unraisable: None
        loop.set_exception_handler(lambda _loop, _context: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop._ready.clear()
            loop._scheduled.clear()
            loop._parked.clear()
            for task in {*asyncio.all_tasks(loop), *loop._corpses}:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop._corpses.clear()
            loop.close()
            gc.enable()
            gc.collect(0)  # nothing was promoted meanwhile
        sys.unraisablehook = hook
