"""What the host says to every PID 1 of an attempt: orders under its lease, and each renewal.

sandbox.md, *PID 1*: whatever an attempt runs, beside the agent too, ends with its lease, also when
the bridge is gone or stands still.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import anyio

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.errors import EngineUnreachable
from forge_core.lease import Deadline
from forge_core.supervisor_frames import MAX_INIT_BYTES, init_frame, lease_frame
from forge_core.wire.codes import FailureCode
from forge_core.wire.from_hub import LeaseUpdate

NAMED_VARIABLES: Final = 3
CLAIM_TOLERANCE_MS: Final = 5_000
"""How much earlier than the host's own deadline PID 1 may say that it has passed."""


@dataclass(frozen=True, slots=True)
class Command:
    """What PID 1 is to run; the environment may hold secrets.

    :param program: for people: what this is, within its attempt.
    :param too_large: what it means for the attempt when PID 1 does not take as much.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    hard_wall_ms: int
    idle_ms: int
    max_output_bytes: int
    program: str = "the program"
    too_large: FailureCode = FailureCode.AGENT_FAILED


def orders(context: StageContext, command: Command, *, ready_ms: int) -> bytes:
    """The ``init`` frame under the attempt's lease as it is now.

    :param ready_ms: when PID 1 said that it is ready, from where both sides count: however long
        these orders are on their way, through an engine that stands still, PID 1 counts no longer
        than we.
    :raises StageFailed: ``command.too_large``: they are more than PID 1 takes.
    """
    lease = context.run.state.lease
    assert lease is not None
    frame = init_frame(
        attempt_id=context.start.attempt_id,
        fence=context.start.fence,
        key=lease.key,
        sequence=lease.sequence,
        lease_ms=max(0, lease.deadline_ms - ready_ms),
        hard_wall_ms=command.hard_wall_ms,
        idle_ms=command.idle_ms,
        grace_ms=context.settings.kill_grace_ms,
        argv=command.argv,
        environment=command.environment,
        directory=command.directory,
        max_output_bytes=command.max_output_bytes,
    )
    if len(frame) > MAX_INIT_BYTES + 1:
        raise _too_large(context, command, len(frame))
    return frame


def _too_large(context: StageContext, command: Command, size_bytes: int) -> StageFailed:
    """Names what takes the most, and tells of no value."""
    sizes = {name: len(value.encode()) for name, value in command.environment.items()}
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:NAMED_VARIABLES]
    named = ", ".join(f"{name} {sizes[name]}" for name in largest)
    arguments_bytes = sum(len(part.encode()) for part in command.argv)
    return StageFailed(
        command.too_large,
        f"cannot start {command.program} of attempt {context.start.attempt_id}: arguments and"
        f" environment have {size_bytes} bytes as JSON, {MAX_INIT_BYTES} is the most; the"
        f" arguments have {arguments_bytes}, the largest of {len(sizes)} variables {named};"
        " shorten them",
    )


class Renewals:
    """The newest one, as soon as PID 1 reads; the ones before it say nothing more."""

    def __init__(self, run: AttemptRun) -> None:
        self._run = run
        self._newest: LeaseUpdate | None = None
        self._arrived = anyio.Event()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take what is accepted within the block."""
        self._run.renewal_takers.append(self._take)
        try:
            yield
        finally:
            self._run.renewal_takers.remove(self._take)

    async def hand_on(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Until PID 1 is gone, or the engine: which of them is seen when its end is looked at."""
        while True:
            await self._arrived.wait()
            self._arrived = anyio.Event()
            assert self._newest is not None
            try:
                await send(lease_frame(self._newest))
            except EngineUnreachable as error:
                self._run.log.info("cannot hand on a renewal", error=str(error))
                return

    def _take(self, update: LeaseUpdate) -> None:
        self._newest = update
        self._arrived.set()


def is_plausible(context: StageContext, claimed: Deadline) -> bool:
    """Whether a deadline that PID 1 says has passed can have passed by the host's own clock."""
    lease = context.run.state.lease
    assert lease is not None
    at_ms = {
        Deadline.LEASE: lease.deadline_ms,
        Deadline.HARD_WALL: lease.hard_wall_at_ms,
        Deadline.IDLE: lease.idle_at_ms,
    }[claimed]
    return at_ms is not None and context.runner.clock.now_ms() >= at_ms - CLAIM_TOLERANCE_MS
