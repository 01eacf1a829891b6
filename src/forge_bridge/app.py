"""The only wiring: builds the edges, hands them to the flows, owns every task.

::

    open state root ─▶ engine ─▶ lock ─▶ preflight ─▶ recover ─▶ connect … ─▶ stop ─▶ close

:func:`run_bridge` is what the command line calls; :class:`BridgeService` is the same without
signals, for programs that embed a bridge (B-01).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import structlog
from pydantic import SecretStr

from forge_bridge import __version__
from forge_bridge.assembly import BridgeService, Ports, assemble, until_reachable
from forge_bridge.doctor import Preflight, preflight, read_hardening
from forge_bridge.egress.from_settings import custom_ca, egress_trial
from forge_bridge.egress.trial import EgressTrial
from forge_bridge.flows import drain
from forge_bridge.flows.engine import tell_unseen
from forge_bridge.flows.engine import watch as watch_engine
from forge_bridge.flows.session import ConnectionFactory
from forge_bridge.flows.status import StatusReport
from forge_bridge.flows.stop import DELIVER_MS
from forge_bridge.groups import first_error
from forge_bridge.images.doors import ImageDoors, image_doors
from forge_bridge.logs import KnownSecrets, configure_logging
from forge_bridge.metrics import health_page, metrics_page
from forge_bridge.perform import FaultPoint, no_faults
from forge_bridge.programs import read_programs, source
from forge_bridge.repositories import RegisteredRepositories
from forge_bridge.runner import Identity, SandboxSettings
from forge_bridge.services.from_settings import service_images
from forge_bridge.services.images import ServiceImages
from forge_bridge.settings import BridgeSettings, read_api_token, require_to_run
from forge_bridge.state_root import StateRoot
from forge_core.labels import BUILDER, Owner
from forge_core.ports import Clock, Disk, Engine, HostRuntime
from forge_core.sandbox_spec import Hardening
from forge_edges.clock import SystemClock
from forge_edges.disk import FileSystemDisks, is_reachable
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from forge_edges.git_stores import GitStores
from forge_edges.host_commands import ProcessHostCommands
from forge_edges.host_runtime import LocalHost
from forge_edges.http_pages import serve_pages
from forge_edges.hub_url import resolve_bridge_runner_hub_url
from forge_edges.signalr import SignalRConnectionFactory
from forge_edges.signalr_settings import LearnSecret, SignalRSettings, keep_to_oneself
from forge_edges.systemd import ServiceManager

logger = structlog.get_logger(__name__)

CLOSE_MS: Final = 20_000
"""What an orderly end needs besides the deadlines that it keeps itself."""

NOT_IN_ORDER: Final = 1
AT_ONCE_S: Final = 2.0
"""What a stop at once leaves to what will not be cancelled: a removal, a thread in a call."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Everything that a bridge stands on, open."""

    settings: BridgeSettings
    root: StateRoot
    identity: Identity
    clock: Clock
    engine: Engine
    disk: Disk
    images: ImageDoors
    connections: ConnectionFactory
    host: HostRuntime


@asynccontextmanager
async def open_bridge(
    settings: BridgeSettings,
    *,
    connections: ConnectionFactory | None = None,
    learn: LearnSecret = keep_to_oneself,
    reach: FaultPoint = no_faults,
) -> AsyncIterator[BridgeService]:
    """Open everything, clean up after the last life, and yield a bridge that can connect.

    :param connections: another transport in place of SignalR (B-01).
    :param learn: told each token that is used, so that no log shows it.
    :raises ConfigurationError: a setting is missing or cannot be used.
    :raises EngineLockHeld: another bridge owns this state root, engine or runner id.
    :raises RefusedError: the state root is unfit; the text holds the remedy.
    """
    require_to_run(settings)
    await read_programs()
    assert settings.trust_domain_id is not None
    connections = connections or SignalRConnectionFactory(signalr_settings(settings, learn))
    clock = SystemClock()
    instance_id = clock.new_id()
    root = await StateRoot.open(
        settings.sandbox_state_root, clock=clock, runner_id=settings.runner_id
    )
    identity = Identity.of_this_host(root.runner_id, instance_id, settings.trust_domain_id)
    async with _reachable_engine(settings, clock) as engine:
        facts = await engine.facts()
        lock = await root.acquire_engine_lock(facts.id, root.runner_id, instance_id=instance_id)
        try:
            disk = await _disks(root, engine)
            async with (
                _image_doors(settings, root, identity, clock, engine, disk) as images,
                LocalHost.open(root.host, clock) as host,
                anyio.create_task_group() as tasks,
            ):
                services = service_images(settings, images.gates.before_build)
                egress = await egress_trial(settings, images.gates.before_build)
                opened = Opened(
                    settings, root, identity, clock, engine, disk, images, connections, host
                )
                look = await _looker(opened, services, egress)
                checked = await look()
                service = await _assemble(opened, checked, tasks, reach)
                service.runner.services = services.usable
                service.runner.egress = egress

                runner, reaper = service.runner, service.session.reaper
                # What was not seen is no verdict: the watch looks again.
                runner.engine_away = checked.unseen
                tell_unseen(runner, checked.parts_unseen)
                tasks.start_soon(watch_engine, runner, engine, facts.id, reaper, look)
                try:
                    yield service
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            await root.ledgers.close()
            lock.release()


