"""What the API takes and gives; camelCase, unknown fields in requests refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.base import WIRE_CONFIG, Count, Fence, Flag, Id, Name, WireModel
from forge_core.wire.codes import (
    CleanupState,
    CleanupTrigger,
    EventType,
    FailureCode,
    Outcome,
    PublicationOutcome,
    ReapScope,
    RunnerState,
    Runtime,
)
from forge_core.wire.from_hub import Argv, DurationMs, Environment
from forge_core.wire.shapes import Capabilities, DiskState, RemovedResource, RunnerSettings, Timings
from forge_hub.attempt_input import AttemptInput
from forge_hub.grants import GrantKind
from forge_hub.sandbox_policy import SandboxPolicy
from forge_hub.states import DispatchState, EndReason, PublicationSource, SessionState

_STRICT = ConfigDict({**WIRE_CONFIG, "extra": "forbid"})


class NewSession(AttemptInput):
    """What a person asks for: the input of its attempts, and how to dispatch them.

    :ivar resources: what is left out or at 0 is 256 processes, 1 GiB and 1000 `cpuMillis`.
    :ivar secrets: names of secrets of the project, which become variables of the agent.
    :ivar publication: how the result leaves the runner.
    :ivar runner_id: the only runner that may take it.
    :ivar retries: how often it is dispatched again when a runner was lost, not when work failed.
    """

    model_config = _STRICT

    runner_id: Id | None = None
    retries: Annotated[int, Field(strict=True, ge=0, le=10)] = 0


class CancelRequest(WireModel):
    """Why a session is to end."""

    model_config = _STRICT

    reason: Annotated[str, Field(min_length=1, max_length=256)] = "cancelled by the API"


class RefusalView(WireModel):
    """Why a runner was not chosen (B-96)."""

    runner_id: Id | None = None
    reason: str
    detail: str


class ResultView(WireModel):
    """How a dispatch ended."""

    revision: int
    outcome: Outcome
    failure_code: FailureCode | None = None
    exit_code: int | None = None
    signal: int | None = None
    result_commit: str | None = None
    cleanup: CleanupState
    summary: str | None = None
    timings: Timings = Field(default_factory=dict)
    received_at: str


class PublicationView(WireModel):
    """What came of a push, and whose word that is: the runner's, or the hub's own look."""

    outcome: PublicationOutcome
    branch: str
    result_commit: str
    source: PublicationSource
    received_at: str


class GrantView(WireModel):
    """A handle that was given out, and whether it was redeemed; never what it stands for (B-60).

    :ivar result_commit: what a publish grant was redeemed for.
    """

    kind: GrantKind
    attempt_id: Id
    fence: Fence
    names: tuple[str, ...]
    branch: str | None = None
    result_commit: str | None = None
    created_at: str
    redeemed_at: str | None = None


class DispatchView(WireModel):
    """One dispatch of an attempt to one runner instance."""

    attempt_id: Id
    fence: Fence
    runner_id: Id
    runner_instance_id: Id
    state: DispatchState
    end_reason: EndReason | None = None
    runtime: Runtime | None = None
    decline_code: str | None = None
    decline_detail: str | None = None
    lease_sequence: int
    last_renewal_at: str | None = None
    offered_at: str
    started_at: str | None = None
    ended_at: str | None = None
    cleanup: CleanupState | None = None
    result: ResultView | None = None
    publication: PublicationOutcome | None = None
    publications: tuple[PublicationView, ...] = ()


class AttemptView(WireModel):
    """An attempt: its immutable input and its dispatches in the order of their fences."""

    attempt_id: Id
    created_at: str
    input: dict[str, Any]
    dispatches: tuple[DispatchView, ...]


class SessionSummary(WireModel):
    """A session in a list."""

    session_id: Id
    project_id: Id
    state: SessionState
    failure_code: FailureCode | None = None
    created_at: str
    ended_at: str | None = None


class SessionView(SessionSummary):
    """A session with everything that decides about it.

    :ivar result: of the dispatch that settled the session, or the latest one.
    :ivar publication: the last word about the latest push (B-64).
    :ivar cleanup: pending while anything may be left on a runner, also after the end (B-85);
        null: nothing was ever started.
    :ivar refusals: why no runner takes it now, or why the others were not asked.
    """

    trust_domain_id: Id
    runner_id: Id | None = None
    retries_left: int
    cancel_reason: str | None = None
    refusals: tuple[RefusalView, ...]
    attempts: tuple[AttemptView, ...]
    result: ResultView | None = None
    publication: PublicationView | None = None
    cleanup: CleanupState | None = None


class EventView(WireModel):
    """A durable lifecycle event (B-84)."""

    ordinal: int
    attempt_id: Id
    fence: Fence
    sequence: int
    type: EventType
    at: str
    received_at: str
    payload: dict[str, Any]


class CleanupReportView(WireModel):
    """A cleanup report, its parts put together; incomplete until all of them have come.

    :ivar ordinal: of the part that came last; grows with each.
    """

    ordinal: int
    report_id: Id
    attempt_id: Id
    fence: Fence
    runner_id: Id
    reporting_instance_id: Id
    resource_instance_id: Id
    trigger: CleanupTrigger
    complete: bool
    created_at: str
    received_at: str
    resources: tuple[RemovedResource, ...]


class Diagnostics(WireModel):
    """What happened to a session, and what is left of it (B-85)."""

    session: SessionView
    timeline: tuple[EventView, ...]
    timeline_truncated: bool
    inventory: dict[str, list[dict[str, Any]]]
    grants: tuple[GrantView, ...]
    cleanup_reports: tuple[CleanupReportView, ...]
    cleanup_pending: bool
    log_tail: str
    log_dropped_bytes: int


class RunnerView(WireModel):
    """A runner as it described itself last."""

    runner_id: Id
    trust_domain_id: Id
    runner_instance_id: Id
    connected: bool
    state: RunnerState
    settings: RunnerSettings
    bridge_version: str
    host_name: str
    platform: str
    capabilities: Capabilities
    repositories: tuple[str, ...]
    used_resources: ResourceVector
    resource_capacity: ResourceCapacity
    reserved_count: int
    starting_count: int
    active_count: int
    degraded_reservation_count: int
    disk: DiskState | None = None
    pending_reports: int
    registered_at: str
    last_heartbeat_at: str | None = None


class ReapView(WireModel):
    """A reap request and, when it has come, its outcome (B-88)."""

    request_id: Id
    runner_id: Id
    runner_instance_id: Id
    scope: ReapScope
    attempt_id: Id | None = None
    fence: Fence | None = None
    requested_at: str
    answered_at: str | None = None
    outcome: dict[str, int] | None = None


class ReapRequest(WireModel):
    """What to reap: the runner's orphans, or what is left of one attempt."""

    model_config = _STRICT

    scope: ReapScope = ReapScope.ORPHANS
    attempt_id: Id | None = None
    fence: Fence | None = None


class HostFallbackRequest(WireModel):
    """Whether the runner may run ``sandbox_preferred`` attempts on its host (B-53)."""

    model_config = _STRICT

    enabled: Flag


class SandboxPolicyRequest(SandboxPolicy):
    """What the owner of a project decides."""

    model_config = _STRICT


class SandboxPolicyView(SandboxPolicy):
    """What the owner of a project has decided, and when."""

    project_id: Id
    updated_at: str


class NewLegacyDispatch(WireModel):
    """A v1 command for one runner (B-03)."""

    model_config = _STRICT

    runner_id: Id
    repository: Name
    command: Argv
    env: Environment = Field(default_factory=dict, repr=False)
    timeout_ms: DurationMs = 600_000


class LegacyResultView(WireModel):
    """The answer to a v1 command."""

    succeeded: bool
    exit_code: int | None = None
    output: str
    truncated: bool
    error: str | None = None
    received_at: str


class LegacyDispatchView(WireModel):
    """A v1 command and, when it has come, its result."""

    dispatch_id: Id
    runner_id: Id
    repository: str
    command: tuple[str, ...]
    timeout_ms: Count
    created_at: str
    result: LegacyResultView | None = None


class Health(WireModel):
    """That it works."""

    status: str = "ok"
