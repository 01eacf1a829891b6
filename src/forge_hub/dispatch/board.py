"""What the parts of the dispatcher share."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from forge_core.ports import Clock
from forge_hub.connections import Connections
from forge_hub.dispatch.leases import Key, Leases
from forge_hub.dispatch.looks import Looks
from forge_hub.dispatch.offers import Offers
from forge_hub.feed import Change, Feed
from forge_hub.sources import CredentialSource, SecretSource
from forge_hub.store.database import Database


@dataclass(frozen=True, slots=True)
class Timing:
    """The dispatcher's own durations.

    :param heartbeat_interval_ms: how often runners were asked to heartbeat.
    :param kill_grace_ms: how long a runner may take to end an attempt whose lease is over.
    :param publish_ttl_ms: how long a publish credential may be used, and a push still arrive.
    """

    heartbeat_interval_ms: int = 15_000
    offer_ttl_ms: int = 30_000
    kill_grace_ms: int = 30_000
    publish_ttl_ms: int = 300_000


class Alarm:
    """Wakes the dispatcher; ringing before it sleeps is not lost."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Something changed: look again."""
        self._event.set()

    async def wait(self) -> None:
        """Return when it rang since the last wait."""
        await self._event.wait()
        self._event = anyio.Event()


@dataclass(frozen=True, slots=True)
class Board:
    """The database is the truth; offers and leases are the deadlines of what lives."""

    database: Database
    connections: Connections
    feed: Feed
    clock: Clock
    timing: Timing
    offers: Offers
    leases: Leases
    secrets: SecretSource | None = None
    credentials: CredentialSource | None = None
    looks: Looks = field(default_factory=Looks)
    alarm: Alarm = field(default_factory=Alarm)

    def changed(self, session_id: str) -> None:
        """A session was changed: let watchers and the dispatcher look again."""
        self.feed.publish(session_id, Change())
        self.alarm.ring()

    def forget(self, key: Key) -> None:
        """Drop what memory holds about a dispatch that has ended, its lease key first."""
        lease = self.leases.get(key)
        self.leases.end(key)
        self.offers.remove(*key)
        if lease is not None:
            runner = self.connections.get(lease.to.runner_id, lease.to.instance_id)
            if runner is not None:
                runner.misses.pop(key, None)
