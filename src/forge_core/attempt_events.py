"""What happens to a dispatch, and what is done about it: the words of :mod:`forge_core.attempt`."""

from __future__ import annotations

from dataclasses import dataclass

from forge_core.lease import Lease
from forge_core.ports import ImportedOutput
from forge_core.ready import Action
from forge_core.wire.base import WireModel
from forge_core.wire.codes import (
    CleanupTrigger,
    EventType,
    FailureCode,
    PublicationOutcome,
    ResourceKind,
    Stage,
)
from forge_core.wire.events import EMPTY
from forge_core.wire.from_hub import LeaseUpdate
from forge_core.wire.shapes import RemovedResource


@dataclass(frozen=True, slots=True)
class Started:
    """The hub said go."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class StageEntered:
    """The next stage begins; the one before it is over."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class ResourceIntended:
    """About to ask the engine for a resource."""

    kind: ResourceKind
    name: str
    role: str


@dataclass(frozen=True, slots=True)
class ResourceCreated:
    """The engine answered with the resource's id."""

    kind: ResourceKind
    id: str
    name: str
    role: str


@dataclass(frozen=True, slots=True)
class Happened:
    """Something that the hub should know of, as a durable event."""

    type: EventType
    payload: WireModel = EMPTY


@dataclass(frozen=True, slots=True)
class AgentStarted:
    """The agent's process runs: the hard wall and the idle clock begin."""


@dataclass(frozen=True, slots=True)
class OutputSeen:
    """The agent printed something."""


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The agent's own status."""

    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class OutputAccepted:
    """The output bundle was validated and imported."""

    output: ImportedOutput


@dataclass(frozen=True, slots=True)
class PushIntended:
    """About to ask the remote to move a branch to the result commit."""

    branch: str
    result_commit: str


@dataclass(frozen=True, slots=True)
class Published:
    """What came of the publication; a push that was intended is not open any more."""

    branch: str
    result_commit: str
    outcome: PublicationOutcome


@dataclass(frozen=True, slots=True)
class RenewalArrived:
    """A lease update for exactly this dispatch, which may have waited for its turn since."""

    update: LeaseUpdate
    received_ms: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; a deadline may have."""


@dataclass(frozen=True, slots=True)
class EndRequested:
    """Something wants the dispatch to end; the first reason wins."""

    failure: FailureCode
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class StagesEnded:
    """No stage runs any more; ``failure`` is why the last one failed, if it did."""

    failure: FailureCode | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class ResourcesRemoved:
    """A teardown or a pass is through with the resources of this dispatch."""

    trigger: CleanupTrigger
    resources: tuple[RemovedResource, ...]


Event = (
    Started
    | StageEntered
    | ResourceIntended
    | ResourceCreated
    | Happened
    | AgentStarted
    | OutputSeen
    | AgentEnded
    | OutputAccepted
    | PushIntended
    | Published
    | RenewalArrived
    | Tick
    | EndRequested
    | StagesEnded
    | ResourcesRemoved
)


@dataclass(frozen=True, slots=True)
class StopStages(Action):
    """Cancel whatever stage runs."""


@dataclass(frozen=True, slots=True)
class ForwardRenewal(Action):
    """Hand an accepted renewal to PID 1, which verifies it again."""

    update: LeaseUpdate


@dataclass(frozen=True, slots=True)
class TearDown(Action):
    """Remove everything that the ledger names."""


@dataclass(frozen=True, slots=True)
class FreeReservation(Action):
    """Everything was observed gone: give the capacity back and retire the ledger."""


@dataclass(frozen=True, slots=True)
class DegradeReservation(Action):
    """Something resisted: the capacity stays taken until a pass succeeds."""
