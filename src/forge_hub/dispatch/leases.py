"""The leases of running dispatches, as long as this process lives (B-70; protocol.md, Lease).

The key is in memory only.  After a restart of the hub a dispatch is known without its key: it
cannot be renewed, its lease runs out on the runner, and it is settled by its result or by silence.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from forge_core.wire.from_hub import LeaseUpdate, Start
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_hub.attempt_input import Addressee, AttemptInput
from forge_hub.grants import Handles

Key = tuple[str, int]
"""(attempt id, fence)"""


@dataclass(slots=True)
class Lease:
    """One running dispatch.

    :ivar sent_at_ms: when the last grant or renewal was sent.
    :ivar key: None: given out by an earlier life of the hub.
    """

    to: Addressee
    ttl_ms: int
    sent_at_ms: int
    key: bytes | None = field(repr=False)
    start: Start | None = field(default=None, repr=False)
    sequence: int = 0
    cancelled: bool = False

    @property
    def id(self) -> Key:
        """Attempt and fence."""
        return self.to.attempt_id, self.to.fence

    @property
    def renew_at_ms(self) -> int:
        """A third of the ttl after the last one: two may be lost before the lease ends."""
        return self.sent_at_ms + self.ttl_ms // 3

    @property
    def ends_at_ms(self) -> int:
        """When it is over unless it is renewed."""
        return self.sent_at_ms + self.ttl_ms

    def silent_at_ms(self, kill_grace_ms: int) -> int:
        """When the runner has surely ended it by itself (protocol.md, A lost hub)."""
        return self.sent_at_ms + 2 * self.ttl_ms + kill_grace_ms

    def renewal(self, now_ms: int, issued_at: str) -> LeaseUpdate:
        """The next renewal, signed."""
        assert self.key is not None and not self.cancelled  # noqa: PT018
        self.sequence += 1
        self.sent_at_ms = now_ms
        attempt_id, fence = self.id
        message = lease_message(attempt_id, fence, self.sequence, self.ttl_ms, issued_at)
        return LeaseUpdate(
            attempt_id=attempt_id,
            fence=fence,
            sequence=self.sequence,
            ttl_ms=self.ttl_ms,
            issued_at=issued_at,
            mac=sign_lease(self.key, message),
        )


class Leases:
    """All leases by attempt and fence."""

    def __init__(self) -> None:
        self._leases: dict[Key, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def get(self, key: Key) -> Lease | None:
        """The lease, while its dispatch has not ended."""
        return self._leases.get(key)

    def grant(
        self, to: Addressee, given: AttemptInput, handles: Handles, *, key: bytes, now_ms: int
    ) -> Start:
        """Open a lease; returns the packet that carries it."""
        start = given.start(to, key=base64.b64encode(key).decode(), handles=handles)
        self._leases[to.attempt_id, to.fence] = Lease(
            to=to, ttl_ms=given.lease_ttl_ms, sent_at_ms=now_ms, key=key, start=start
        )
        return start

    def remember(self, lease: Lease) -> None:
        """Keep a lease that an earlier life of the hub gave out."""
        self._leases[lease.id] = lease

    def end(self, key: Key) -> None:
        """Forget the lease and its key."""
        self._leases.pop(key, None)

    def of_instance(self, runner_id: str, instance_id: str) -> Iterable[Lease]:
        """The leases that this instance holds."""
        return [
            lease
            for lease in self._leases.values()
            if (lease.to.runner_id, lease.to.instance_id) == (runner_id, instance_id)
        ]
