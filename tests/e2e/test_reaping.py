"""Nothing is left: a bridge that is killed, a command that cleans up, an engine with neighbours."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import Engine
from forge_core.labels import Owner
from rig import Rig, running_rig, wait_for

# Rootless, as production has it; what engines differ in is in tests/contracts.
pytestmark = pytest.mark.engine("r26")


def reap(rig: Rig, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``forge-bridge sandbox reap`` with the settings of the bridge."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FORGE_", "DOCKER_"))}
    return subprocess.run(
        [sys.executable, "-m", "forge_bridge", "sandbox", "reap", *arguments],
        env=kept
        | {
            "DOCKER_HOST": rig.engine.base_url,
            "FORGE_RUNNER_ID": rig.runner_id,
            "FORGE_SANDBOX_STATE_ROOT": str(rig.state_root),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def down(engine: Engine, tmp_path: Path, runner_id: str) -> Iterator[Rig]:
    """A runner whose bridge and hub are not there."""
    rig = Rig(tmp_path, engine, runner_id)
    yield rig
    rig.close()


def start(rig: Rig) -> str:
    """A session whose agent runs until something ends it."""
    session_id = rig.dispatch("sleep", "600")
    rig.wait_event(session_id, "agent.started")
    return session_id


def files(rig: Rig, *folders: str) -> dict[str, bytes]:
    """What lies in these folders of the state root."""
    found = (path for folder in folders for path in (rig.state_root / folder).iterdir())
    return {str(path): path.read_bytes() for path in found if path.is_file()}


def results(rig: Rig, session_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result at the hub, and its cleanup reports, once the bridge owes it nothing more."""
    result = rig.wait_over(session_id)
    wait_for("the outbox to be empty", lambda: not files(rig, "outbox", "cleanup-reports"))
    return result, rig.diagnostics(session_id)["cleanupReports"]


