"""Whose is it? How a pass sorts what the engine lists (lifecycle.md, Start-up and reaping)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from forge_core.admission import Reservation
from forge_core.labels import Key, Owner, is_ours
from forge_core.ports import EngineResource
from forge_core.ready import Record
from forge_core.teardown import Removal, removal_plan
from forge_core.wire.codes import ReservationState


class Claim(StrEnum):
    """What a pass may do with a resource."""

    LIVE = "live"
    """A dispatch of this instance, or all of them, use it, or a teardown is at it: leave."""
    ENDED = "ended"
    """Of this instance, and its dispatch has ended: remove."""
    OLD_INSTANCE = "old_instance"
    """Of an earlier life of this runner: remove, never adopt (B-82)."""
    FOREIGN = "foreign"
    """Somebody else's: never touched."""
    DISAGREES = "disagrees"
    """Carries our labels under a name that we did not give: warn, never touch."""


def claim_of(
    resource: EngineResource,
    *,
    runner_id: str,
    runner_instance_id: str,
    reservations: Mapping[Key, Reservation],
) -> tuple[Claim, Owner | None]:
    """Sort one resource, and say whose it is when it is ours."""
    owner = Owner.from_labels(resource.labels)
    if owner is None or owner.runner_id != runner_id:
        return Claim.FOREIGN, None
    if not is_ours(resource.name, resource.labels):
        return Claim.DISAGREES, None
    if owner.runner_instance_id != runner_instance_id:
        return Claim.OLD_INSTANCE, owner
    if owner.is_lasting:
        return Claim.LIVE, owner
    reservation = reservations.get(owner.key)
    if reservation is None or reservation.state is ReservationState.DEGRADED:
        return Claim.ENDED, owner
    return Claim.LIVE, owner


def removals_of_all(
    dispatches: Mapping[Owner, Sequence[Record]],
    listed: Iterable[EngineResource],
    *,
    runner_id: str,
) -> tuple[tuple[Owner, Removal], ...]:
    """What there is to remove while no instance of this runner lives.

    :param dispatches: those that have a ledger, with its records.
    """
    found: dict[Owner, list[EngineResource]] = defaultdict(list)
    for resource in listed:
        claim, owner = claim_of(
            resource, runner_id=runner_id, runner_instance_id="", reservations={}
        )
        if claim is Claim.OLD_INSTANCE and owner is not None:
            found[owner].append(resource)
    return tuple(
        (owner, removal)
        for owner in {**dispatches, **found}
        for removal in removal_plan(dispatches.get(owner, ()), found.get(owner, ()))
    )
