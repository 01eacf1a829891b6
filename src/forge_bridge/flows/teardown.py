"""Remove everything of a dispatch, and prove it (lifecycle.md, Start-up and reaping)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_core.attempt_events import ResourcesRemoved
from forge_core.errors import DiskUnusable, EngineConflict, EngineNotFound, ForgeError
from forge_core.labels import Owner, attempt_filter
from forge_core.ports import EngineResource, ResourceHolder
from forge_core.ready import Record
from forge_core.teardown import Removal, removal_plan
from forge_core.wire.codes import CleanupTrigger, RemovalOutcome, ResourceKind
from forge_core.wire.shapes import RemovedResource

logger = structlog.get_logger(__name__)

ROUNDS = 3
"""A create that timed out may happen while we remove: list, remove, and look again."""


async def tear_down(run: AttemptRun, trigger: CleanupTrigger) -> tuple[RemovedResource, ...]:
    """Remove what its ledger names and what its holder lists; then free the capacity."""
    holder = run.runner.holder(run.state.runtime)
    removed = await remove_all(holder, run.state.owner, run.records)
    try:
        await run.feed(ResourcesRemoved(trigger, removed))
    except DiskUnusable as error:
        # Gone, but not provably: the capacity stays taken until a pass has said so on disk.
        run.log.error("cannot record the cleanup", error=str(error))
        run.degrade()
    return removed


async def remove_all(
    holder: ResourceHolder,
    owner: Owner,
    records: Iterable[Record] = (),
    known: Sequence[EngineResource] = (),
) -> tuple[RemovedResource, ...]:
    """Remove everything of one dispatch, and look until its holder lists nothing of it.

    Nothing failed: all that was ever known of it was observed gone.

    :param records: its ledger, where there is one.
    :param known: what a list named before, where there is no ledger.
    """
    removed: dict[tuple[ResourceKind, str], RemovedResource] = {}
    for round_number in range(ROUNDS):
        listed, unlisted = await _list(holder, owner)
        if round_number == 0 and unlisted is not None:
            listed = tuple(known)
        plan = removal_plan(records if round_number == 0 else (), listed)
        for removal in plan:
            removed[removal.kind, removal.id] = await remove(holder, removal)
        if unlisted is not None:
            removed = {key: _unobserved(r, unlisted) for key, r in removed.items()}
        resists = any(r.outcome is RemovalOutcome.FAILED for r in removed.values())
        if resists or not plan:
            break
    return tuple(removed.values())


async def remove(holder: ResourceHolder, removal: Removal) -> RemovedResource:
    """Remove one resource; one that is gone already is ``absent``, and that is success."""
    outcome, detail = RemovalOutcome.REMOVED, None
    try:
        match removal.kind:
            case ResourceKind.CONTAINER:
                await holder.remove_container(removal.id)
            case ResourceKind.NETWORK:
                await _remove_network(holder, removal)
            case ResourceKind.VOLUME:
                await holder.remove_volume(removal.id)
    except EngineNotFound:
        outcome = RemovalOutcome.ABSENT
    except ForgeError as error:
        outcome, detail = RemovalOutcome.FAILED, str(error)[:2000]
        logger.warning("a resource resists removal", name=removal.name, error=str(error))
    return RemovedResource(
        kind=removal.kind,
        id=removal.id,
        name=removal.name,
        role=removal.role,
        outcome=outcome,
        detail=detail,
    )


async def _remove_network(holder: ResourceHolder, network: Removal) -> None:
    """The network is ours, so whatever still hangs on it, an endpoint left by a crash too, goes."""
    try:
        await holder.remove_network(network.id)
    except EngineConflict:
        for endpoint in await holder.network_endpoints(network.id):
            logger.warning("disconnecting an endpoint", network=network.name, endpoint=endpoint)
            try:
                await holder.disconnect_network(network.id, endpoint)
            except EngineNotFound:
                continue
        await holder.remove_network(network.id)


def _unobserved(resource: RemovedResource, why: str) -> RemovedResource:
    """Without a list nothing is known to be gone, so the capacity stays taken."""
    detail = f"its absence was not observed: {why}"[:2000]
    return resource.model_copy(update={"outcome": RemovalOutcome.FAILED, "detail": detail})


async def _list(
    holder: ResourceHolder, owner: Owner
) -> tuple[tuple[EngineResource, ...], str | None]:
    try:
        return tuple(await holder.list_resources(attempt_filter(owner))), None
    except ForgeError as error:
        logger.warning(
            "cannot list the resources of the attempt",
            attempt_id=owner.attempt_id,
            fence=owner.fence,
            error=str(error),
        )
        return (), str(error)
