"""A bridge over its ports: everything of it that is neither a setting nor an edge.

``forge_bridge.app`` hands in the edges; the simulation hands in a world of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.abc
import structlog

from forge_bridge.flows import boot, disk
from forge_bridge.flows.legacy import LegacyDispatches
from forge_bridge.flows.offer import watch_reservations
from forge_bridge.flows.reap import Reaper
from forge_bridge.flows.register import registration
from forge_bridge.flows.replay import MessageStore, Replay
from forge_bridge.flows.session import ConnectionFactory, Session
from forge_bridge.flows.stop import stop as stop_in_order
from forge_bridge.images.collect import CacheBounds, ImageCollector
from forge_bridge.images.pipeline import ImagePipeline
from forge_bridge.images.records import EvidenceStore, ImageIndex, ImageRecords
from forge_bridge.images.tooling import Tooling
from forge_bridge.perform import FaultPoint, no_faults
from forge_bridge.runner import Identity, Ledgers, Repositories, Runner, SandboxSettings
from forge_bridge.settings import BridgeSettings
from forge_core.admission import Admission, DiskPressure
from forge_core.backoff import Backoff
from forge_core.errors import EngineTimedOut, EngineUnreachable, ForgeError
from forge_core.image_ports import ImageBuilder, ImageGates
from forge_core.image_retention import Retention
from forge_core.labels import TOOLING, Owner
from forge_core.ports import Clock, Disk, Engine, GitStore, HostCommands, HostRuntime
from forge_core.subnet_pool import SubnetPool
from forge_core.wire.shapes import Capabilities

logger = structlog.get_logger(__name__)


class DispatchLedgers(Ledgers, boot.OldLedgers, Protocol):
    """``attempts/``: what this life writes, and what an earlier one left."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All doors through which a bridge acts on the world."""

    clock: Clock
    engine: Engine
    git: GitStore
    host: HostRuntime
    host_commands: HostCommands
    disk: Disk
    messages: MessageStore
    ledgers: DispatchLedgers
    repositories: Repositories
    connections: ConnectionFactory
    builder: ImageBuilder
    gates: ImageGates
    images: ImageIndex
    build_logs: EvidenceStore
    attestations: EvidenceStore


@dataclass(slots=True)
class BridgeService:
    """One bridge with everything that it needs opened; see :func:`assemble`.

    :ivar images: what is kept of them, and for how long.
    """

    runner: Runner
    session: Session
    images: ImageCollector
    _legacy: LegacyDispatches
    _stop_ms: int

    async def connect_once(self) -> None:
        """One connection to the hub, until it ends.

        :raises HubRefused: the hub did not let us in.
        :raises HubUnavailable: there is no hub.
        """
        await self.session.connect_once()

    async def run(self, stop: anyio.Event) -> None:
        """Keep a connection until ``stop`` is set, then end what runs and deliver the rest."""
        disconnect = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.session.run, disconnect)
            await stop.wait()
            logger.info("stopping")
            await stop_in_order(self.runner, self._legacy, self._stop_ms)
            await self._remove_tooling()
            disconnect.set()

    async def _remove_tooling(self) -> None:
        if self.runner.tooling is None:
            return
        try:
            await self.runner.tooling.remove()
        except ForgeError as error:
            logger.warning("cannot remove the tooling; the next start does", error=str(error))


async def assemble(
    settings: BridgeSettings,
    identity: Identity,
    ports: Ports,
    sandbox: SandboxSettings,
    capabilities: Capabilities,
    tasks: anyio.abc.TaskGroup,
    reach: FaultPoint = no_faults,
) -> BridgeService:
    """Clean up after the last life, and return a bridge that can connect.

    :param tasks: owns everything that the bridge does.
    :raises DiskUnusable: the state root cannot be read or written.
    :raises RefusedError: code ``configuration``: no hub would take the registration.
    """
    outbox = Replay(
        ports.messages,
        ports.clock,
        runner_id=identity.runner_id,
        runner_instance_id=identity.runner_instance_id,
    )
    await outbox.load()
    runner = Runner(
        identity=identity,
        clock=ports.clock,
        engine=ports.engine,
        host=ports.host,
        git=ports.git,
        outbox=outbox,
        ledgers=ports.ledgers,
        repositories=ports.repositories,
        tasks=tasks,
        admission=Admission(SubnetPool(settings.sandbox_subnet_pool)),
        sandbox=sandbox,
        capacity=settings.resource_capacity,
        capabilities=capabilities,
        disk=DiskPressure(
            settings.disk_high_watermark_percent,
            settings.disk_low_watermark_percent,
            settings.minimum_workspace_bytes,
        ),
        host_execution_allowed=settings.allow_host_execution,
        reach=reach,
        images=_pipeline(settings, ports),
        tooling=_tooling(identity, ports, sandbox),
    )
    await disk.look(runner, ports.disk)
    reaper = Reaper(runner)
    await boot.recover(runner, reaper, ports.ledgers)
    registration(runner)
    images = _collector(settings, runner)
    await images.recover()
    legacy = LegacyDispatches(runner, ports.host_commands)
    session = Session(runner, ports.connections, outbox, legacy, reaper)
    tasks.start_soon(watch_reservations, runner)
    tasks.start_soon(disk.watch, runner, ports.disk, images.relieve)
    tasks.start_soon(images.keep_up)
    tasks.start_soon(reaper.run_every_minute)
    return BridgeService(runner, session, images, legacy, settings.stop_deadline_seconds * 1000)


def _pipeline(settings: BridgeSettings, ports: Ports) -> ImagePipeline:
    audit = Retention(
        settings.sandbox_audit_retention_count, settings.sandbox_audit_retention_ttl_ms
    )
    return ImagePipeline(
        builder=ports.builder,
        gates=ports.gates,
        records=ImageRecords(ports.images, ports.build_logs, ports.attestations, audit),
        limits=settings.build_limits,
        slots=anyio.CapacityLimiter(settings.max_concurrent_sandbox_builds),
        network=settings.sandbox_build_egress_enforced,
    )


def _tooling(identity: Identity, ports: Ports, sandbox: SandboxSettings) -> Tooling | None:
    if sandbox.tooling is None:
        return None
    return Tooling(
        ports.engine,
        Owner.of_runner(
            TOOLING, identity.runner_id, identity.runner_instance_id, identity.trust_domain_id
        ),
        sandbox.tooling,
        sandbox.supervisor_source,
        sandbox.hardening,
    )


def _collector(settings: BridgeSettings, runner: Runner) -> ImageCollector:
    assert runner.images is not None
    return ImageCollector(
        runner,
        runner.images,
        Retention(settings.sandbox_image_retention_count, settings.sandbox_image_retention_ttl_ms),
        CacheBounds(
            most=settings.sandbox_buildkit_cache_max_bytes,
            reserved=settings.sandbox_buildkit_cache_reserved_bytes,
            minimum_free=settings.minimum_workspace_bytes,
        ),
    )


async def until_reachable(engine: Engine, clock: Clock) -> None:
    """Return once the engine answers: nothing is advertised before that (B-05)."""
    backoff = Backoff()
    while True:
        try:
            await engine.facts()
        except (EngineUnreachable, EngineTimedOut) as error:
            backoff = backoff.failed()
            delay_ms = backoff.delay_ms(clock.jitter())
            logger.error(
                "the Docker engine does not answer; waiting for it",
                error=str(error),
                retry_in_ms=delay_ms,
            )
            await clock.sleep_until_ms(clock.now_ms() + delay_ms)
        else:
            return