async def _looker(
    opened: Opened, services: ServiceImages, egress: EgressTrial | None
) -> Callable[[], Awaitable[Preflight]]:
    """Runs the preflight, each time with the hardening as it was read at the start."""
    return partial(
        preflight,
        opened.engine,
        opened.settings,
        await read_hardening(opened.settings),
        runner_id=opened.identity.runner_id,
        instance_id=opened.identity.runner_instance_id,
        prover=opened.images.prover,
        builder=opened.images.builder,
        services=services,
        egress=egress,
    )


async def _assemble(
    opened: Opened, checked: Preflight, tasks: anyio.abc.TaskGroup, reach: FaultPoint
) -> BridgeService:
    settings, root = opened.settings, opened.root
    if because := {result.id: result.evidence for result in checked.results if result.blocks}:
        logger.info("sandbox_required cannot be met; see forge sandbox doctor", because=because)
    repositories = RegisteredRepositories(root.path)
    await repositories.refresh()
    git = GitStores(root.repositories, repositories.clones)
    await git.remove_leftovers()
    ports = Ports(
        clock=opened.clock,
        engine=opened.engine,
        git=git,
        host=opened.host,
        host_commands=ProcessHostCommands(),
        disk=opened.disk,
        messages=root.messages,
        ledgers=root.ledgers,
        repositories=repositories,
        connections=opened.connections,
        builder=opened.images.builder,
        gates=opened.images.gates,
        images=root.images,
        build_logs=root.build_logs,
        attestations=root.attestations,
    )
    sandbox = await sandbox_settings(settings, checked.hardening)
    service = await assemble(
        settings, opened.identity, ports, sandbox, checked.capabilities, tasks, reach
    )
    tasks.start_soon(service.runner.watch_cancellation)
    await drain.look(service.runner, root.is_drained)
    tasks.start_soon(drain.watch, service.runner, root.is_drained)
    report = StatusReport(service.runner, service.session)
    tasks.start_soon(report.keep, root.path)
    if settings.metrics_listen is not None:
        pages = {"/metrics": lambda: metrics_page(report.now()), "/healthz": health_page}
        await tasks.start(serve_pages, settings.metrics_listen, pages)
    return service


def _image_doors(
    settings: BridgeSettings,
    root: StateRoot,
    identity: Identity,
    clock: Clock,
    engine: DockerEngine,
    disk: Disk,
) -> AbstractAsyncContextManager[ImageDoors]:
    owner = Owner.of_runner(
        BUILDER, root.runner_id, identity.runner_instance_id, identity.trust_domain_id
    )
    return image_doors(
        settings, engine, engine.endpoint, owner, root.build_work, clock=clock, disk=disk
    )


async def _disks(root: StateRoot, engine: Engine) -> FileSystemDisks:
    """The state root's filesystem, and the one that really holds the engine's data (B-25)."""
    data = Path(str((await engine.info()).get("DockerRootDir")))
    if data.is_absolute() and await anyio.to_thread.run_sync(is_reachable, data):
        return FileSystemDisks((root.path, data))
    logger.warning(
        "the engine's data cannot be looked at from here; only the state root's disk is watched",
        directory=str(data),
    )
    return FileSystemDisks((root.path,))


