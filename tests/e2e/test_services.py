"""Agents with PostgreSQL and Redis beside them, on real engines and with the real servers."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from canary_parts import children_of, engine_says, files_with, holds, processes_with

from engines import Engine, extra_image
from rig import Rig, running_rig, wait_for

INSIDE = Path(__file__).parent / "inside"
CLIENTS = (INSIDE / "service_clients.py").read_text()
BOTH = [{"name": "postgres", "version": "15"}, {"name": "redis"}]
ROOM = {"slots": 1, "memoryBytes": 768 << 20, "cpuMillis": 2000, "pids": 256}

pytestmark = [pytest.mark.engine("d26", "r26"), pytest.mark.requirement("B-55")]


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("rig")
    with running_rig(directory, engine, module_runner_id, **settings(engine)) as rig:
        yield rig


def settings(engine: Engine) -> dict[str, str]:
    names = ("postgres", "redis")
    images = {f"FORGE_SERVICE_{n.upper()}_IMAGE": extra_image(engine, n) for n in names}
    return {**images, "FORGE_MAX_CONCURRENT_SANDBOXES": "2"}


def dispatch(rig: Rig, *argv: str, services: list[dict[str, str]] = BOTH, **more: Any) -> str:
    return rig.dispatch(*argv, services=services, resources=ROOM, **more)


def printed(rig: Rig, session_id: str) -> str:
    return str(rig.diagnostics(session_id)["logTail"])


@pytest.mark.requirement("B-38")
def test_an_agent_uses_its_services_with_the_passwords_from_its_environment(rig: Rig) -> None:
    session_id = dispatch(rig, "python3", "-c", CLIENTS)
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded", (result, printed(rig, session_id))
    seen = json.loads(printed(rig, session_id))
    assert seen["rows"] == [["1000", "500500"]]
    assert seen["umlaut"] == [["Ä", "forge", "forge"]]
    assert seen["postgres"].startswith("15.")
    assert seen["wrong"].startswith("28P01")
    assert seen["none"].startswith("28P01")
    assert seen["redis"] == ["+OK", "+OK", "$1", "v"]
    assert seen["stranger"].startswith("-NOAUTH")
    assert seen["guess"].startswith("-WRONGPASS")
    found = rig.diagnostics(session_id)
    (report,) = found["cleanupReports"]
    removed = {(r["kind"], r["role"]) for r in report["resources"] if r["outcome"] == "removed"}
    assert removed >= {
        ("container", "service-postgres"),
        ("container", "service-redis"),
        ("network", "agent-network"),
    }
    assert {"network", "services"} <= set(result["timings"])
    assert {name.rpartition("-")[0] for name in rig.resources()} <= {"forge-tooling"}


# -- passwords --------------------------------------------------------------------------------

PRINT_AND_WAIT = """
import os, sys, time
for name in ("PGPASSWORD", "DATABASE_URL", "REDIS_PASSWORD", "REDIS_URL"):
    print(name, os.environ[name], flush=True)
print("told", flush=True)
time.sleep(60)
"""


def containers(rig: Rig, session_id: str) -> dict[str, dict[str, Any]]:
    """What the engine says of this session's containers, by role."""
    (attempt,) = rig.get(f"/sessions/{session_id}")["attempts"]
    label = f"dev.forge.attempt-id={attempt['attemptId']}"
    listed = rig.engine.api.get(
        "/containers/json", {"all": "1", "filters": json.dumps({"label": [label]})}
    )
    return {
        one["Labels"]["dev.forge.role"]: rig.engine.api.get(f"/containers/{one['Id']}/json")
        for one in listed
    }


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries if entry)


def agent_of(found: dict[str, dict[str, Any]]) -> int:
    """The agent's own process."""
    supervisor = found["agent"]["State"]["Pid"]
    (agent,) = children_of(supervisor) - {supervisor}
    return agent


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-60")
def test_the_passwords_are_with_the_agent_and_its_services_and_nowhere_else(rig: Rig) -> None:
    session_id = dispatch(rig, "python3", "-c", PRINT_AND_WAIT)
    wait_for("its output", lambda: "told" in printed(rig, session_id))
    found = containers(rig, session_id)
    agent = agent_of(found)
    environment = environment_of(agent)
    passwords = environment["PGPASSWORD"], environment["REDIS_PASSWORD"]
    assert len({*passwords}) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", password) for password in passwords)
    for password, role in zip(passwords, ("service-postgres", "service-redis"), strict=True):
        (beside,) = children_of(found[role]["State"]["Pid"]) & set(processes_with(password))
        assert processes_with(password) == {agent: ["environ"], beside: ["environ"]}
    said = engine_says(rig.engine, rig.runner_id)
    assert found["service-postgres"]["Id"].encode() in said
    assert not holds(said, passwords)
    assert "told" in printed(rig, session_id)
    rig.post(f"/sessions/{session_id}/cancel")
    assert rig.wait_over(session_id)["outcome"] == "cancelled"
    told = json.dumps([rig.get(f"/sessions/{session_id}"), rig.diagnostics(session_id)])
    assert "PGPASSWORD ***" in told
    assert "postgresql://forge:***@postgres:5432/forge" in told
    assert not holds(told.encode(), passwords)
    assert files_with(rig.directory, *passwords) == []


# -- walls ------------------------------------------------------------------------------------

REACH = """
import json, socket, sys
reached = []
for host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), 2).close()
        reached.append(host)
    except OSError:
        pass
print(json.dumps(reached))
"""