@pytest.mark.requirement("B-42", "B-83")
def test_the_command_cleans_up_after_a_bridge_that_was_killed(rig: Rig) -> None:
    session_id = start(rig)
    rig.bridge.kill()
    kept, left = files(rig, "attempts", "outbox", "cleanup-reports"), rig.resources()
    assert left

    planned = reap(rig, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert {r["name"] for r in plan["resources"] if r["listed"]} == set(left)
    assert len(plan["dispatches"]) == 1
    assert rig.resources() == left
    assert files(rig, "attempts", "outbox", "cleanup-reports") == kept

    with foreign(rig) as kept_name:
        done = reap(rig, "--json")
        assert rig.resources() == [kept_name]
    assert done.returncode == 0, done.stderr
    assert f'"name": "{kept_name}"' in done.stderr
    told = json.loads(done.stdout)
    assert (told["failed"], told["unlisted"]) == (0, None)
    assert {r["name"] for r in told["resources"] if r["outcome"] == "removed"} == set(left)
    assert files(rig, "attempts") == {}
    (report,) = (rig.state_root / "cleanup-reports").glob("*.json")
    assert report.stat().st_mode & 0o777 == 0o600

    again = reap(rig)
    assert (again.returncode, again.stdout) == (0, "0 removed, 0 absent, 0 failed\n"), again.stderr
    assert reap(rig, "--quiet").stdout == ""

    rig.start_bridge()
    result, reports = results(rig, session_id)
    assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
    (sent,) = reports
    assert sent["trigger"] == "cli"
    assert {r["name"] for r in sent["resources"] if r["outcome"] == "removed"} == set(left)
    assert rig.wait_over(rig.dispatch("true"))["outcome"] == "succeeded"


@pytest.mark.requirement("B-42")
def test_beside_a_bridge_that_runs_the_command_touches_nothing(rig: Rig) -> None:
    session_id = start(rig)
    before = rig.resources()
    for arguments in ((), ("--dry-run",)):
        refused = reap(rig, *arguments)
        assert refused.returncode == 75
        assert f"process {rig.bridge.pid} holds it" in refused.stderr
    assert rig.resources() == before
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    assert rig.wait_over(session_id)["outcome"] == "cancelled"


@pytest.mark.requirement("B-80", "B-82", "B-83")
def test_a_bridge_that_was_killed_cleans_up_before_it_offers_anything(rig: Rig) -> None:
    session_id = start(rig)
    rig.bridge.kill()
    left = rig.resources()
    rig.start_bridge()  # returns once it is online
    assert rig.resources() == []
    result, (report,) = results(rig, session_id)
    assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
    assert report["trigger"] == "startup"
    assert {r["name"] for r in report["resources"] if r["outcome"] == "removed"} == set(left)
    found = rig.status()
    assert (found.used_resources.slots, found.degraded_reservation_count) == (0, 0)


@pytest.mark.requirement("B-86", "B-88")
def test_what_another_user_of_the_engine_holds_fast_keeps_its_capacity(rig: Rig) -> None:
    session_id = start(rig)
    (volume,) = (name for name in rig.resources() if name.startswith("forge-workspace-"))
    holder = create(rig, f"holder-{rig.runner_id}", {}, volume)
    try:
        rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
        wait_for("the reservation to be degraded", lambda: degraded(rig) == 1)
        assert rig.resources() == [volume]
        rig.bridge.kill()
        failed = reap(rig)
        assert failed.returncode == 1, failed.stdout
        row = next(line for line in failed.stdout.splitlines() if volume in line)
        assert row.split()[:3] == ["failed", "volume", volume]
        rig.start_bridge()
        assert degraded(rig) == 1
    finally:
        remove(rig, holder)
    asked = rig.post(f"/runners/{rig.runner_id}/reap")
    wait_for("the capacity to be whole", lambda: degraded(rig) == 0)
    assert rig.resources() == []
    assert results(rig, session_id)[0]["outcome"] == "cancelled"
    (told,) = wait_for("the outcome", lambda: [r for r in reaps_of(rig) if r["outcome"]])
    assert told["requestId"] == asked["requestId"]
    assert (told["outcome"]["removed"], told["outcome"]["failed"]) == (1, 0)


@pytest.mark.requirement("B-80")
def test_neighbours_on_the_engine_are_left_alone(rig: Rig, runner_id: str, tmp_path: Path) -> None:
    """Another runner's work, and a container that carries our labels under a name of its own."""
    old = old_owner(rig)
    with running_rig(tmp_path, rig.engine, runner_id) as neighbour:
        theirs = start(neighbour)
        before = neighbour.resources()
        orphan = create(rig, old.name("agent"), old.labels("agent"))
        with foreign(rig) as kept:
            rig.post(f"/runners/{rig.runner_id}/reap")
            wait_for("the orphan to go", lambda: rig.resources() == [kept])
            assert "carries our labels under a foreign name" in rig.bridge.log.read_text()
        assert rig.engine.api.call("GET", f"/containers/{orphan}/json")[0] == 404
        assert neighbour.resources() == before
        neighbour.post(f"/sessions/{theirs}/cancel", {"reason": "enough"})
        assert neighbour.wait_over(theirs)["outcome"] == "cancelled"


@contextmanager
def foreign(rig: Rig) -> Iterator[str]:
    """A container that carries this runner's labels under a name that they do not give."""
    name = f"foreign-{rig.runner_id}"
    container = create(rig, name, old_owner(rig).labels("agent"))
    try:
        yield name
    finally:
        remove(rig, container)


def old_owner(rig: Rig) -> Owner:
    """A dispatch of an earlier instance of this runner."""
    return Owner(rig.runner_id, "an-earlier-instance", "attempt-0", 1, "project", "domain")


@pytest.mark.requirement("B-80", "B-42")
def test_a_network_goes_although_somebody_hangs_on_it(down: Rig) -> None:
    """Containers go first; an endpoint that is not ours is taken off our network by force."""
    rig, owner = down, old_owner(down)
    name, api = owner.name("agent-network"), rig.engine.api
    ask(
        rig,
        "POST",
        "/networks/create",
        {
            "Name": name,
            "Driver": "bridge",
            "Labels": owner.labels("agent-network"),
            "Internal": True,
            "IPAM": {"Config": [{"Subnet": "10.213.15.248/29"}]},
        },
    )
    guest = create(rig, f"guest-{rig.runner_id}", {}, network=name)
    try:
        ask(rig, "POST", f"/containers/{guest}/start")
        done = reap(rig, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        assert [r["outcome"] for r in json.loads(done.stdout)["resources"]] == ["removed"]
        assert rig.resources() == []
        state = api.get(f"/containers/{guest}/json")
        assert state["State"]["Running"]
        assert state["NetworkSettings"]["Networks"] == {}
    finally:
        remove(rig, guest)


class SlowDoor(socketserver.ThreadingUnixStreamServer):
    """Passes every request on to an engine, a while after it came."""

    delay_s = 0.2
    daemon_threads = True

    def __init__(self, path: Path, engine: Path) -> None:
        super().__init__(str(path), _SlowConnection)
        self.engine = engine

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _SlowConnection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, SlowDoor)
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(str(self.server.engine))
            answers = threading.Thread(target=_copy, args=(engine, self.request, 0), daemon=True)
            answers.start()
            _copy(self.request, engine, self.server.delay_s)
            answers.join()


def _copy(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    while piece := source.recv(65_536):
        threading.Event().wait(delay_s)
        target.sendall(piece)
    target.shutdown(socket.SHUT_WR)


@pytest.mark.requirement("B-42")
def test_an_engine_that_is_slow_is_waited_for(down: Rig, tmp_path: Path) -> None:
    owner, door = old_owner(down), SlowDoor(tmp_path / "slow.sock", down.engine.socket_path)
    create(down, owner.name("agent"), owner.labels("agent"))
    with door.serving():
        done = reap(down, DOCKER_HOST=f"unix://{door.server_address}")
    assert (done.returncode, down.resources()) == (0, []), done.stdout + done.stderr


def ask(rig: Rig, method: str, path: str, body: object = None) -> bytes:
    """The engine, asked by somebody else."""
    status, answer = rig.engine.api.call(method, path, body=json.dumps(body))
    assert status < 300, answer
    return answer


def create(
    rig: Rig, name: str, labels: dict[str, str], volume: str = "", network: str = "none"
) -> str:
    """A container that another user of the engine could have made; its id."""
    body = {
        "Image": rig.engine.busybox_image,
        "Cmd": ["sleep", "600"],
        "Labels": labels,
        "HostConfig": {
            "Binds": [f"{volume}:/held"] if volume else [],
            "NetworkMode": network,
        },
    }
    return str(json.loads(ask(rig, "POST", f"/containers/create?name={name}", body))["Id"])


def remove(rig: Rig, container: str) -> None:
    """Remove a container that may be gone already."""
    rig.engine.api.call("DELETE", f"/containers/{container}?force=1")


def degraded(rig: Rig) -> int:
    return rig.status().degraded_reservation_count


def reaps_of(rig: Rig) -> list[dict[str, Any]]:
    return list(rig.get(f"/runners/{rig.runner_id}/reaps"))
