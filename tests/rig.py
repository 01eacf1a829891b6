"""A hub and a bridge as real processes against a real engine, driven as a program would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

import processes
from engines import REPOSITORY, Engine
from forge_bridge.status import BridgeStatus, read_status

SAMPLE = REPOSITORY / "examples" / "sample-project"
TRUST_DOMAIN = "test-domain"
RUNNER_TOKEN = "rig-runner-token-0123456789abcdef"
API_TOKEN = "rig-api-token-0123456789abcdef"
DEADLINE_S = 60.0


def wait_for(what: str, look: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Look until the answer is true; the pause between looks is not what is waited for."""
    ends_at = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < ends_at, f"waited {deadline_s} s in vain for {what}"
        threading.Event().wait(0.02)


def git(repository: Path, *arguments: str) -> str:
    """Git as a person would use it in their clone."""
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost")
    command = ["git", *identity, "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Daemon:
    """One process of ours: ended by its own pid, its log kept for a failing test."""

    def __init__(self, name: str, command: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                command, env=dict(env), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, deadline_s: float = 90.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)

    def memory_peak_kib(self) -> int:
        """VmHWM of proc_pid_status(5)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
        raise AssertionError(f"no VmHWM of {self.name}")


class Rig:
    """One hub, one bridge, one repository with one commit.

    :ivar always: what every bridge of this rig is set to besides.
    """

    always: Mapping[str, str] = MappingProxyType({})

    def __init__(self, directory: Path, engine: Engine, runner_id: str) -> None:
        self.directory = directory
        self.engine = engine
        self.runner_id = runner_id
        directory.mkdir(exist_ok=True)
        self.state_root = directory / "state"
        self.repository = directory / "clone"
        shutil.copytree(SAMPLE, self.repository)
        git(self.repository, "init", "--quiet", "--initial-branch=main")
        git(self.repository, "add", "--all")
        git(self.repository, "commit", "--quiet", "--message=First")
        self.commit = git(self.repository, "rev-parse", "HEAD")
        self.url = ""
        self.hub: Daemon
        self.bridge: Daemon
        self._http = requests.Session()
        self._http.trust_env = False
        # A hub that was frozen closes the connections that it kept for us when it wakes.
        again = Retry(total=2, connect=0, allowed_methods=("GET",))
        self._http.mount("http://", HTTPAdapter(max_retries=again))
        self._http.headers["Authorization"] = f"Bearer {API_TOKEN}"

    # -- processes ------------------------------------------------------------------------------

    def start_hub(self, port: int = 0, **settings: str) -> None:
        environment = self._environment(
            FORGE_HUB_RUNNER_TOKEN=RUNNER_TOKEN,
            FORGE_HUB_API_TOKEN=API_TOKEN,
            FORGE_HUB_DATABASE_URL=f"sqlite:///{self.directory}/hub.sqlite3",
            FORGE_HUB_KILL_GRACE_MS="1000",
            FORGE_HUB_DECLINE_BACKOFF_MS="100",
            **settings,
        )
        log = self.directory / "hub.log"
        command = [sys.executable, "-m", "forge_hub", "serve", "--port", str(port)]
        self.hub = Daemon("hub", command, log, environment)
        self.url = wait_for("the hub's address", lambda: _address_in(log, self.hub), 30)
        wait_for("the hub", lambda: self._is_ready(), 30)

    def start_bridge(
        self,
        settings: Mapping[str, str] | None = None,
        /,
        *,
        wait: bool = True,
        deadline_s: float = DEADLINE_S,
        **more: str,
    ) -> None:
        """Start it with these settings besides those that every rig has."""
        ours = {
            "DOCKER_HOST": self.engine.base_url,
            "DOCKER_CONFIG": self.engine.docker_config,
            "FORGE_DOCKER_EXECUTABLE": self.engine.docker_executable,
            "FORGE_SERVER_URL": self.url,
            "FORGE_API_TOKEN": RUNNER_TOKEN,
            "FORGE_RUNNER_ID": self.runner_id,
            "FORGE_TRUST_DOMAIN_ID": TRUST_DOMAIN,
            "FORGE_AGENT_TOOLING_IMAGE": self.engine.tooling_image,
            "FORGE_SANDBOX_STATE_ROOT": str(self.state_root),
            "FORGE_MINIMUM_WORKSPACE_BYTES": "1MiB",
            "FORGE_DISK_HIGH_WATERMARK_PERCENT": "99",
            "FORGE_DISK_LOW_WATERMARK_PERCENT": "98",
            "FORGE_SANDBOX_KILL_GRACE_SECONDS": "1",
            "FORGE_LOG_FORMAT": "json",
            **self.always,
        }
        environment = self._environment(**{**ours, **(settings or {}), **more})
        program = [sys.executable, "-m", "forge_bridge"]
        add = [*program, "add-repo", "sample", str(self.repository)]
        subprocess.run(add, env=environment, check=True, capture_output=True)
        self.bridge = Daemon("bridge", program, self.directory / "bridge.log", environment)
        if wait:
            wait_for("the bridge to come online", self._is_online, deadline_s)

    def stop(self) -> None:
        """Stop what runs, in order."""
        for name in ("bridge", "hub"):
            daemon = getattr(self, name, None)
            if daemon is not None:
                daemon.stop()

    def close(self) -> None:
        """Stop what runs; nothing of this runner may be left in the engine."""
        self.stop()
        left = self.resources()
        assert not left, f"left in the engine: {left}"

    # -- the repository -------------------------------------------------------------------------

    def add_commit(self, files: Mapping[str, str]) -> str:
        """Commit these files besides what is there; returns the commit's id."""
        for name, content in files.items():
            path = self.repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        git(self.repository, "add", "--all")
        git(self.repository, "commit", "--quiet", "--allow-empty", "--message=Next")
        return git(self.repository, "rev-parse", "HEAD")

    # -- what the hub says ----------------------------------------------------------------------

    def get(self, path: str) -> Any:
        answer = self._http.get(f"{self.url}/api/v1{path}", timeout=30)
        assert answer.ok, answer.text
        return answer.json()

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = self._http.put(f"{self.url}/api/v1{path}", json=body, timeout=30)
        assert answer.ok, answer.text
        return answer.json()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        answer = self._http.post(f"{self.url}/api/v1{path}", json=body or {}, timeout=30)
        assert answer.ok, answer.text
        return answer.json()

    def dispatch(self, *argv: str, **more: Any) -> str:
        """A session for this runner; returns its id."""
        limits = {"hardWallMs": 60_000, "idleMs": 30_000, "maxOutputBytes": 1 << 20}
        body = {
            "projectId": "project",
            "trustDomainId": TRUST_DOMAIN,
            "policy": "sandbox_preferred",
            "repository": "sample",
            "inputCommit": self.commit,
            "branch": "result",
            "runnerId": self.runner_id,
            "resources": {"slots": 1, "memoryBytes": 256 << 20, "cpuMillis": 1000, "pids": 64},
            "agent": {"provider": "command", "argv": list(argv), "env": more.pop("env", {})},
            "limits": {**limits, **more.pop("limits", {})},
            "leaseTtlMs": 20_000,
            **more,
        }
        return str(self.post("/sessions", body)["sessionId"])

    def wait_event(self, session_id: str, event_type: str) -> dict[str, Any]:
        """The first event of this type, once it has come."""

        def look() -> dict[str, Any] | None:
            timeline = self.diagnostics(session_id)["timeline"]
            return next((e for e in timeline if e["type"] == event_type), None)

        return dict(wait_for(f"{event_type} of {session_id}", look))

    def wait_over(self, session_id: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The final result, cleanup complete."""

        def look() -> dict[str, Any] | None:
            result = self.get(f"/sessions/{session_id}")["result"]
            return result if result and result["cleanup"] == "complete" else None

        return dict(wait_for(f"the end of {session_id}", look, deadline_s))

    def diagnostics(self, session_id: str) -> dict[str, Any]:
        return dict(self.get(f"/sessions/{session_id}/diagnostics"))

    def told(self, session_id: str) -> dict[str, dict[str, Any]]:
        """The last payload of each type of event."""
        return {e["type"]: e["payload"] for e in self.diagnostics(session_id)["timeline"]}

    # -- what the bridge says -------------------------------------------------------------------

    def status(self) -> BridgeStatus:
        """What it wrote last about itself."""
        found = read_status(self.state_root)
        assert found is not None, f"no status in {self.state_root}"
        return found

    # -- what the engine says -------------------------------------------------------------------

    def resources(self, *labels: str) -> list[str]:
        """Everything in the engine that carries this runner's label, by another door than ours.

        :param labels: more that it must carry, as ``name=value``.
        """
        wanted = json.dumps({"label": [f"dev.forge.runner-id={self.runner_id}", *labels]})
        api = self.engine.api
        containers = api.get("/containers/json", {"all": "1", "filters": wanted})
        networks = api.get("/networks", {"filters": wanted})
        volumes = api.get("/volumes", {"filters": wanted})["Volumes"] or []
        return sorted(
            [c["Names"][0].lstrip("/") for c in containers]
            + [n["Name"] for n in networks]
            + [v["Name"] for v in volumes]
        )

    def left_on_host(self) -> list[str]:
        """Directories, and ids of processes, of attempts on the host, by another door than ours."""
        directory = self.state_root / "host"
        mark = f'FORGE_HOST_RESOURCE=["{directory}"'.encode()
        found = [path.name for path in directory.iterdir()]
        for process_id, environ in processes.of_all("environ"):
            variables = environ.split(b"\0")
            found += [str(process_id) for variable in variables if variable.startswith(mark)]
        return found

    def agent_state(self) -> dict[str, Any] | None:
        """The engine's State of the agent's container, if there is one."""
        names = [name for name in self.resources() if name.startswith("forge-agent-")]
        return self.engine.api.get(f"/containers/{names[0]}/json")["State"] if names else None

    # -- private --------------------------------------------------------------------------------

    def _environment(self, **more: str) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("FORGE_", "DOCKER_"))}
        return {**kept, "HOME": str(self.directory), **more}

    def _is_ready(self) -> bool:
        try:
            return self._http.get(f"{self.url}/readyz", timeout=5).ok
        except requests.ConnectionError:
            return False

    def _is_online(self) -> bool:
        code = self.bridge.process.poll()
        assert code is None, f"the bridge ended with {code}: {self.bridge.log.read_text()[-3000:]}"
        found = read_status(self.state_root)
        return found is not None and found.pid == self.bridge.pid and found.connection == "online"


def _address_in(log: Path, hub: Daemon) -> str | None:
    assert hub.process.poll() is None, log.read_text()[-3000:]
    found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
    return found.group() if found else None


@contextmanager
def running_rig(directory: Path, engine: Engine, runner_id: str, **settings: str) -> Iterator[Rig]:
    """A rig that is up, and that leaves nothing."""
    rig = Rig(directory, engine, runner_id)
    try:
        rig.start_hub()
        rig.start_bridge(settings)
        yield rig
    finally:
        rig.close()
