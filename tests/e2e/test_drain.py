"""Drain as operators do it: from the host and from the hub, with something running (B-87)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rig import Rig, wait_for

pytestmark = [pytest.mark.engine("r26"), pytest.mark.requirement("B-87")]

STATE = "FORGE_SANDBOX_STATE_ROOT"


def command(rig: Rig, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "forge_bridge", *arguments]


def environment(rig: Rig) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FORGE_", "DOCKER_"))}
    return kept | {STATE: str(rig.state_root)}


def bridge(rig: Rig, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(rig, *arguments),
        env=environment(rig),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def status(rig: Rig) -> dict[str, Any]:
    return dict(json.loads(bridge(rig, "status", "--json").stdout)["status"])


def at_hub(rig: Rig) -> dict[str, Any]:
    return dict(rig.get(f"/runners/{rig.runner_id}"))


@pytest.fixture(scope="module")
def service_manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """What listens where ``NOTIFY_SOCKET`` says (sd_notify(3))."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path_factory.mktemp("manager") / "notify"))
        listener.settimeout(30)
        yield listener


def test_a_drain_of_the_host_waits_for_what_runs_and_survives_a_restart(
    rig: Rig, service_manager: socket.socket
) -> None:
    running = rig.dispatch("sh", "-c", "sleep 4")
    rig.wait_event(running, "agent.started")
    with subprocess.Popen(
        command(rig, "drain", "--wait"), env=environment(rig), stdout=subprocess.PIPE, text=True
    ) as draining:
        wait_for("the hub to know", lambda: at_hub(rig)["state"] == "draining")
        later = rig.dispatch("true")
        assert draining.poll() is None, "it returned although an attempt runs"
        assert draining.wait(60) == 0
        assert draining.stdout is not None
        assert "drained: nothing runs" in draining.stdout.read()
    assert rig.get(f"/sessions/{running}")["result"]["outcome"] == "succeeded"
    assert not rig.resources()
    rig.bridge.stop()
    rig.start_bridge(NOTIFY_SOCKET=service_manager.getsockname(), WATCHDOG_USEC="60000000")
    found = status(rig)
    assert (found["state"], found["drainedBy"]) == ("draining", ["host"])
    assert "this host (forge-bridge undrain ends it)" in bridge(rig, "status").stdout
    assert rig.get(f"/sessions/{later}")["result"] is None
    assert bridge(rig, "undrain").returncode == 0
    assert rig.wait_over(later)["outcome"] == "succeeded"


def test_a_drain_of_the_hub_is_another_one(rig: Rig) -> None:
    rig.post(f"/runners/{rig.runner_id}/drain")
    wait_for("the bridge to know", lambda: status(rig)["drainedBy"] == ["hub"])
    bridge(rig, "drain")
    wait_for("both to drain", lambda: status(rig)["drainedBy"] == ["host", "hub"])
    rig.post(f"/runners/{rig.runner_id}/resume")
    wait_for("the host alone to drain", lambda: status(rig)["drainedBy"] == ["host"])
    assert status(rig)["state"] == "draining"
    bridge(rig, "undrain")
    assert rig.wait_over(rig.dispatch("true"))["outcome"] == "succeeded"


@pytest.mark.requirement("B-43")
def test_the_service_manager_is_told_of_every_turn(
    rig: Rig, service_manager: socket.socket
) -> None:
    heard = [service_manager.recv(4096) for _ in range(2)]
    assert heard == [b"READY=1", b"WATCHDOG=1"]
    rig.bridge.stop()
    while (last := service_manager.recv(4096)) == b"WATCHDOG=1":
        continue
    state, _, extended = last.partition(b"\nEXTEND_TIMEOUT_USEC=")
    assert state == b"STOPPING=1"
    assert int(extended) > 61_000_000, "less than the stop deadline"
    rig.start_bridge()


def test_without_a_hub_the_host_drains_all_the_same(rig: Rig) -> None:
    rig.hub.kill()
    done = bridge(rig, "drain", "--wait", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    assert "drained: nothing runs" in done.stdout
    assert bridge(rig, "undrain").returncode == 0
