"""A whole bridge for tests: the production wiring, a scripted hub, and an engine, real or not."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import anyio
import structlog.testing
from image_doubles import ScriptedGates
from memory_engine import IMAGE, MemoryEngine
from pydantic import SecretStr
from scripted_hub import TOKEN, ScriptedHub

from engines import Engine
from forge_bridge import app
from forge_bridge.assembly import BridgeService
from forge_bridge.doctor import Preflight
from forge_bridge.doctor.image_checks import ImageProver
from forge_bridge.flows.replay import Replay
from forge_bridge.groups import first_error
from forge_bridge.images.doors import ImageDoors, NoBuilder
from forge_bridge.images.gates import GateTools
from forge_bridge.perform import no_faults
from forge_bridge.repositories import add_repository
from forge_bridge.runner import Identity, Runner
from forge_bridge.settings import BridgeSettings, default_bridge_service_config
from forge_bridge.state_root import StateRoot
from forge_core.image_ports import ImageBuilder, ImageGates
from forge_core.ports import Disk
from forge_core.ports import Engine as EnginePort
from forge_core.wire.codes import NetworkPolicy, Runtime
from forge_core.wire.shapes import Capabilities, SandboxReadiness
from forge_edges.clock import SystemClock
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from forge_edges.host_runtime import LocalHost
from forge_edges.signalr import SignalRConnectionFactory

TRUST_DOMAIN = "test-domain"
REPOSITORY = "sample"
AGREED = ("approvedCommit",)
"""What a start must repeat of its offer."""

NO_BUILDER = NoBuilder("cannot build images: this test has no builder")
NO_PROVER = ImageProver(GateTools(), enforced=False, utc=SystemClock().utc)
KEY = bytes(range(32))
MIB = 1 << 20

_numbers = itertools.count(1)
_TEMPORARY: Final = tempfile.TemporaryDirectory(prefix="forge-flows-", ignore_cleanup_errors=True)
"""Goes with the process."""


class HastyClock(SystemClock):
    """Reconnects without a pause: the backoff's jitter is always the least."""

    def jitter(self) -> float:
        return 0.0


