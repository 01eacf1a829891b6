"""Real Docker Engines for tests: what a test is given, and what it may not leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TESTBED = REPOSITORY / "scripts" / "testbed"
sys.path.insert(0, str(REPOSITORY / "scripts"))

from lib.engine_api import EngineApi  # noqa: E402 - scripts/ is no distribution

DEFAULT_ENGINES = ("d26", "r26", "d20")
LABEL_PREFIX = "dev.forge."
RUNNER_LABEL = "dev.forge.runner-id"
VANISH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Engine:
    """A Docker Engine of the test bed.

    :param name: ``d26``, ``r26``, ``d20``, ``r20``, ``v26``: rootful or rootless, and the version.
    :param tooling_image: digest reference of the image with ``python3`` and ``git``.
    :param busybox_image: digest reference of a tiny image with a shell.
    :param limits_enforced: memory, pids and CPU limits hold; rootless engines may ignore them.
    :param daemon_pid: dockerd, for tests that stop or kill it.
    :param network_namespace: path for ``nsenter --net``; published ports are in there.
    :param docker_executable: the Docker CLI.
    :param docker_config: its ``DOCKER_CONFIG``, which knows the buildx plugin.
    """

    name: str
    socket_path: Path
    version: str
    api_version: str
    rootless: bool
    limits_enforced: bool
    tooling_image: str
    busybox_image: str
    daemon_pid: int
    network_namespace: str
    docker_executable: str
    docker_config: str

    @property
    def base_url(self) -> str:
        """What the Docker SDK and ``DOCKER_HOST`` call it."""
        return f"unix://{self.socket_path}"

    @property
    def api(self) -> EngineApi:
        """Raw access that shares no code with what is under test."""
        return EngineApi(self.socket_path)


class BedCommandError(Exception):
    """``scripts/testbed`` failed; the message is what it said."""


def run_testbed(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/testbed`` as an operator would."""
    return subprocess.run(
        [sys.executable, str(TESTBED), *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,  # a machine that is emulated, made and booted, and others that are waited for
    )


def describe(*, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The status of the test bed.

    :raises BedCommandError: it cannot be told.
    """
    done = run_testbed("status", "--json", environment=environment)
    if done.returncode != 0:
        raise BedCommandError(done.stderr.strip())
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def extra_image(engine: Engine, name: str) -> str:
    """Digest reference of an image that the bed makes when it is asked for, in this engine.

    :raises BedCommandError: it cannot be made.
    """
    done = run_testbed("up", "--parts", f"{name},{engine.name}")
    if done.returncode != 0:
        raise BedCommandError(done.stderr.strip())
    return str(describe()["images"][name]["reference"])


@dataclass(slots=True)
class TestBed:
    """The test bed as this session found or made it."""

    __test__ = False

    started: tuple[str, ...] = ()
    problem: str = ""

    @classmethod
    def bring_up(cls, engines: Iterable[str]) -> TestBed:
        """Start what is not up; what was up before is not ours to stop."""
        try:
            before = describe()
        except BedCommandError as error:
            return cls(problem=str(error))
        missing = [name for name in engines if not before["engines"][name]["up"]]
        if not missing:
            return cls()
        if not before["registry"]["up"]:
            missing.insert(0, "registry")
        done = run_testbed("up", "--parts", ",".join(missing))
        if done.returncode == 0:
            return cls(tuple(missing))
        after = describe()
        states = {"registry": after["registry"], **after["engines"]}
        return cls(tuple(part for part in missing if states[part]["up"]), done.stderr.strip())

    def engine(self, name: str) -> Engine:
        """One engine of it, as it is now: a test may have restarted its daemon.

        :raises BedCommandError: it could not be started; the message says why.
        """
        status = describe()
        facts = status["engines"][name]
        if not facts["up"]:
            raise BedCommandError(self.problem or f"engine {name} is not up")
        images = status["images"]
        return Engine(
            name=name,
            socket_path=Path(facts["socket"]),
            version=facts["version"],
            api_version=facts["api_version"],
            rootless=facts["rootless"],
            limits_enforced=facts["limits_enforced"],
            tooling_image=images["tooling"]["reference"],
            busybox_image=images["busybox"]["reference"],
            daemon_pid=facts["daemon_pid"],
            network_namespace=facts["network_namespace"],
            docker_executable=status["docker_cli"]["executable"],
            docker_config=status["docker_cli"]["config"],
        )

    def take_down(self) -> str:
        """Stop what this session started.

        :returns: what is wrong; empty when nothing is left.
        """
        if not self.started:
            return ""
        done = run_testbed("down", "--parts", ",".join(self.started))
        return done.stderr.strip() if done.returncode else ""


def labelled(api: EngineApi) -> dict[str, str]:
    """Containers, networks and volumes with a ``dev.forge.*`` label: description by identity."""
    found: dict[str, str] = {}
    for container in api.get("/containers/json", {"all": "true"}):
        name = container["Names"][0].lstrip("/") if container["Names"] else ""
        _note(found, "container", container["Id"], name, container["Labels"])
    for network in api.get("/networks"):
        _note(found, "network", network["Id"], network["Name"], network["Labels"])
    for volume in api.get("/volumes")["Volumes"] or ():
        _note(found, "volume", volume["Name"], volume["Name"], volume["Labels"])
    return found


def _note(
    found: dict[str, str], kind: str, identity: str, name: str, labels: Mapping[str, str] | None
) -> None:
    ours = {key: value for key, value in (labels or {}).items() if key.startswith(LABEL_PREFIX)}
    if ours and not _belongs_to_another_session(ours.get(RUNNER_LABEL, "")):
        words = " ".join(f"{key}={value}" for key, value in sorted(ours.items()))
        found[f"{kind}:{identity}"] = f"{kind} {name} ({words})"


def session_runner_id(number: int) -> str:
    """A runner id that tells which test session an object belongs to."""
    return f"test-{os.getpid()}-{number}"


def _belongs_to_another_session(runner_id: str) -> bool:
    kind, _, rest = runner_id.partition("-")
    process_id = rest.partition("-")[0]
    if kind != "test" or not process_id.isdigit() or int(process_id) == os.getpid():
        return False
    return Path(f"/proc/{process_id}").exists()


def leftovers(api: EngineApi, known: Mapping[str, str]) -> list[str]:
    """What has appeared since ``known`` and does not vanish: removal may still be under way."""
    give_up = time.monotonic() + VANISH_TIMEOUT_S
    while left := {key: text for key, text in labelled(api).items() if key not in known}:
        if time.monotonic() > give_up:
            break
        time.sleep(0.05)
    return sorted(left.values())