def addresses(found: dict[str, dict[str, Any]]) -> list[tuple[str, int]]:
    ports = {"service-postgres": 5432, "service-redis": 6379}
    networks = {role: found[role]["NetworkSettings"]["Networks"].values() for role in ports}
    return [(next(iter(networks[role]))["IPAddress"], port) for role, port in ports.items()]


def test_no_attempt_reaches_the_services_of_another(rig: Rig) -> None:
    one = dispatch(rig, "python3", "-c", PRINT_AND_WAIT)
    wait_for("its output", lambda: "told" in printed(rig, one))
    found = containers(rig, one)
    theirs = addresses(found)
    names = [("postgres", 5432), (found["service-postgres"]["Name"].lstrip("/"), 5432)]
    where = json.dumps([*theirs, *names, ("redis", 6379)])
    others = {
        dispatch(rig, "python3", "-c", REACH, where, services=[{"name": "redis"}]): ["redis"],
        dispatch(rig, "python3", "-c", REACH, where, services=[]): [],
    }
    for session_id, reached in others.items():
        assert rig.wait_over(session_id)["outcome"] == "succeeded"
        assert json.loads(printed(rig, session_id)) == reached
    assert all(one["State"]["Running"] for one in containers(rig, one).values())
    own = dispatch(rig, "python3", "-c", REACH, json.dumps(names[:1]))
    assert rig.wait_over(own)["outcome"] == "succeeded"
    assert json.loads(printed(rig, own)) == ["postgres"]
    rig.post(f"/sessions/{one}/cancel")
    assert rig.wait_over(one)["outcome"] == "cancelled"


@pytest.mark.requirement("B-35")
def test_a_service_has_the_hardening_of_an_agent(rig: Rig) -> None:
    session_id = dispatch(rig, "python3", "-c", PRINT_AND_WAIT)
    wait_for("its output", lambda: "told" in printed(rig, session_id))
    found = containers(rig, session_id)
    agent = found["agent"]["HostConfig"]
    same = ("CapDrop", "SecurityOpt", "ReadonlyRootfs", "Privileged", "IpcMode", "NetworkMode")
    total = 0
    for role in ("service-postgres", "service-redis"):
        host = found[role]["HostConfig"]
        assert {key: host[key] for key in same} == {key: agent[key] for key in same}
        assert host["LogConfig"]["Type"] == "none"
        assert not found[role]["Config"]["User"].startswith("0")
        assert [mount["Type"] for mount in found[role]["Mounts"] if mount["RW"]] == []
        total += host["Memory"]
    assert total + agent["Memory"] == ROOM["memoryBytes"]
    rig.post(f"/sessions/{session_id}/cancel")
    rig.wait_over(session_id)


# -- ends -------------------------------------------------------------------------------------


def test_a_service_that_dies_ends_the_attempt_with_its_last_words(rig: Rig) -> None:
    session_id = dispatch(rig, "python3", "-c", PRINT_AND_WAIT)
    wait_for("its output", lambda: "told" in printed(rig, session_id))
    server = containers(rig, session_id)["service-postgres"]["State"]["Pid"]
    (postmaster,) = (
        pid
        for pid in children_of(server)
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"postgres\0-D")
    )
    os.kill(postmaster, signal.SIGQUIT)
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("failed", "service_not_ready")
    assert "cannot use service postgres" in result["summary"]
    assert "while it was needed" in result["summary"]
    assert "received immediate shutdown request" in result["summary"]


@pytest.mark.requirement("B-70", "B-72")
def test_no_service_outlives_the_lease_of_its_attempt(rig: Rig) -> None:
    session_id = dispatch(rig, "python3", "-c", PRINT_AND_WAIT, leaseTtlMs=3_000)
    wait_for("its output", lambda: "told" in printed(rig, session_id))
    roles = {"agent", "service-postgres", "service-redis"}
    began = containers(rig, session_id)
    assert all(began[role]["State"]["Running"] for role in roles)
    rig.bridge.signal(signal.SIGSTOP)

    def states() -> dict[str, int]:
        now = containers(rig, session_id)
        return {r: now[r]["State"]["ExitCode"] for r in roles if not now[r]["State"]["Running"]}

    wait_for("PID 1 of each to end it", lambda: states().keys() == roles, 20)
    assert set(states().values()) == {70}
    rig.bridge.signal(signal.SIGCONT)
    assert rig.wait_over(session_id)["failureCode"] == "lease_expired"


def test_services_are_renewed_for_as_long_as_they_are_needed(rig: Rig) -> None:
    """Longer than the first lease, and longer than one renewal."""
    wait_and_ask = ("sh", "-c", 'sleep 7; exec python3 -c "$0"', CLIENTS)
    session_id = dispatch(rig, *wait_and_ask, leaseTtlMs=3_000)
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    assert json.loads(printed(rig, session_id))["redis"][0] == "+OK"


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-83")
def test_a_killed_bridge_leaves_no_service_behind(rig: Rig) -> None:
    session_id = dispatch(rig, "python3", "-c", PRINT_AND_WAIT)
    wait_for("its output", lambda: "told" in printed(rig, session_id))
    password = environment_of(agent_of(containers(rig, session_id)))["PGPASSWORD"]
    rig.bridge.kill()
    assert files_with(rig.directory, password) == []
    rig.start_bridge(settings(rig.engine))
    wait_for("the remains to be removed", lambda: containers(rig, session_id) == {})
    assert rig.wait_over(session_id)["failureCode"] == "bridge_stopped"
    assert {r["role"] for r in rig.diagnostics(session_id)["cleanupReports"][0]["resources"]} >= {
        *("agent", "service-postgres", "service-redis", "agent-network", "workspace")
    }
    assert files_with(rig.directory, password) == []
