"""A runner that is killed where a test says, and what must be true of it afterwards."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engines import Engine
from forge_core.labels import Owner
from git_server import git_server, make_credentials
from rig import RUNNER_TOKEN, TRUST_DOMAIN, Daemon, Rig, git, wait_for

PROGRAM = Path(__file__).with_name("bridge_at_fault.py")
AGENT = ("sh", "-c", "echo begun; echo changed > VERSION")
UNTIL_ENDED = ("sh", "-c", "echo begun; exec sleep 600")
ON_HOST = 'echo "$FORGE_HOST_RESOURCE" >> "$STARTS"; '
"""Whose agent it is that starts, for somebody to count."""

LABEL = "dev.forge."
REPOSITORY = "sample"
DIES_WITHIN_S = 60.0
OFFER_TTL_MS = 3_000

Outcome = tuple[str, str | None]
"""``outcome`` and ``failureCode`` of a result."""

STOPPED: Outcome = ("failed", "bridge_stopped")
DONE: Outcome = ("succeeded", None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was certain at the moment of a death: on disk, at the hub, in the engine.

    :ivar outcomes: by fence; whatever happens later, these stay.
    :ivar started: the fences whose ledger says that the hub said go.
    :ivar created: names of resources that the engine has, or that a ledger has as a fact.
    :ivar changes: whether the agent changes anything, so that a success is a commit as well.
    """

    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    started: frozenset[int] = frozenset()
    created: frozenset[str] = frozenset()
    changes: bool = True


class AgentStarts:
    """Counts, by the engine's own events, how often each dispatch's agent was started."""

    def __init__(self, engine: Engine, runner_id: str) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        filters = {
            "type": ["container"],
            "event": ["start"],
            "label": [f"{LABEL}runner-id={runner_id}", f"{LABEL}role=agent"],
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(engine.socket_path))
        target = f"/events?filters={quote(json.dumps(filters))}"
        self._socket.sendall(f"GET {target} HTTP/1.0\r\nHost: engine\r\n\r\n".encode())
        self._lines = self._socket.makefile("rb")
        status = self._lines.readline()
        assert b" 200 " in status, status
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def of(self, attempt_id: str) -> dict[int, int]:
        """By fence."""
        return {fence: n for (one, fence), n in tuple(self._counts.items()) if one == attempt_id}

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._lines.close()
        self._socket.close()

    def _count(self) -> None:
        for line in self._lines:
            if line.startswith(b"{"):
                labels = json.loads(line)["Actor"]["Attributes"]
                key = labels[f"{LABEL}attempt-id"], int(labels[f"{LABEL}fence"])
                self._counts[key] += 1


class HubRig(Rig):
    """A hub that is quick to see what a runner holds, and to offer again what nobody took.

    :ivar remote: where the results of all runners go.
    """

    def __init__(self, directory: Path, engine: Engine, runner_id: str) -> None:
        super().__init__(directory, engine, runner_id)
        self._servers = ExitStack()
        self.remote = self._servers.enter_context(git_server(directory / "served"))
        self.remote_url = self.remote.create(REPOSITORY)

    def start_hub(self, port: int = 0, **settings: str) -> None:
        credentials = make_credentials(
            self.directory / "credentials",
            self.remote_url,
            project="project",
            repository=REPOSITORY,
        )
        super().start_hub(
            port,
            FORGE_HUB_CREDENTIALS_DIRECTORY=str(credentials),
            FORGE_HUB_PUBLISH_TTL_MS="1000",
            **settings,
        )

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._servers.close()

    def _environment(self, **more: str) -> dict[str, str]:
        quick = {
            "FORGE_HUB_DECLINE_BACKOFF_MS": "2000",
            "FORGE_HUB_HEARTBEAT_INTERVAL_MS": "500",
            "FORGE_HUB_OFFER_TTL_MS": str(OFFER_TTL_MS),
        }
        return super()._environment(**{**more, **quick})

    def restart_hub(self) -> None:
        """Again, where it was, with what its database holds."""
        self.start_hub(port=int(self.url.rpartition(":")[2]))


