"""What to remove, in which order, as data (lifecycle.md, Start-up and reaping).

The plan comes from the ledger (intents as well as facts) and from what the engine lists under
the dispatch's labels, never from memory: a create that timed out may have happened later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forge_core.labels import ROLE, is_ours
from forge_core.ports import EngineResource
from forge_core.ready import Record, RecordKind
from forge_core.wire.codes import ResourceKind

REMOVAL_ORDER: Final = (ResourceKind.CONTAINER, ResourceKind.NETWORK, ResourceKind.VOLUME)
"""Containers hold networks and volumes, so they go first."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to remove; ``id`` is its name where only the intent is known."""

    kind: ResourceKind
    id: str
    name: str
    role: str


def removal_plan(
    records: Iterable[Record], listed: Iterable[EngineResource]
) -> tuple[Removal, ...]:
    """Everything that may exist of a dispatch, each once, in the order of removal.

    A listed resource whose name does not agree with its labels is somebody else's and is left
    alone, even though its labels say that it is ours.
    """
    recorded: dict[tuple[ResourceKind, str], Removal] = {}
    for record in records:
        if record.kind not in (RecordKind.INTENT, RecordKind.FACT):
            continue
        kind, name = ResourceKind(record.data["kind"]), record.data["name"]
        identity = record.data.get("id") or name
        recorded[kind, name] = Removal(kind, identity, name, record.data["role"])
    # By id, since an engine lets two networks have one name.
    seen = {
        Removal(resource.kind, resource.id, resource.name, resource.labels[ROLE])
        for resource in listed
        if is_ours(resource.name, resource.labels)
    }
    names = {(removal.kind, removal.name) for removal in seen}
    plan = seen.union(removal for key, removal in recorded.items() if key not in names)
    return tuple(sorted(plan, key=lambda r: (REMOVAL_ORDER.index(r.kind), r.name, r.id)))