async def sandbox_settings(settings: BridgeSettings, hardening: Hardening) -> SandboxSettings:
    """What every attempt is made of.

    :param hardening: as the preflight has tried it: what is advertised is what is applied.
    """
    return SandboxSettings(
        tooling=settings.agent_tooling_image,
        supervisor_source=source("supervisor"),
        bundle_source=source("bundle"),
        hardening=hardening,
        custom_ca=await custom_ca(settings),
        hard_wall_ms=settings.sandbox_hard_wall_seconds * 1000,
        idle_ms=settings.sandbox_idle_seconds * 1000,
        kill_grace_ms=settings.sandbox_kill_grace_seconds * 1000,
    )


def signalr_settings(
    settings: BridgeSettings, learn: LearnSecret = keep_to_oneself
) -> SignalRSettings:
    """Where the hub is and who we are; the token is read anew for every connection."""
    assert settings.server_url is not None

    async def token(_refresh: bool) -> str | None:
        secret: SecretStr | None = await anyio.to_thread.run_sync(read_api_token, settings)
        return None if secret is None else secret.get_secret_value()

    return SignalRSettings(
        hub_url=resolve_bridge_runner_hub_url(settings.server_url),
        token=token,
        learn=learn,
        user_agent=f"forge-bridge/{__version__}",
    )


@asynccontextmanager
async def _reachable_engine(
    settings: BridgeSettings, clock: SystemClock
) -> AsyncIterator[DockerEngine]:
    """The engine, once it answers."""
    endpoint = resolve_endpoint(settings.docker_context, os.environ)
    async with DockerEngine.connect(endpoint) as engine:
        await until_reachable(engine, clock)
        yield engine


async def _until_stopped(settings: BridgeSettings, learn: LearnSecret) -> bool:
    """Whether everything that had begun was ended in order."""
    stop, is_open = anyio.Event(), anyio.Event()
    in_order = False
    async with anyio.create_task_group() as tasks:
        await tasks.start(_watch_signals, stop, is_open, tasks.cancel_scope)
        async with open_bridge(settings, learn=learn) as bridge:
            is_open.set()
            tasks.start_soon(_tell_manager, settings, stop)
            await bridge.run(stop)
        in_order = True
        tasks.cancel_scope.cancel()
    return in_order or not is_open.is_set()


async def _tell_manager(settings: BridgeSettings, stop: anyio.Event) -> None:
    """Ready now, alive until the last moment, stopping when that begins (B-43)."""
    manager = ServiceManager.from_environment(os.environ, os.getpid())
    manager.ready()
    async with anyio.create_task_group() as tasks:
        if manager.watchdog_ms is not None:
            tasks.start_soon(_show_life, manager, manager.watchdog_ms // 2)
        await stop.wait()
        manager.stopping(settings.stop_deadline_seconds * 1000 + DELIVER_MS + CLOSE_MS)


async def _show_life(manager: ServiceManager, every_ms: int) -> None:
    clock = SystemClock()
    while True:
        manager.alive()
        await clock.sleep_until_ms(clock.now_ms() + every_ms)


async def _watch_signals(
    stop: anyio.Event,
    is_open: anyio.Event,
    at_once: anyio.CancelScope,
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """The first signal stops in order, the second, or one before anything runs, at once."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if is_open.is_set() and not stop.is_set():
                stop.set()
                continue
            logger.warning("stopping at once; the next start cleans up")
            if is_open.is_set():
                _end_process_in(AT_ONCE_S)
            at_once.cancel()
            return


def _end_process_in(seconds: float) -> None:
    """However much is shielded: dying loses nothing here (docs/explanation/crash-matrix.md)."""
    end = threading.Timer(seconds, os._exit, (NOT_IN_ORDER,))
    end.daemon = True
    end.start()


def run_bridge(settings: BridgeSettings) -> int:
    """Run until a signal; returns the exit status: 0 stopped in order, 1 at once.

    :raises ForgeError: the bridge could not start; see :func:`open_bridge`.
    """
    token, secrets = read_api_token(settings), KnownSecrets()
    if token is not None:
        secrets.learn(token.get_secret_value())
    configure_logging(settings.log_format, settings.log_level, mask=secrets.mask)
    with first_error():
        in_order = anyio.run(_until_stopped, settings, secrets.learn)
    return 0 if in_order else NOT_IN_ORDER
