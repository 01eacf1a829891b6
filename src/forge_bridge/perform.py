"""The one place where a ``Ready`` becomes effects (architecture.md, Ready).

Records are durable before messages are enqueued, and both before any action runs.  The crash
tests stand at :data:`FaultPoint`: every durable write and every action passes through it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from forge_core.ports import Ledger
from forge_core.ready import Action, Message, Ready

FaultPoint = Callable[[str], None]
"""Called with the name of the point that is reached; may never return."""


def no_faults(point: str) -> None:
    """What production does at a fault point: nothing."""


async def record(ready: Ready, ledger: Ledger, reach: FaultPoint) -> None:
    """Make the records durable, all or none: half a step would contradict the next one.

    :raises DiskUnusable: nothing that the records announce may happen.
    """
    if not ready.records:
        return
    kinds = "+".join(line.kind for line in ready.records)
    reach(f"{kinds}:before")
    await ledger.append_all([(line.kind, line.data) for line in ready.records])
    reach(f"{kinds}:after")


async def carry_out(
    ready: Ready,
    put: Callable[[Message], Awaitable[None]],
    act: Callable[[Action], Awaitable[None]],
    reach: FaultPoint,
) -> None:
    """Enqueue the messages, then run the actions; the records are durable already."""
    for message in ready.messages:
        await put(message)
        reach(f"{message.method}:enqueued")
    for action in ready.actions:
        name = type(action).__name__
        reach(f"{name}:before")
        await act(action)
        reach(f"{name}:after")
