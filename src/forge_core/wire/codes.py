"""The closed lists of the wire (codes.md): reasons, outcomes, states and event types."""

from __future__ import annotations

from enum import StrEnum


class RejectionCode(StrEnum):
    """Why an offer was rejected."""

    DRAINING = "draining"
    STOPPING = "stopping"
    CAPACITY_SLOTS = "capacity_slots"
    CAPACITY_BUILDS = "capacity_builds"
    CAPACITY_PIDS = "capacity_pids"
    CAPACITY_MEMORY = "capacity_memory"
    CAPACITY_CPU = "capacity_cpu"
    CAPACITY_DISK = "capacity_disk"
    CAPACITY_NETWORKS = "capacity_networks"
    DISK_PRESSURE = "disk_pressure"
    TRUST_DOMAIN_MISMATCH = "trust_domain_mismatch"
    RUNTIME_UNAVAILABLE = "runtime_unavailable"
    POLICY_UNSATISFIED = "policy_unsatisfied"
    HOST_EXECUTION_DENIED = "host_execution_denied"
    HOST_FALLBACK_DENIED = "host_fallback_denied"
    UNKNOWN_REPOSITORY = "unknown_repository"
    STALE_FENCE = "stale_fence"
    EXPIRED = "expired"
    MALFORMED = "malformed"


class FailureCode(StrEnum):
    """Why an attempt did not succeed."""

    START_TIMEOUT = "start_timeout"
    WORKSPACE_INVALID = "workspace_invalid"
    CONTRACT_INVALID = "contract_invalid"
    IMAGE_BUILD_FAILED = "image_build_failed"
    IMAGE_POLICY_DENIED = "image_policy_denied"
    SIGNATURE_INVALID = "signature_invalid"
    SERVICE_NOT_READY = "service_not_ready"
    SECRET_GRANT_DENIED = "secret_grant_denied"  # noqa: S105 - a code, not a secret
    LEASE_EXPIRED = "lease_expired"
    HARD_WALL_EXPIRED = "hard_wall_expired"
    IDLE_EXPIRED = "idle_expired"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    AGENT_FAILED = "agent_failed"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    OUTPUT_INVALID = "output_invalid"
    PUBLICATION_DENIED = "publication_denied"
    PUBLICATION_STALE = "publication_stale"
    DISK_FULL = "disk_full"
    ENGINE_LOST = "engine_lost"
    SUPERVISOR_LOST = "supervisor_lost"
    BRIDGE_STOPPED = "bridge_stopped"
    INTERNAL_ERROR = "internal_error"


class Outcome(StrEnum):
    """How an attempt ended; never changes after revision 1 of its result."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


def outcome_of(code: FailureCode | None) -> Outcome:
    """The outcome that a failure code belongs to; no code is success."""
    match code:
        case None:
            return Outcome.SUCCEEDED
        case FailureCode.CANCELLED | FailureCode.SUPERSEDED:
            return Outcome.CANCELLED
        case FailureCode.LEASE_EXPIRED | FailureCode.HARD_WALL_EXPIRED | FailureCode.IDLE_EXPIRED:
            return Outcome.EXPIRED
        case _:
            return Outcome.FAILED


class CleanupState(StrEnum):
    """Whether teardown was proven."""

    PENDING = "pending"
    COMPLETE = "complete"


class Disposition(StrEnum):
    """What the hub did with a replayed message; each of the three ends the replay."""

    PERSISTED = "persisted"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


class Decision(StrEnum):
    """The answer to an offer."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"


class Runtime(StrEnum):
    """Where an attempt runs."""

    DOCKER = "docker"
    HOST = "host"


class Policy(StrEnum):
    """How strictly an attempt must be contained."""

    SANDBOX_REQUIRED = "sandbox_required"
    SANDBOX_PREFERRED = "sandbox_preferred"
    HOST = "host"


class NetworkPolicy(StrEnum):
    """What a sandbox may reach."""

    NONE = "none"
    PUBLIC_ALLOWLIST = "public_allowlist"
    OPEN_PUBLIC = "open_public"


