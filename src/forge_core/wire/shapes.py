"""The shapes that several messages share (wire.md, Shapes)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forge_core.resources import ResourceCapacity
from forge_core.wire.base import Count, Fence, Flag, Id, Name, Text, Timestamp, WireModel
from forge_core.wire.codes import (
    NetworkPolicy,
    PublicationMode,
    RemovalOutcome,
    ReservationState,
    ResourceKind,
    Runtime,
    ServiceName,
    SnapshotState,
    Stage,
)

MAX_LIST = 10_000


class RunnerSettings(WireModel):
    """What the hub's Profile Settings say about this runner (B-87, B-53)."""

    draining: Flag
    host_fallback_enabled: Flag


class EngineLimits(WireModel):
    """Which limits the engine says it enforces."""

    memory: Flag
    pids: Flag
    cpu: Flag


class EngineFacts(WireModel):
    """The Docker Engine behind the runner, as its own ``info`` describes it."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    version: Name
    api_version: Name
    rootless: Flag
    desktop: Flag
    cgroup_version: Annotated[str, Field(max_length=16)]
    storage_driver: Annotated[str, Field(max_length=64)]
    limits: EngineLimits


class SandboxReadiness(WireModel):
    """Whether ``sandbox_required`` can be met here, and what stands in the way (B-51)."""

    ready: Flag
    blockers: Annotated[tuple[Name, ...], Field(max_length=256)] = ()


class Capabilities(WireModel):
    """What the runner can do (B-06)."""

    runtimes: tuple[Runtime, ...]
    engine: EngineFacts | None = None
    quota_supported: Flag
    dedicated_disk: Flag
    sandbox_required: SandboxReadiness
    network_policies: tuple[NetworkPolicy, ...] = ()
    services: tuple[ServiceName, ...] = ()
    publication_modes: tuple[PublicationMode, ...] = ()
    image_policy_enforced: Flag
    signature_verification: Flag
    seccomp_digest: Name | None = None
    lsm: Name | None = None
    tooling_image: Name | None = None
    resource_capacity: ResourceCapacity


class Service(WireModel):
    """A sidecar that an attempt asks for."""

    name: ServiceName
    version: Annotated[str, Field(min_length=1, max_length=64)] | None = None


class PublishedPort(WireModel):
    """A port of a container that the engine published on the host."""

    container: Name
    container_port: Annotated[int, Field(strict=True, ge=1, le=65_535)]
    host_address: Annotated[str, Field(min_length=1, max_length=64)]
    host_port: Annotated[int, Field(strict=True, ge=1, le=65_535)]


class ResourceItem(WireModel):
    """One thing that the engine holds for an attempt."""

    kind: ResourceKind
    id: Name
    name: Name
    role: Annotated[str, Field(min_length=1, max_length=64)]


class InventoryItem(ResourceItem):
    """A resource as inventories list it."""

    created_at: Timestamp


class RemovedResource(ResourceItem):
    """A resource as cleanup reports list it."""

    outcome: RemovalOutcome
    detail: Text | None = None


class StageTiming(WireModel):
    """When a stage began and how long it took."""

    started_at: Timestamp
    duration_ms: Count


Timings = dict[Stage, StageTiming]


class DiskState(WireModel):
    """The disk that admission watches (B-25)."""

    latched: Flag
    used_percent: Annotated[int, Field(strict=True, ge=0, le=100)]
    free_bytes: Count


class HeartbeatAttempt(WireModel):
    """An attempt as heartbeats list it."""

    attempt_id: Id
    fence: Fence
    state: ReservationState


class SnapshotAttempt(WireModel):
    """An attempt as the hub's snapshot lists it (B-81)."""

    attempt_id: Id
    fence: Fence
    state: SnapshotState