class CrashRig(Rig):
    """A runner at a hub that others use too; it pushes, and obeys orders of the test.

    :ivar is_fit: its bridge is online, idle and proven to have lost nothing.
    """

    def __init__(self, directory: Path, engine: Engine, runner_id: str, hub: HubRig) -> None:
        super().__init__(directory, engine, runner_id)
        self.url, self.hub = hub.url, hub.hub
        self.remote = hub.remote
        git(self.repository, "remote", "add", "origin", hub.remote_url)
        self._sessions = 0
        self.is_fit = False
        self.orders = directory / "orders.json"
        self._environ = self._environment(
            DOCKER_HOST=engine.base_url,
            DOCKER_CONFIG=engine.docker_config,
            FORGE_DOCKER_EXECUTABLE=engine.docker_executable,
            FORGE_SERVER_URL=hub.url,
            FORGE_API_TOKEN=RUNNER_TOKEN,
            FORGE_RUNNER_ID=runner_id,
            FORGE_TRUST_DOMAIN_ID=TRUST_DOMAIN,
            FORGE_AGENT_TOOLING_IMAGE=engine.tooling_image,
            FORGE_SANDBOX_STATE_ROOT=str(self.state_root),
            FORGE_MINIMUM_WORKSPACE_BYTES="1MiB",
            FORGE_DISK_HIGH_WATERMARK_PERCENT="99",
            FORGE_DISK_LOW_WATERMARK_PERCENT="98",
            FORGE_SANDBOX_KILL_GRACE_SECONDS="1",
            FORGE_ALLOW_OPEN_PUBLIC_SANDBOX="true",
            FORGE_SANDBOX_PUBLICATION_MODE="bridge_push",
            FORGE_ALLOW_HOST_EXECUTION="true",
            FORGE_LOG_FORMAT="json",
        )
        add = [sys.executable, "-m", "forge_bridge", "add-repo", "sample", str(self.repository)]
        subprocess.run(add, env=self._environ, check=True, capture_output=True)
        self.starts = AgentStarts(engine, runner_id)
        self.host_starts = directory / "host-starts"

    def dispatch_on_host(self, script: str) -> str:
        """A session whose agent notes its start."""
        environment = {"STARTS": str(self.host_starts)}
        return self.dispatch("sh", "-c", ON_HOST + script, policy="host", env=environment)

    def starts_of(self, attempt_id: str) -> Counter[int]:
        """How often an agent was started, by fence: in a container or on the host."""
        counts = Counter(self.starts.of(attempt_id))
        lines = self.host_starts.read_text().splitlines() if self.host_starts.exists() else ()
        for _, labels in map(json.loads, lines):
            if labels[f"{LABEL}attempt-id"] == attempt_id:
                counts[int(labels[f"{LABEL}fence"])] += 1
        return counts

    def dispatch(self, *argv: str, **more: Any) -> str:
        """A session whose result goes to a branch of its own; the remote has its input."""
        served = str(self.remote.root / f"{REPOSITORY}.git")
        base = f"{self.commit}:refs/heads/base-{self.commit}"
        git(self.repository, "push", "--quiet", served, base)
        self._sessions += 1
        branch = f"{self.runner_id}-{self._sessions}"
        return super().dispatch(*argv, branch=branch, publication={"mode": "bridge_push"}, **more)

    def launch(self) -> None:
        """Start the bridge and do not wait for anything."""
        command = [sys.executable, str(PROGRAM), str(self.orders)]
        self.bridge = Daemon("bridge", command, self.directory / "bridge.log", self._environ)

    def come_online(self) -> None:
        """Start the bridge and wait until the hub may use it."""
        self.launch()
        self.wait_online()

    def wait_online(self) -> None:
        wait_for("the bridge to come online", self._is_online)

    def arm(self, **orders: object) -> None:
        """Give the bridge its orders; the file appears whole."""
        self.is_fit = False
        draft = self.orders.with_suffix(".draft")
        draft.write_text(json.dumps(orders))
        draft.replace(self.orders)

    def has_tooling(self) -> bool:
        """Whether the engine holds a tree that a bridge of this rig has made for PID 1."""
        label = [f"{LABEL}runner-id={self.runner_id}", f"{LABEL}role=tooling"]
        filters = json.dumps({"label": label})
        return bool(self.engine.api.get("/volumes", {"filters": filters})["Volumes"])

    def disarm(self) -> None:
        self.orders.unlink(missing_ok=True)

    def wait_dead(self) -> None:
        """The bridge must die by SIGKILL, of its own hand."""
        look = self.bridge.process.poll
        wait_for("the bridge to reach the point", lambda: look() is not None, DIES_WITHIN_S)
        assert look() == -signal.SIGKILL, self.bridge.log.read_text()[-3000:]

    def agent_runs(self, session_id: str) -> None:
        """Wait until the agent runs, the helper waits, and nothing is owed to the hub."""
        self.wait_event(session_id, "agent.started")
        wait_for("the helper", lambda: _running(self, "helper"))
        wait_for("an empty outbox", lambda: not files(self, "outbox"))

    def has_ended(self) -> bool:
        """Whether no bridge runs."""
        return self.bridge.process.poll() is not None

    def bridge_log(self) -> str:
        return self.bridge.log.read_text()

    def evidence(self, session_id: str) -> Evidence:
        """Read all three places by other doors than the bridge's own."""
        known = (d for d in self.dispatches(session_id) if d["result"])
        outcomes = {d["fence"]: outcome_of(d["result"]) for d in known}
        started: set[int] = set()
        created = set(self.resources(f"{LABEL}project-id=project"))
        for line in _json_lines(self.state_root / "attempts", "*.ledger"):
            match line["kind"], line["data"]:
                case "reserved", data:
                    fence = data["fence"]
                case "started", _:
                    started.add(fence)
                case "fact", data:
                    created.add(data["name"])
                case "result", data:
                    outcomes[fence] = outcome_of(data)
        for message in _json_lines(self.state_root / "outbox", "*.json"):
            if message["method"] == "SubmitDispatchResult":
                outcomes[message["payload"]["fence"]] = outcome_of(message["payload"])
        return Evidence(outcomes, frozenset(started), frozenset(created))

    def create_late(self, session_id: str) -> None:
        """A volume, and a container that was never started, of the session's only dispatch."""
        (attempt,) = self.get(f"/sessions/{session_id}")["attempts"]
        instance_id = self.status().runner_instance_id
        owner = Owner(self.runner_id, instance_id, attempt["attemptId"], 1, "project", TRUST_DOMAIN)
        container = {"Image": self.engine.tooling_image, "Labels": owner.labels("late")}
        volume = {"Name": owner.name("late-too"), "Labels": owner.labels("late-too")}
        for path, body in (
            (f"/containers/create?name={owner.name('late')}", container),
            ("/volumes/create", volume),
        ):
            status, answer = self.engine.api.call(
                "POST", path, body=[json.dumps(body).encode()], content_type="application/json"
            )
            assert status == 201, answer

    def images(self) -> dict[str, list[str]]:
        """The names of every image that this runner has built, by the image's key."""
        wanted = [f"{LABEL}runner-id={self.runner_id}", f"{LABEL}managed=image"]
        filters = {"filters": json.dumps({"label": wanted})}
        found = self.engine.api.get("/images/json", filters)
        return {
            image["Labels"][f"{LABEL}image-key"]: sorted(image["RepoTags"] or ()) for image in found
        }

    def dispatches(self, session_id: str) -> list[dict[str, Any]]:
        """Those of the session's attempt, in the order of their fences."""
        (attempt,) = self.get(f"/sessions/{session_id}")["attempts"] or [{"dispatches": []}]
        return list(attempt["dispatches"])

    def close(self) -> None:
        """End the bridge; nothing of this runner may be left in the engine."""
        try:
            bridge = getattr(self, "bridge", None)
            if bridge is not None:
                bridge.stop()
        finally:
            self.starts.close()
            for names in self.images().values():
                for name in names:
                    self.engine.api.call("DELETE", f"/images/{quote(name, safe='')}")
        left = self.resources()
        assert not left, f"left in the engine: {left}"


