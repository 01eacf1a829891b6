"""A bridge that lacks one thing at most, a hub that is to place sessions on it, and what both say.

The bridge is the production wiring with real engine, repository and transport; the hub is a
process.  What a case is not about need not be tried again each time: :class:`Shown` stands for what
``test_what_is_taken_for_shown_is_shown`` shows with real tools.  A builder of its own takes a
BuildKit image that takes minutes to make, so its facts are told (:class:`ToldBuilder`).
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread
import pytest

from engines import REPOSITORY, Engine
from forge_bridge import app
from forge_bridge.assembly import BridgeService
from forge_bridge.doctor import CheckResult, Preflight, Verdict, preflight
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.groups import first_error
from forge_bridge.images.doors import NoBuilder
from forge_bridge.repositories import add_repository
from forge_bridge.settings import default_bridge_service_config
from forge_core.blockers import Blocker
from forge_core.image_ports import BuilderFacts
from forge_core.wire.codes import Runtime
from forge_core.wire.shapes import EngineFacts
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from git_server import make_credentials
from rig import RUNNER_TOKEN, TRUST_DOMAIN, Rig

REMOTE: Final = "http://127.0.0.1:9/sample.git"
"""Never pushed to: these sessions change nothing."""

ABSENT: Final = f"registry.invalid/nothing@sha256:{'0' * 64}"
SECCOMP: Final = REPOSITORY / "examples/seccomp/forge-sandbox.json"
APPARMOR: Final = Path("/sys/module/apparmor/parameters/enabled")
TOOLS: Final = frozenset({Blocker.IMAGE_POLICY, Blocker.SIGNATURES})
PROVEN: Final = TOOLS | {Blocker.EGRESS, Blocker.BUILDER}
"""What is shown by trying a tool, a proxy or a builder."""

PATIENCE_S: Final = 60.0
POLL_S: Final = 0.02

T = TypeVar("T")

Door = Callable[[DockerEngine], Any]


@dataclass(frozen=True)
class Lack:
    """One thing that a bridge does not have.

    :param how: what is not as it should be, in a word or two; the test's name.
    :param settings: changes to those of a bridge that lacks nothing.
    :param door: what stands between the preflight and the real engine.
    :param tried: what is tried with real parts.
    :param builder: what is read back of the builder, in place of one that is as it should be.
    :param also: the other blockers that it gives.
    :param hides: what cannot be looked at for the want of it.
    """

    blocker: Blocker
    how: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    door: Door = lambda engine: engine
    tried: frozenset[Blocker] = frozenset()
    builder: BuilderFacts | None = None
    also: frozenset[Blocker] = frozenset()
    hides: frozenset[Blocker] = frozenset()

    def __str__(self) -> str:
        return f"{self.blocker}-{self.how}".replace(" ", "-")


# -- engines that do not do as they are asked ------------------------------------------------------


class Unfaithful:
    """The real engine, which is asked for something else, and whose inspect does not tell.

    No engine of the test bed ignores these options; only the look from inside finds it out.
    """

    def __init__(self, engine: DockerEngine, change: Callable[[dict[str, Any]], object]) -> None:
        self._engine = engine
        self._change = change
        self._asked: dict[str, Mapping[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def create_container(self, name: str, request: Mapping[str, Any]) -> str:
        changed = copy.deepcopy(dict(request))
        self._change(changed)
        container = await self._engine.create_container(name, changed)
        self._asked[container] = request
        return container

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        found = copy.deepcopy(dict(await self._engine.inspect_container(container)))
        asked = self._asked[container]
        found["HostConfig"] |= {"Binds": None, **asked["HostConfig"]}
        found["Config"]["User"] = asked["User"]
        mounted = {mount["Target"] for mount in asked["HostConfig"].get("Mounts") or ()}
        found["Mounts"] = [m for m in found["Mounts"] if m["Destination"] in mounted]
        found["NetworkSettings"]["Networks"] = {}
        return found


class Desktop:
    """The real engine, which says that it is Docker Desktop."""

    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def facts(self) -> EngineFacts:
        return (await self._engine.facts()).model_copy(update={"desktop": True})


def nobody(_engine: DockerEngine) -> DockerEngine:
    """An address where no engine listens: it has gone since the bridge locked it."""
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": "unix:///nonexistent/docker.sock"})
    return DockerEngine(endpoint, timeout_ms=5_000, max_calls=4)


def doing(change: Callable[[dict[str, Any]], object]) -> Door:
    return lambda engine: Unfaithful(engine, change)


def host(**options: Any) -> Door:
    """An engine that gives containers these options of its own (``HostConfig``)."""
    return doing(lambda request: request["HostConfig"].update(options))


# -- what other cases show -------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """What image tools and proxy have shown, but for what is tried now."""

    lack: Lack
    prover: Any = None
    egress: Any = None

    async def prove(self, *arguments: Any) -> Any:
        if self.egress is not None:
            if Blocker.EGRESS in self.lack.tried:
                return await self.egress.prove(*arguments)
            return "shown"
        known: dict[str, str] = dict.fromkeys(TOOLS - self.lack.tried, "shown")
        if not self.lack.tried & TOOLS:
            return Proofs(known)
        found: Proofs = await self.prover.prove(*arguments)
        return Proofs(known) | found


class ToldBuilder(NoBuilder):
    """A builder of which these facts are read back."""

    def __init__(self, facts: BuilderFacts) -> None:
        super().__init__("it builds nothing")
        self._facts = facts

    async def facts(self) -> BuilderFacts:
        return self._facts


DEDICATED: Final = BuilderFacts("buildkit:sha256:1", dedicated=True, limits_hold=True)
UNLIMITED: Final = replace(DEDICATED, limits_hold=False, shortcomings=("no limit on processes",))


# -- the hub and the bridges -----------------------------------------------------------------------


class Operator(Rig):
    """A hub, a repository, and bridges in this process; what is seen is what an operator sees."""

    def __init__(self, directory: Path, engine: Engine, runner_id: str) -> None:
        super().__init__(directory, engine, runner_id)
        self._bridges = 0
        self.seccomp = directory / "seccomp.json"
        self.seccomp.write_bytes(SECCOMP.read_bytes())
        self.seccomp.chmod(0o644)
        credentials = make_credentials(
            directory / "credentials", REMOTE, project="project", repository="sample"
        )
        self.start_hub(FORGE_HUB_CREDENTIALS_DIRECTORY=str(credentials))

    @property
    def baseline(self) -> set[Blocker]:
        """What a bridge lacks on this machine though everything was done that can be done."""
        has_lsm = APPARMOR.exists() and APPARMOR.read_text().startswith("Y")
        return {
            *(() if self.engine.rootless else (Blocker.ROOTLESS,)),
            *(() if self.engine.limits_enforced else (Blocker.LIMITS,)),
            *(() if has_lsm else (Blocker.LSM,)),
        }

    def settings(self, directory: Path, runner_id: str) -> dict[str, Any]:
        """Of a bridge that lacks nothing that this machine can give."""
        return {
            "server_url": self.url,
            "api_token": RUNNER_TOKEN,
            "runner_id": runner_id,
            "trust_domain_id": TRUST_DOMAIN,
            "sandbox_state_root": directory / "state",
            "minimum_workspace_bytes": 0,
            "disk_high_watermark_percent": 99,
            "disk_low_watermark_percent": 98,
            "sandbox_kill_grace_seconds": 1,
            "allow_host_execution": True,
            "agent_tooling_image": self.engine.tooling_image,
            "sandbox_seccomp_profile": self.seccomp,
            "sandbox_lsm_security_opt": "apparmor=docker-default",
            "sandbox_dedicated_disk": True,
            "sandbox_publication_mode": "bridge_push",
            "sandbox_build_egress_enforced": True,
            "sandbox_egress_enforced": True,
            "sandbox_egress_proxy_image": ABSENT,
        }

    @asynccontextmanager
    async def lacking(
        self, directory: Path, lack: Lack, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Placed]:
        """A running bridge that lacks this, known to the hub."""
        self._bridges += 1
        runner_id = f"{self.runner_id}-{self._bridges}"
        found: list[Preflight] = []

        async def look(engine: DockerEngine, *known: Any, **parts: Any) -> Preflight:
            shown = Shown(lack, parts.pop("prover"))
            egress = Shown(lack, egress=parts.pop("egress"))
            builder = parts.pop("builder")
            if Blocker.BUILDER not in lack.tried:
                builder = ToldBuilder(lack.builder or DEDICATED)
            door = lack.door(engine)
            parts |= {"prover": shown, "egress": egress, "builder": builder}
            found.append(await preflight(door, *known, **parts))
            return found[-1]

        monkeypatch.setattr(app, "preflight", look)
        monkeypatch.setenv("DOCKER_HOST", self.engine.base_url)
        monkeypatch.setenv("DOCKER_CONFIG", self.engine.docker_config)
        settings = default_bridge_service_config(
            **{**self.settings(directory, runner_id), **lack.settings}
        )
        (directory / "state").mkdir(mode=0o700)
        add_repository(directory / "state", "sample", self.repository, remote=REMOTE)
        stop, stopped = anyio.Event(), anyio.Event()

        async def run(service: BridgeService) -> None:
            await service.run(stop)
            stopped.set()

        with first_error():
            async with app.open_bridge(settings) as service, anyio.create_task_group() as tasks:
                tasks.start_soon(run, service)
                try:
                    yield Placed(self, runner_id, found[0])
                finally:
                    # Also after a failed test: what runs in the engine is to be removed.
                    with anyio.CancelScope(shield=True), anyio.fail_after(PATIENCE_S):
                        stop.set()
                        await stopped.wait()


@dataclass(frozen=True)
class Placed:
    """One bridge as the hub knows it."""

    hub: Operator
    runner_id: str
    found: Preflight

    def findings(self) -> dict[str, CheckResult]:
        """What the doctor shows of what stands in the way."""
        return {result.id: result for result in self.found.results if result.blocks}

    @property
    def runs_containers(self) -> bool:
        return all(result.verdict is not Verdict.BLOCK_ALL for result in self.found.results)

    async def dispatch(self, policy: str, **more: Any) -> str:
        wanted = {
            "policy": policy,
            "runnerId": self.runner_id,
            "approvedCommit": self.hub.commit,
            "publication": {"mode": "bridge_push"},
            **more,
        }
        return await anyio.to_thread.run_sync(lambda: self.hub.dispatch("true", **wanted))

    async def refused(self, **more: Any) -> set[str]:
        """The blockers that the hub names where a ``sandbox_required`` session is not placed."""
        session_id = await self.dispatch("sandbox_required", **more)

        def detail(session: dict[str, Any]) -> str | None:
            (refusal,) = session["refusals"] or ({"reason": ""},)
            return refusal["detail"] if refusal["reason"] == "policy_unsatisfied" else None

        session = await self._until(session_id, detail)
        assert session["state"] == "queued"
        assert session["attempts"][0]["dispatches"] == []
        diagnosed = await anyio.to_thread.run_sync(self.hub.diagnostics, session_id)
        assert detail(diagnosed["session"]) == detail(session)
        what, _, names = str(detail(session)).partition(": ")
        assert what == "cannot meet sandbox_required"
        await anyio.to_thread.run_sync(self.hub.post, f"/sessions/{session_id}/cancel")
        return set(names.split(", "))

    async def dispatch_other(self, **more: Any) -> str:
        """A session that can do without what this bridge lacks."""
        modes = self.found.capabilities.publication_modes
        wanted = {"publication": {"mode": modes[0]}, **more}
        return await self.dispatch(
            "sandbox_preferred" if self.runs_containers else "host", **wanted
        )

    async def ran(self, session_id: str) -> Runtime:
        """Where the session was taken to, once it has succeeded."""
        session = await self._until(session_id, lambda session: session["endedAt"])
        assert (session["state"], session["failureCode"]) == ("succeeded", None), session
        (dispatched,) = session["attempts"][0]["dispatches"]
        return Runtime(dispatched["runtime"])

    async def advertised(self) -> list[str]:
        path = f"/runners/{self.runner_id}"
        runner = await anyio.to_thread.run_sync(self.hub.get, path)
        return list(runner["capabilities"]["sandboxRequired"]["blockers"])

    async def until_advertised(self, blockers: list[Blocker]) -> None:
        await _until(self.advertised, lambda advertised: advertised == blockers)

    async def _until(
        self, session_id: str, what: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any]:
        path = f"/sessions/{session_id}"
        return await _until(lambda: anyio.to_thread.run_sync(self.hub.get, path), what)


async def _until(look: Callable[[], Awaitable[T]], what: Callable[[T], object]) -> T:
    """What the hub says, once it is as wanted; it is asked now and then."""
    with anyio.fail_after(PATIENCE_S):
        while not what(seen := await look()):
            await anyio.sleep(POLL_S)
    return seen
