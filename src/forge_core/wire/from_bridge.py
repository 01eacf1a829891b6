"""Bridge → hub: every hub method's request and acknowledgement (wire.md, Bridge → hub)."""

from __future__ import annotations

from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field

from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.base import (
    Commit,
    Count,
    Fence,
    Flag,
    Id,
    Integer,
    Name,
    Positive,
    Text,
    Timestamp,
    WireModel,
)
from forge_core.wire.codes import (
    CleanupState,
    CleanupTrigger,
    Decision,
    Disposition,
    EventType,
    FailureCode,
    Outcome,
    PublicationOutcome,
    RejectionCode,
    RunnerState,
    Runtime,
)
from forge_core.wire.from_hub import Environment
from forge_core.wire.shapes import (
    MAX_LIST,
    Capabilities,
    DiskState,
    HeartbeatAttempt,
    RemovedResource,
    RunnerSettings,
    SnapshotAttempt,
    Timings,
)


class RegisterRunner(WireModel):
    """Who connects, and what it can do; the first call of every connection."""

    protocol_version: Positive
    runner_id: Id
    runner_instance_id: Id
    trust_domain_id: Id
    bridge_version: Name
    host_name: Name
    platform: Name
    capabilities: Capabilities
    repositories: Annotated[tuple[Name, ...], Field(max_length=MAX_LIST)]


class Heartbeat(WireModel):
    """What the runner holds right now (B-08)."""

    runner_id: Id
    runner_instance_id: Id
    sequence: Positive
    sent_at: Timestamp
    state: RunnerState
    used_resources: ResourceVector
    resource_capacity: ResourceCapacity
    reserved_count: Count
    starting_count: Count
    active_count: Count
    degraded_reservation_count: Count
    disk: DiskState
    pending_reports: Count
    attempts: Annotated[tuple[HeartbeatAttempt, ...], Field(max_length=MAX_LIST)]
    attempts_truncated: Flag


class SubmitOfferDecision(WireModel):
    """Yes, reserved; or no, because."""

    offer_id: Id
    attempt_id: Id
    fence: Fence
    runner_id: Id
    runner_instance_id: Id
    decision: Decision
    runtime: Runtime | None = None
    reason_code: RejectionCode | None = None
    detail: Text | None = None
    used_resources: ResourceVector
    resource_capacity: ResourceCapacity


class SubmitDispatchEvent(WireModel):
    """Something happened to an attempt; ``sequence`` on durable events, else ``streamSequence``."""

    event_id: Id
    attempt_id: Id
    fence: Fence
    resource_runner_instance_id: Id
    sequence: Positive | None = None
    stream_sequence: Positive | None = None
    at: Timestamp
    type: EventType
    payload: dict[str, Any]


class SubmitDispatchResult(WireModel):
    """How the attempt ended; revision 2 says that the cleanup is complete as well."""

    attempt_id: Id
    fence: Fence
    resource_runner_instance_id: Id
    revision: Positive
    outcome: Outcome
    failure_code: FailureCode | None = None
    exit_code: Integer | None = None
    signal: Positive | None = None
    result_commit: Commit | None = None
    cleanup: CleanupState
    summary: Text | None = None
    timings: Timings = Field(default_factory=dict)


class SubmitLegacyResult(WireModel):
    """The answer to a v1 ``Dispatch`` (B-03)."""

    dispatch_id: Id
    succeeded: Flag
    exit_code: Integer | None = None
    output: str
    truncated: Flag
    error: Text | None = None


class SubmitCleanupReport(WireModel):
    """What was removed, absent or resisted, resource by resource (B-83)."""

    report_id: Id
    attempt_id: Id
    fence: Fence
    resource_runner_instance_id: Id
    runner_id: Id
    runner_instance_id: Id
    part: Positive
    parts: Positive
    created_at: Timestamp
    trigger: CleanupTrigger
    resources: Annotated[tuple[RemovedResource, ...], Field(max_length=MAX_LIST)]