class Fleet:
    """A hub, and runners of which one is used at a time, for as long as it proves fit."""

    def __init__(self, directory: Path, engine: Engine, runner_id: str) -> None:
        (directory / "hub").mkdir()
        self._hub = HubRig(directory / "hub", engine, runner_id)
        self._hub.start_hub()
        self._directory = directory
        self._count = 0
        self._idle: CrashRig | None = None

    def take(self) -> CrashRig:
        """A runner that is online and idle."""
        rig, self._idle = self._idle, None
        if rig is None:
            self._count += 1
            directory = self._directory / f"runner-{self._count}"
            directory.mkdir()
            runner_id = f"{self._hub.runner_id}-{self._count}"
            rig = CrashRig(directory, self._hub.engine, runner_id, self._hub)
            with closing_on_failure(rig):
                rig.come_online()
        return rig

    def give_back(self, rig: CrashRig) -> None:
        """Keep a runner that is fit; one that is not is cleaned up after."""
        if rig.is_fit:
            self._idle = rig
            return
        rig.disarm()
        rig.bridge.kill()
        with closing_on_failure(rig):
            rig.come_online()
        rig.close()

    def close(self) -> None:
        try:
            if self._idle is not None:
                self._idle.close()
        finally:
            self._hub.close()


@contextmanager
def closing_on_failure(rig: CrashRig) -> Iterator[None]:
    """A runner that does not come online is not used, and leaves nothing running here."""
    try:
        yield
    except BaseException:
        rig.close()
        raise


def kill_agent(rig: Rig) -> None:
    """End the agent's container behind the back of everybody."""
    (agent,) = (name for name in rig.resources() if name.startswith("forge-agent-"))
    status, answer = rig.engine.api.call("POST", f"/containers/{agent}/kill")
    assert status == 204, answer


def files(rig: Rig, *folders: str) -> list[str]:
    """The names of the files in these folders of the state root."""
    found = (path for folder in folders for path in (rig.state_root / folder).iterdir())
    return sorted(str(path.relative_to(rig.state_root)) for path in found if path.is_file())


def _running(rig: CrashRig, role: str) -> bool:
    names = [name for name in rig.resources() if name.startswith(f"forge-{role}-")]
    return bool(names) and bool(
        rig.engine.api.get(f"/containers/{names[0]}/json")["State"]["Running"]
    )


def outcome_of(result: Mapping[str, Any]) -> Outcome:
    return result["outcome"], result.get("failureCode")


def _json_lines(directory: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """Every whole line; a torn one was never acknowledged."""
    for path in directory.glob(pattern):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)
