"""What the flows share: who this runner is, its doors, and what it holds right now."""

from __future__ import annotations

import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, Self

import anyio.abc

from forge_bridge import __version__
from forge_bridge.hub_link import HubLink
from forge_bridge.perform import FaultPoint, no_faults
from forge_bridge.status import Side
from forge_core.admission import Admission, DiskPressure, Key, RunnerFacts
from forge_core.attempt import Now
from forge_core.blockers import Blocker
from forge_core.labels import Owner
from forge_core.ports import (
    Clock,
    DiskUsage,
    Engine,
    GitStore,
    HostRuntime,
    Ledger,
    Outbox,
    ResourceHolder,
)
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import Hardening
from forge_core.wire.codes import RunnerState, Runtime, ServiceName
from forge_core.wire.shapes import Capabilities, DiskState, RunnerSettings

if TYPE_CHECKING:
    from forge_bridge.attempt_run import AttemptRun
    from forge_bridge.egress.trial import EgressTrial
    from forge_bridge.images.pipeline import ImagePipeline
    from forge_bridge.images.tooling import Tooling
    from forge_bridge.services.container import ServiceImage

DEFAULT_HARDENING: Final = Hardening()
UNTOLD_SETTINGS: Final = RunnerSettings(draining=False, host_fallback_enabled=False)
UNSEEN_DISK: Final = DiskUsage(0, 0)


@dataclass(frozen=True, slots=True)
class Identity:
    """A stable host identity and one life of the bridge process."""

    runner_id: str
    runner_instance_id: str
    trust_domain_id: str
    bridge_version: str
    host_name: str
    platform: str

    @classmethod
    def of_this_host(cls, runner_id: str, runner_instance_id: str, trust_domain_id: str) -> Self:
        """Who this process is."""
        return cls(
            runner_id,
            runner_instance_id,
            trust_domain_id,
            __version__,
            socket.gethostname()[:256],
            f"{sys.platform}-{platform.machine()}",
        )

    def owner(self, attempt_id: str, fence: int, project_id: str, trust_domain_id: str) -> Owner:
        """Whose resources a dispatch's resources are."""
        return Owner(
            self.runner_id,
            self.runner_instance_id,
            attempt_id,
            fence,
            project_id,
            trust_domain_id,
        )


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """What the operator decided for every attempt; durations in milliseconds, sizes in bytes.

    :ivar tooling: the image; None: nothing runs in containers here.
    """

    tooling: str | None
    supervisor_source: str
    bundle_source: str
    hardening: Hardening = DEFAULT_HARDENING
    custom_ca: bytes | None = None
    hard_wall_ms: int = 8 * 3_600_000
    idle_ms: int = 1_800_000
    kill_grace_ms: int = 5_000
    supervisor_ready_ms: int = 60_000
    service_ready_ms: int = 60_000
    exit_ms: int = 10_000
    output_ms: int = 600_000
    push_ms: int = 600_000

    @property
    def tooling_image(self) -> str:
        """For what runs in a container: none is offered where no image was found fit."""
        assert self.tooling is not None, "attempts in containers need a tooling image"
        return self.tooling


class Ledgers(Protocol):
    """Where ledgers live (storage.md)."""

    async def create(self, attempt_id: str, fence: int) -> Ledger: ...
    async def remove(self, attempt_id: str, fence: int) -> None: ...


class Repositories(Protocol):
    """The repositories that the operator registered (B-40)."""

    async def refresh(self) -> None:
        """Read the registry again; what cannot be read leaves the last known state."""

    def paths(self) -> Mapping[str, str]: ...

    def remotes(self) -> Mapping[str, str]:
        """Where results of each may be pushed to, for those that have a remote."""