class ReadAttemptSnapshot(WireModel):
    """Which attempts does the hub believe are on this instance? (B-81)"""

    runner_id: Id
    runner_instance_id: Id
    part: Positive


class RedeemSecretGrant(WireModel):
    """One-time exchange of an opaque handle for secrets (B-60)."""

    attempt_id: Id
    fence: Fence
    runner_instance_id: Id
    handle: Name = Field(repr=False)


class RedeemPublishGrant(WireModel):
    """One-time exchange of a publication handle for a credential (B-61)."""

    attempt_id: Id
    fence: Fence
    runner_instance_id: Id
    handle: Name = Field(repr=False)
    branch: Name
    result_commit: Commit


class SubmitPublication(WireModel):
    """What came of a push (B-63, B-64)."""

    attempt_id: Id
    fence: Fence
    resource_runner_instance_id: Id
    branch: Name
    result_commit: Commit
    outcome: PublicationOutcome


class SubmitReapOutcome(WireModel):
    """What a reap action did (B-88)."""

    request_id: Id
    runner_instance_id: Id
    removed: Count
    absent: Count
    failed: Count
    degraded_reservation_count: Count


class Ack(WireModel):
    """The least that every hub method returns."""

    accepted: Flag
    reason: Annotated[str, Field(max_length=256)] | None = None
    detail: Text | None = None


class ReplayAck(Ack):
    """The acknowledgement of everything that is replayed; any disposition ends the replay."""

    disposition: Disposition


class RegisterAck(Ack):
    """The hub knows the runner, and says how often it wants to hear from it."""

    heartbeat_interval_ms: Annotated[int, Field(strict=True, ge=100, le=600_000)] = 15_000
    settings: RunnerSettings | None = None
    server_time: Timestamp | None = None


class HeartbeatAck(Ack):
    """Carries the settings, so that a lost ``RunnerSettings`` heals by itself."""

    settings: RunnerSettings | None = None
    server_time: Timestamp | None = None


class SnapshotAck(Ack):
    """One part of the hub's view of this instance."""

    taken_at: Timestamp | None = None
    attempts: Annotated[tuple[SnapshotAttempt, ...], Field(max_length=MAX_LIST)] = ()
    parts: Positive = 1


class SecretGrantAck(Ack):
    """The secrets, once; never stored, never logged."""

    secrets: Environment = Field(default_factory=dict, repr=False)


class PublishGrantAck(Ack):
    """An in-memory credential for exactly one repository; never stored, never logged."""

    repository_url: Text | None = None
    username: Name | None = None
    credential: str | None = Field(default=None, repr=False)
    expires_at: Timestamp | None = None


class HubMethod(NamedTuple):
    """A hub method: what goes in, what comes back."""

    request: type[WireModel]
    acknowledgement: type[Ack]


HUB_METHODS: Final[dict[str, HubMethod]] = {
    "RegisterRunner": HubMethod(RegisterRunner, RegisterAck),
    "Heartbeat": HubMethod(Heartbeat, HeartbeatAck),
    "SubmitOfferDecision": HubMethod(SubmitOfferDecision, Ack),
    "SubmitDispatchEvent": HubMethod(SubmitDispatchEvent, ReplayAck),
    "SubmitDispatchResult": HubMethod(SubmitDispatchResult, ReplayAck),
    "SubmitLegacyResult": HubMethod(SubmitLegacyResult, ReplayAck),
    "SubmitCleanupReport": HubMethod(SubmitCleanupReport, ReplayAck),
    "ReadAttemptSnapshot": HubMethod(ReadAttemptSnapshot, SnapshotAck),
    "RedeemSecretGrant": HubMethod(RedeemSecretGrant, SecretGrantAck),
    "RedeemPublishGrant": HubMethod(RedeemPublishGrant, PublishGrantAck),
    "SubmitPublication": HubMethod(SubmitPublication, ReplayAck),
    "SubmitReapOutcome": HubMethod(SubmitReapOutcome, ReplayAck),
}