class PublicationMode(StrEnum):
    """How the result commit leaves the runner (B-37)."""

    BRIDGE_PUSH = "bridge_push"
    SHARED_FILESYSTEM = "shared_filesystem"


class PublicationOutcome(StrEnum):
    """What came of a push (B-63)."""

    PUSHED = "pushed"
    ALREADY_PUBLISHED = "already_published"
    STALE_REMOTE = "stale_remote"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class RunnerState(StrEnum):
    """The runner as its heartbeat describes it."""

    ONLINE = "online"
    DRAINING = "draining"
    STOPPING = "stopping"


class ReservationState(StrEnum):
    """The states of capacity held for an attempt."""

    RESERVED = "reserved"
    STARTING = "starting"
    ACTIVE = "active"
    RELEASING = "releasing"
    DEGRADED = "degraded"


class SnapshotState(StrEnum):
    """An attempt as the hub's snapshot describes it; absent from it means ended."""

    OFFERED = "offered"
    RUNNING = "running"
    CANCELLING = "cancelling"


class ResourceKind(StrEnum):
    """What the engine can leave behind."""

    CONTAINER = "container"
    NETWORK = "network"
    VOLUME = "volume"


class RemovalOutcome(StrEnum):
    """What came of removing one resource."""

    REMOVED = "removed"
    ABSENT = "absent"
    FAILED = "failed"


class CleanupTrigger(StrEnum):
    """What made the cleanup happen."""

    TEARDOWN = "teardown"
    STARTUP = "startup"
    PERIODIC = "periodic"
    REAP_ACTION = "reap_action"
    CLI = "cli"


class ReapScope(StrEnum):
    """How far a reap action reaches."""

    ORPHANS = "orphans"
    ATTEMPT = "attempt"


class Stage(StrEnum):
    """The stages of an attempt, in order."""

    PREPARE = "prepare"
    IMAGE = "image"
    NETWORK = "network"
    SERVICES = "services"
    WORKSPACE = "workspace"
    AGENT = "agent"
    OUTPUT = "output"
    PUBLISH = "publish"
    TEARDOWN = "teardown"


class ServiceName(StrEnum):
    """The sidecars that a contract may declare (B-55)."""

    POSTGRES = "postgres"
    REDIS = "redis"
    BROWSER = "browser"


class OutputStream(StrEnum):
    """Where a log chunk came from."""

    STDOUT = "stdout"
    STDERR = "stderr"


class WarningCode(StrEnum):
    """What a ``warning`` event is about; it has ended nothing."""

    CONTRACT_NOT_APPROVED = "contract_not_approved"
    LEASE_RENEWAL_REFUSED = "lease_renewal_refused"
    NOT_CONTAINED = "not_contained"
    OUTPUT = "output"
    SECRET_NOT_MASKABLE = "secret_not_maskable"  # noqa: S105 - a code, not a secret


class EventType(StrEnum):
    """What a dispatch event tells; all but two are durable."""

    OFFER_RESERVED = "offer.reserved"
    IMAGE_RESOLVED = "image.resolved"
    BUILD_STARTED = "build.started"
    BUILD_FINISHED = "build.finished"
    BUILD_FAILED = "build.failed"
    SECRETS_REDEEMED = "secrets.redeemed"
    INVENTORY = "inventory"
    AGENT_STARTED = "agent.started"
    AGENT_EXITED = "agent.exited"
    OUTPUT_IMPORTED = "output.imported"
    PUBLICATION_STARTED = "publication.started"
    TEARDOWN_STARTED = "teardown.started"
    TEARDOWN_FINISHED = "teardown.finished"
    WARNING = "warning"
    LOG = "log"
    DEADLINE = "deadline"

    @property
    def durable(self) -> bool:
        """Whether it is on disk before it is sent and replayed until acknowledged."""
        return self not in {EventType.LOG, EventType.DEADLINE}
