"""The invariants at the end of a run: what the hub was told, against what really happened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forge_core.admission import Key
from forge_core.wire.codes import RemovalOutcome

from .disk import ledger_path

if TYPE_CHECKING:
    from .simulation import Simulation


def check_publications(simulation: Simulation) -> None:
    """What the hub was told of a push is so, or nobody knew."""
    effective = {(branch, commit) for branch, _, commit in simulation.remote.moved}
    for dispatch in simulation.hub.dispatches.values():
        told = dispatch.publication
        arrived = (dispatch.attempt.branch, dispatch.redeemed) in effective
        if told in ("pushed", "already_published"):
            simulation.world.require(arrived, "published", f"{dispatch.id} was not {told}")
        elif told in ("stale_remote", "aborted"):
            simulation.world.require(not arrived, "published", f"{dispatch.id} was not {told}")


def check_reports(simulation: Simulation, removed: Mapping[str, Key]) -> None:
    """But for what only a ledger told of that was found to be damaged."""
    named = {
        resource["name"]
        for (method, _), payload in simulation.hub.seen.items()
        if method == "SubmitCleanupReport"
        for resource in payload["resources"]
        if resource["outcome"] != RemovalOutcome.FAILED
    }
    for name, key in removed.items():
        told = name in named or _is_suspect(simulation, ledger_path(*key))
        simulation.world.require(told, "reported", f"{name} was removed and no report says so")


def check_delivery(simulation: Simulation) -> None:
    hub, require = simulation.hub, simulation.world.require
    for (method, identity), path in simulation.checkers.recorded.items():
        require(
            (method, identity) in hub.seen
            or _was_replaced(simulation, method, identity)
            or _is_lost(simulation, path),
            "delivered",
            f"{method} {identity} of {path} never arrived",
        )
    for dispatch in hub.dispatches.values():
        if dispatch.fence < dispatch.attempt.fence:
            continue
        sequences = sorted(dispatch.events)
        whole = sequences == list(range(1, len(sequences) + 1))
        require(whole, "delivered", f"events of {dispatch.id} have holes: {sequences}")
        if dispatch.accepted and not _is_lost(simulation, ledger_path(*dispatch.id)):
            final = any(r["cleanup"] == "complete" for r in dispatch.results.values())
            require(final, "delivered", f"{dispatch.id} was accepted and has no final result")


def _was_replaced(simulation: Simulation, method: str, identity: str) -> bool:
    """A first revision need not arrive once the second has."""
    later = identity.removesuffix("r1") + "r2"
    return method == "SubmitDispatchResult" and (method, later) in simulation.hub.seen


def _is_lost(simulation: Simulation, ledger: str) -> bool:
    return _is_suspect(simulation, ledger) or ledger in simulation.disk.forgotten


def _is_suspect(simulation: Simulation, ledger: str) -> bool:
    return ledger.replace(".ledger", ".suspect") in simulation.disk.files
