"""Which connection is a runner's current one (B-88).

A message for a runner goes to its currently established connection or nowhere; a newer
registration of the same runner takes the place of the older one, whose messages are refused from
then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from forge_core.wire.base import WireModel
from forge_core.wire.from_bridge import Heartbeat
from forge_core.wire.shapes import SnapshotAttempt

MISSES_BEFORE_DOUBT: Final = 2


class Channel(Protocol):
    """What is needed of a SignalR connection."""

    id: str

    @property
    def is_open(self) -> bool: ...

    def send(self, target: str, payload: object) -> bool: ...

    def close(self, error: str | None = None, *, allow_reconnect: bool = False) -> None: ...


@dataclass(slots=True, eq=False)
class LiveRunner:
    """A registered runner on its current connection.

    :ivar heartbeat_at_ms: when it was last heard of, :meth:`Clock.now_ms`.
    :ivar ready: what it holds is known, so it may be offered more.
    :ivar snapshot: the snapshot that is being read in parts.
    """

    runner_id: str
    instance_id: str
    channel: Channel
    heartbeat_at_ms: int
    ready: bool = False
    snapshot: tuple[str, tuple[SnapshotAttempt, ...]] | None = None
    misses: dict[tuple[str, int], int] = field(default_factory=dict)

    def hear(self, heartbeat: Heartbeat, now_ms: int) -> None:
        """Take a heartbeat: it says that the runner lives, and what it holds.

        A running dispatch that complete heartbeats do not list any more is counted as missed.
        """
        self.heartbeat_at_ms = now_ms
        if heartbeat.attempts_truncated:
            return
        held = {(a.attempt_id, a.fence) for a in heartbeat.attempts}
        for key in self.misses:
            self.misses[key] = 0 if key in held else self.misses[key] + 1

    def watch(self, key: tuple[str, int]) -> None:
        """Begin to count heartbeats that do not list this dispatch."""
        self.misses.setdefault(key, 0)

    def holds(self, key: tuple[str, int]) -> bool:
        """Whether the runner is still believed to hold a dispatch that it accepted."""
        return self.misses.get(key, 0) < MISSES_BEFORE_DOUBT


class Connections:
    """The live runners by id, and by connection."""

    def __init__(self) -> None:
        self._by_runner: dict[str, LiveRunner] = {}
        self._by_channel: dict[str, LiveRunner] = {}

    def establish(
        self, channel: Channel, runner_id: str, instance_id: str, now_ms: int
    ) -> LiveRunner:
        """Make this connection the runner's current one; an older one is closed."""
        self.release(channel)
        older = self._by_runner.get(runner_id)
        if older is not None:
            del self._by_channel[older.channel.id]
            older.channel.close("a newer registration of this runner took over")
        runner = LiveRunner(runner_id, instance_id, channel, now_ms)
        self._by_runner[runner_id] = self._by_channel[channel.id] = runner
        return runner

    def release(self, channel: Channel) -> LiveRunner | None:
        """Forget a connection; returns its runner if this was the current one."""
        runner = self._by_channel.pop(channel.id, None)
        if runner is not None:
            del self._by_runner[runner.runner_id]
        return runner

    def on(self, channel: Channel) -> LiveRunner | None:
        """The runner whose current connection this is."""
        return self._by_channel.get(channel.id)

    def get(self, runner_id: str, instance_id: str | None = None) -> LiveRunner | None:
        """The runner if it is connected, and as this instance when one is named."""
        runner = self._by_runner.get(runner_id)
        if runner is None or not runner.channel.is_open:
            return None
        return runner if instance_id in {None, runner.instance_id} else None

    def send(self, runner_id: str, instance_id: str, target: str, message: WireModel) -> bool:
        """Queue a message for exactly this instance; False: it is not connected (B-88)."""
        runner = self.get(runner_id, instance_id)
        return runner is not None and runner.channel.send(target, message.to_wire())