@dataclass(slots=True)
class Bridge:
    """A bridge that runs, the hub that it talks to, and what a test says to it.

    :ivar secrets: values that may be in no message, no log line and no file.
    :ivar logs: what the bridge has logged, before anything is withheld or masked.
    """

    hub: ScriptedHub
    service: BridgeService
    state_root: Path
    commit: str
    stop: anyio.Event
    stopped: anyio.Event
    logs: list[MutableMapping[str, Any]]
    secrets: set[str] = field(default_factory=set)
    _one_start: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def runner(self) -> Runner:
        return self.service.runner

    @property
    def unacknowledged(self) -> int:
        """How many of its messages the hub has not acknowledged."""
        outbox = self.runner.outbox
        assert isinstance(outbox, Replay)
        return outbox.pending

    def logged(self, event: str) -> list[MutableMapping[str, Any]]:
        return [entry for entry in self.logs if entry["event"] == event]

    @property
    def is_idle(self) -> bool:
        """Nothing is held, nothing is used."""
        admission = self.runner.admission
        return not admission.reservations and not any(
            getattr(admission.used, name) for name in admission.used.__slots__
        )

    def is_running(self, attempt_id: str, fence: int = 1) -> bool:
        """The dispatch goes on, and nothing has asked it to end."""
        run = self.runner.attempts.get((attempt_id, fence))
        return run is not None and run.state.phase == "running" and run.state.failure is None

    async def until_idle(self) -> None:
        """Wait for the capacity to be whole again."""
        with anyio.fail_after(20):
            while not self.is_idle:
                await self.runner.changed.wait()

    def drain(self, draining: bool) -> None:
        """The hub's Profile Settings change."""
        settings = {"draining": draining, "hostFallbackEnabled": False}
        self.hub.send("RunnerSettings", {"settings": settings})

    # -- what a hub would say -------------------------------------------------------------------

    def offer(self, attempt_id: str | None = None, fence: int = 1, **more: Any) -> dict[str, Any]:
        """An offer that fits, with ``more`` over it."""
        number = next(_numbers)
        return {
            "offerId": f"offer-{number}",
            "attemptId": attempt_id or f"attempt-{number}",
            "fence": fence,
            "runnerInstanceId": self.runner.identity.runner_instance_id,
            "sessionId": "session",
            "projectId": "project",
            "trustDomainId": TRUST_DOMAIN,
            "policy": "sandbox_preferred",
            "resources": {"slots": 1, "memoryBytes": 256 * MIB, "cpuMillis": 1000, "pids": 64},
            "repository": REPOSITORY,
            "expiresInMs": 60_000,
            **more,
        }

    def start(self, offer: dict[str, Any], *argv: str, **more: Any) -> dict[str, Any]:
        """The go for an offer."""
        same = ("attemptId", "fence", "offerId", "runnerInstanceId", "sessionId", "projectId")
        return {
            **{name: offer[name] for name in same},
            "trustDomainId": offer["trustDomainId"],
            "repository": offer["repository"],
            "inputCommit": self.commit,
            "branch": "result",
            "agent": {"provider": "command", "argv": list(argv or ("true",))},
            "lease": {"ttlMs": 60_000, "sequence": 0, "key": base64.b64encode(KEY).decode()},
            "limits": {"hardWallMs": 60_000, "idleMs": 60_000, "maxOutputBytes": MIB},
            **more,
        }

    async def accept(self, **more: Any) -> dict[str, Any]:
        """Offer, and the bridge says yes."""
        offer = self.offer(**more)
        self.hub.send("Offer", offer)
        decision = await self.hub.decision(offer)
        assert decision["decision"] == "accepted", decision
        return offer

    async def run(self, *argv: str, sandbox: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Offer, yes, go; returns the attempt's id once it runs, or has run.

        :param sandbox: sandbox settings that only this attempt has.
        """
        agreed = {name: more[name] for name in AGREED if name in more}
        offer = await self.accept(**agreed)
        key = offer["attemptId"], offer["fence"]
        run = self.runner.attempts[key]
        async with self._one_start:
            ordinary = self.runner.sandbox
            assert ordinary is not None
            self.runner.sandbox = replace(ordinary, **(sandbox or {}))
            self.hub.send("Start", self.start(offer, *argv, **more))
            await wait_for(lambda: run.state.phase != "reserved")
            self.runner.sandbox = ordinary
        return str(offer["attemptId"])

    # -- what must never be anywhere ------------------------------------------------------------

    def leaks(self) -> list[str]:
        """Where one of the secrets is that should be nowhere."""
        secrets = {TOKEN, base64.b64encode(KEY).decode(), KEY.hex(), *self.secrets}
        places = {
            "the messages": json.dumps([call.payload for call in self.hub.calls]),
            "the logs": repr(self.logs),
        }
        for path in self.state_root.rglob("*"):
            if path.is_file() and "repositories/" not in str(path):
                places[str(path.name)] = path.read_text("utf-8", "replace")
        return [place for place, text in places.items() if any(s in text for s in secrets)]


def make_repository(directory: Path) -> str:
    """A clone with one commit, the same one each time; returns the commit."""
    template, commit = _template()
    shutil.copytree(template, directory)
    return commit


@functools.cache
def _template() -> tuple[Path, str]:
    """Made once: every program that Git starts costs as much as a test."""
    directory = Path(_TEMPORARY.name) / "clone"
    directory.mkdir()
    (directory / "README").write_text("A sample.\n")
    git(directory, "init", "--quiet", "--initial-branch=main")
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message=First")
    return directory, git(directory, "rev-parse", "HEAD")


def git(directory: Path, *arguments: str) -> str:
    """Git as a person would use it, whatever this account's configuration says."""
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    command = ["git", *identity, "-C", str(directory), *arguments]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


def settings_for(directory: Path, hub: ScriptedHub, **more: Any) -> BridgeSettings:
    """Settings of a bridge whose state root is in ``directory``."""
    chosen: dict[str, Any] = {
        "server_url": hub.url,
        "api_token": SecretStr(TOKEN),
        "trust_domain_id": TRUST_DOMAIN,
        "agent_tooling_image": f"tooling@{IMAGE}",
        "sandbox_state_root": directory / "state",
        "minimum_workspace_bytes": 0,
        "disk_high_watermark_percent": 99,
        "disk_low_watermark_percent": 98,
        "sandbox_kill_grace_seconds": 1,
        "max_concurrent_sandboxes": 2,
        **more,
    }
    return default_bridge_service_config(**chosen)


def prepared(settings: BridgeSettings) -> str:
    """The state root with the sample repository registered; returns its commit."""
    root = settings.sandbox_state_root
    clone = root.parent / "clone"
    if clone.exists():
        return _template()[1]
    root.mkdir(mode=0o700)
    commit = make_repository(clone)
    add_repository(root, REPOSITORY, clone)
    return commit


def capabilities_of(settings: BridgeSettings, runtimes: Iterable[Runtime]) -> Capabilities:
    """What a preflight would have found out about an engine that is as it should be."""
    return Capabilities(
        runtimes=tuple(runtimes),
        quota_supported=False,
        dedicated_disk=False,
        sandbox_required=SandboxReadiness(ready=False, blockers=("disk_quota",)),
        network_policies=(NetworkPolicy.NONE,),
        publication_modes=(settings.sandbox_publication_mode,),
        image_policy_enforced=False,
        signature_verification=False,
        tooling_image=settings.agent_tooling_image,
        resource_capacity=settings.resource_capacity,
    )


@asynccontextmanager
async def assembled(
    settings: BridgeSettings,
    engine: EnginePort,
    *,
    clock: SystemClock | None = None,
    runtimes: Iterable[Runtime] = (Runtime.DOCKER,),
    builder: ImageBuilder = NO_BUILDER,
    gates: ImageGates | None = None,
    disk: Disk | None = None,
) -> AsyncIterator[BridgeService]:
    """What ``open_bridge`` does, with an engine that is there already and needs no preflight."""
    clock = clock or HastyClock()
    root = await StateRoot.open(
        settings.sandbox_state_root, clock=clock, runner_id=settings.runner_id
    )
    identity = Identity(
        runner_id=root.runner_id,
        runner_instance_id=clock.new_id(),
        trust_domain_id=TRUST_DOMAIN,
        bridge_version="0",
        host_name="host",
        platform="linux",
    )
    checked = Preflight((), capabilities_of(settings, runtimes))
    try:
        async with LocalHost.open(root.host, clock) as host, anyio.create_task_group() as tasks:
            opened = app.Opened(
                settings,
                root,
                identity,
                clock,
                engine,
                disk or await app._disks(root, engine),
                ImageDoors(builder, gates or ScriptedGates(), NO_PROVER),
                SignalRConnectionFactory(app.signalr_settings(settings)),
                host,
            )
            service = await app._assemble(opened, checked, tasks, no_faults)
            yield service
            tasks.cancel_scope.cancel()
    finally:
        await root.ledgers.close()


@asynccontextmanager
async def attended(
    service: BridgeService,
    hub: ScriptedHub,
    settings: BridgeSettings,
    commit: str,
    logs: list[MutableMapping[str, Any]],
    *,
    online: bool = True,
    run: bool = True,
) -> AsyncIterator[Bridge]:
    """Run the service until the block ends; then no secret may have gone anywhere."""
    stop, stopped = anyio.Event(), anyio.Event()
    bridge = Bridge(hub, service, settings.sandbox_state_root, commit, stop, stopped, logs)

    async def keep_running() -> None:
        if run:
            await service.run(stop)
        stopped.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_running)
        if online and run:
            await hub.online()
        try:
            yield bridge
        finally:
            # Also after a failed test: what runs in a real engine is to be removed.
            with anyio.CancelScope(shield=True), anyio.fail_after(30):
                hub.answers.clear()
                stop.set()
                await stopped.wait()
    assert bridge.leaks() == []
    assert [entry for entry in logs if "exc_info" in entry] == [], "a bug of the bridge"


