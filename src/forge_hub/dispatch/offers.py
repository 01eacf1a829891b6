"""Offers that wait for their decision, and runners that said no a moment ago."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_core.placement import Declined
from forge_core.resources import ResourceVector
from forge_core.wire.from_hub import Offer
from forge_hub.attempt_input import Addressee


@dataclass(frozen=True, slots=True)
class PendingOffer:
    """One undecided offer."""

    to: Addressee
    offer: Offer
    expires_at_ms: int


class Offers:
    """Undecided offers by attempt and fence; memory only, rebuilt from the database."""

    def __init__(self, *, decline_backoff_ms: int) -> None:
        self._pending: dict[tuple[str, int], PendingOffer] = {}
        self._declined: dict[tuple[str, str], tuple[Declined, int]] = {}
        self._decline_backoff_ms = decline_backoff_ms

    def __iter__(self) -> Iterator[PendingOffer]:
        return iter(list(self._pending.values()))

    def add(self, pending: PendingOffer) -> None:
        """Wait for a decision."""
        self._pending[pending.to.attempt_id, pending.to.fence] = pending

    def remove(self, attempt_id: str, fence: int) -> PendingOffer | None:
        """Wait no more."""
        return self._pending.pop((attempt_id, fence), None)

    def outstanding(self, runner_id: str) -> ResourceVector:
        """What a runner's undecided offers will take."""
        total = ResourceVector()
        for pending in self._pending.values():
            if pending.to.runner_id == runner_id:
                total += pending.offer.resources
        return total

    def decline(self, to: Addressee, declined: Declined, now_ms: int) -> None:
        """Do not ask this runner about this attempt again at once."""
        until_ms = now_ms + self._decline_backoff_ms
        self._declined[to.attempt_id, to.runner_id] = declined, until_ms

    def declined(self, attempt_id: str, runner_id: str, now_ms: int) -> Declined | None:
        """Why the runner said no, while that still counts."""
        declined, until_ms = self._declined.get((attempt_id, runner_id), (None, 0))
        return declined if until_ms > now_ms else None

    def forgive(self, runner_id: str) -> None:
        """A runner that registered anew is asked again."""
        for key in [k for k in self._declined if k[1] == runner_id]:
            del self._declined[key]

    def next_deadline_ms(self, now_ms: int) -> int | None:
        """When an offer expires or a runner may be asked again; drops what has passed."""
        self._declined = {k: v for k, v in self._declined.items() if v[1] > now_ms}
        deadlines = [p.expires_at_ms for p in self._pending.values()]
        deadlines += [until_ms for _, until_ms in self._declined.values()]
        return min(deadlines, default=None)