@dataclass(slots=True)
class Runner:
    """One bridge process.  Flows read and change it; nothing else does.

    :ivar images: the images of projects, and ``tooling`` what PID 1 runs from in them; None where
        no attempt runs.
    :ivar services: the images that can run beside an agent.
    :ivar egress: what the proxy of an attempt is made from; None: there is none.
    :ivar at_once: set when ``tasks`` is cancelled, for what is shielded from a cancellation.
    """

    identity: Identity
    clock: Clock
    engine: Engine
    host: HostRuntime
    git: GitStore
    outbox: Outbox
    ledgers: Ledgers
    repositories: Repositories
    tasks: anyio.abc.TaskGroup
    sandbox: SandboxSettings | None
    capacity: ResourceCapacity
    capabilities: Capabilities
    disk: DiskPressure
    host_execution_allowed: bool = False
    reach: FaultPoint = no_faults
    images: ImagePipeline | None = None
    tooling: Tooling | None = None
    services: Mapping[ServiceName, ServiceImage] = field(default_factory=dict)
    egress: EgressTrial | None = None
    hub: HubLink = field(default_factory=HubLink)
    admission: Admission = field(default_factory=Admission)
    attempts: dict[Key, AttemptRun] = field(default_factory=dict)
    hub_settings: RunnerSettings = UNTOLD_SETTINGS
    host_drained: bool = False
    stopping: bool = False
    at_once: anyio.Event = field(default_factory=anyio.Event)
    engine_away: str | None = None
    parts_unseen: Mapping[str, str] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    disk_usage: DiskUsage = UNSEEN_DISK
    changed: anyio.Event = field(default_factory=anyio.Event)

    async def watch_cancellation(self) -> None:
        """Set ``at_once`` when it is time."""
        try:
            await anyio.sleep_forever()
        finally:
            self.at_once.set()

    def holder(self, runtime: Runtime) -> ResourceHolder:
        """Who holds the resources of what runs there."""
        return self.host if runtime is Runtime.HOST else self.engine

    def now(self) -> Now:
        """The moment, for a core step."""
        return Now(self.clock.now_ms(), self.clock.utc())

    @property
    def state(self) -> RunnerState:
        """What the heartbeat says of the runner as a whole."""
        if self.stopping:
            return RunnerState.STOPPING
        return RunnerState.DRAINING if self.drained_by else RunnerState.ONLINE

    @property
    def drained_by(self) -> tuple[Side, ...]:
        """Who wants no new work to be taken here; one is enough (B-87)."""
        sides = ((Side.HOST, self.host_drained), (Side.HUB, self.hub_settings.draining))
        return tuple(side for side, drains in sides if drains)

    @property
    def disk_state(self) -> DiskState:
        """The disk as heartbeats tell it."""
        return DiskState(
            latched=self.disk.latched,
            used_percent=self.disk_usage.used_percent,
            free_bytes=self.disk_usage.free_bytes,
        )

    def facts(self) -> RunnerFacts:
        """What admission looks at: the same as what is advertised."""
        advertised = self.capabilities
        return RunnerFacts(
            trust_domain_id=self.identity.trust_domain_id,
            capacity=self.capacity,
            repositories=frozenset(self.repositories.paths()),
            runtimes=frozenset(
                runtime
                for runtime in advertised.runtimes
                if runtime is Runtime.HOST or self.engine_away is None
            ),
            blockers=(
                advertised.sandbox_required.blockers
                if self.engine_away is None
                else (f"{Blocker.ENGINE}: {self.engine_away}",)
            ),
            network_policies=frozenset(advertised.network_policies),
            services={
                name: self.services[name].version
                for name in advertised.services
                if name in self.services
            },
            publication_modes=frozenset(advertised.publication_modes),
            remotes=frozenset(self.repositories.remotes()),
            host_execution_allowed=self.host_execution_allowed,
            host_fallback_enabled=self.hub_settings.host_fallback_enabled,
            utc=self.clock.utc(),
            draining=bool(self.drained_by),
            stopping=self.stopping,
            disk_pressure=self.disk.latched or self.outbox.is_full,
        )

    def notify(self) -> None:
        """Something that heartbeats tell has changed: wake whoever waits for it."""
        self.changed.set()
        self.changed = anyio.Event()