@asynccontextmanager
async def memory_bridge(
    directory: Path,
    hub: ScriptedHub | None = None,
    engine: MemoryEngine | None = None,
    *,
    clock: SystemClock | None = None,
    online: bool = True,
    attend: bool = True,
    runtimes: Iterable[Runtime] = (Runtime.DOCKER,),
    builder: ImageBuilder = NO_BUILDER,
    gates: ImageGates | None = None,
    disk: Disk | None = None,
    **more: Any,
) -> AsyncIterator[Bridge]:
    """A hub, and a running bridge whose containers are coroutines."""
    with first_error(), structlog.testing.capture_logs() as logs:
        async with (
            (hub or ScriptedHub()).running() as listening,
            (engine or MemoryEngine()).running() as running,
        ):
            settings = settings_for(directory, listening, **more)
            commit = prepared(settings)
            async with (
                assembled(
                    settings,
                    running,
                    clock=clock,
                    runtimes=runtimes,
                    builder=builder,
                    gates=gates,
                    disk=disk,
                ) as service,
                attended(
                    service, listening, settings, commit, logs, online=online, run=attend
                ) as bridge,
            ):
                yield bridge


@asynccontextmanager
async def real_bridge(
    directory: Path,
    engine: Engine,
    runner_id: str,
    hub: ScriptedHub | None = None,
    **more: Any,
) -> AsyncIterator[Bridge]:
    """A hub, and a running bridge on a real engine that is known to be fit."""
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    image = engine.tooling_image
    with first_error(), structlog.testing.capture_logs() as logs:
        async with (
            (hub or ScriptedHub()).running() as listening,
            DockerEngine.connect(endpoint) as door,
        ):
            settings = settings_for(
                directory, listening, runner_id=runner_id, agent_tooling_image=image, **more
            )
            commit = prepared(settings)
            async with (
                assembled(settings, door) as service,
                attended(service, listening, settings, commit, logs) as bridge,
            ):
                yield bridge


async def wait_for(what: Callable[[], object], within_s: float = 20) -> None:
    """Look until it is so; for what has no event."""
    try:
        with anyio.fail_after(within_s):
            while not what():
                await anyio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("waited in vain") from None
