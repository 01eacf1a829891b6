"""Drain: either side stops new work, both must end it, nothing that runs is hurt (B-87)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from bridge_parts import Bridge, memory_bridge, wait_for
from typer.testing import CliRunner

from forge_bridge.cli import app
from forge_bridge.state_root import drain as state
from forge_bridge.status import BridgeStatus, Side, boot_ms, process_identity, write_status
from forge_core.connection import ConnectionPhase
from forge_core.errors import ForgeError
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.codes import ReservationState, RunnerState
from forge_core.wire.shapes import HeartbeatAttempt

SINCE = "2026-11-29T14:00:00.000Z"

pytestmark = pytest.mark.requirement("B-87")


async def decided(bridge: Bridge) -> str | None:
    """Why an offer that fits is refused; None: it was taken."""
    offer = bridge.offer()
    bridge.hub.send("Offer", offer)
    code: str | None = (await bridge.hub.decision(offer)).get("reasonCode")
    return code


async def told(bridge: Bridge, state: str) -> None:
    """Wait until the newest heartbeat says so."""
    await bridge.hub.until(lambda: bridge.hub.of("Heartbeat")[-1]["state"] == state)


async def test_the_host_drains_a_running_bridge_and_what_runs_goes_on(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        attempt_id = await bridge.run("wait")
        await bridge.hub.event(attempt_id, "agent.started")
        assert state.drain(bridge.state_root, SINCE)
        await told(bridge, "draining")
        assert await decided(bridge) == "draining"
        assert bridge.runner.drained_by == (Side.HOST,)
        cancel = {"attemptId": attempt_id, "fence": 1, "reason": "enough"}
        assert not bridge.hub.of("SubmitDispatchResult", attemptId=attempt_id)
        bridge.hub.send("Cancel", cancel)
        await bridge.hub.over(attempt_id)
        assert state.undrain(bridge.state_root)
        await told(bridge, "online")
        assert await decided(bridge) is None


async def test_either_side_drains_and_both_must_end_it(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        bridge.drain(True)
        await told(bridge, "draining")
        state.drain(bridge.state_root, SINCE)
        await wait_for(lambda: bridge.runner.drained_by == (Side.HOST, Side.HUB))
        bridge.drain(False)
        await wait_for(lambda: bridge.runner.drained_by == (Side.HOST,))
        assert await decided(bridge) == "draining"
        state.undrain(bridge.state_root)
        await told(bridge, "online")
        assert await decided(bridge) is None


async def test_a_drain_survives_a_reconnect_and_a_restart_and_needs_no_hub(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path) as bridge:
        state.drain(bridge.state_root, SINCE)
        await told(bridge, "draining")
        bridge.hub.drop()
        await bridge.hub.online(count=2)
        assert await decided(bridge) == "draining"
    async with memory_bridge(tmp_path) as bridge:
        assert bridge.hub.of("Heartbeat")[0]["state"] == "draining"
        assert await decided(bridge) == "draining"
    async with memory_bridge(tmp_path, online=False) as bridge:
        assert bridge.runner.drained_by == (Side.HOST,)


def test_that_the_file_is_there_is_enough(tmp_path: Path) -> None:
    assert not state.is_drained(tmp_path)
    assert not state.undrain(tmp_path)
    assert state.drain(tmp_path, SINCE)
    assert not state.drain(tmp_path, SINCE)
    (tmp_path / state.DRAIN_FILE).write_bytes(b"\0\0damaged")
    assert state.is_drained(tmp_path)
    assert state.undrain(tmp_path)
    assert not state.is_drained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_state_root_that_cannot_be_read_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ForgeError, match="cannot look for "):
        state.is_drained(tmp_path / "file")


def status_of(**changes: object) -> BridgeStatus:
    """What a bridge, which this process plays, has told."""
    values: dict[str, object] = {
        "version": "0.1.0",
        "pid": os.getpid(),
        "process": process_identity(os.getpid()),
        "runner_id": "runner-1",
        "runner_instance_id": "instance-1",
        "state": RunnerState.DRAINING,
        "drained_by": (Side.HOST,),
        "connection": ConnectionPhase.ONLINE,
        "connection_since": SINCE,
        "started_at": SINCE,
        "reserved_count": 0,
        "starting_count": 0,
        "active_count": 0,
        "degraded_reservation_count": 0,
        "used_resources": ResourceVector(),
        "resource_capacity": ResourceCapacity(slots=1),
        "pending_reports": 0,
        "written_at": SINCE,
        "written_boot_ms": boot_ms(),
    }
    return BridgeStatus.model_validate(values | changes)


def command(root: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments, env={"FORGE_SANDBOX_STATE_ROOT": str(root)})
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "still",
    [
        {"active_count": 1},
        {"starting_count": 1},
        {"reserved_count": 1},
        {"drained_by": (Side.HUB,)},
        {
            "attempts": (
                HeartbeatAttempt(attempt_id="a", fence=1, state=ReservationState.RELEASING),
            )
        },
    ],
)
def test_what_is_still_waited_for(still: dict[str, object]) -> None:
    assert status_of(degraded_reservation_count=1).is_drained
    assert not status_of(**still).is_drained


def test_waiting_ends_once_nothing_runs_or_in_time(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    write_status(tmp_path, status_of(active_count=1))
    code, text = command(tmp_path, "drain", "--wait", "--timeout", "1")
    assert code == 1
    assert "error: after 1 s there are still 0 reserved, 0 starting, 1 active" in text
    assert state.is_drained(tmp_path)
    later = threading.Timer(0.3, write_status, (tmp_path, status_of(degraded_reservation_count=2)))
    later.start()
    try:
        code, text = command(tmp_path, "drain", "--wait")
    finally:
        later.join()
    assert code == 0
    assert "drained: nothing runs, 2 degraded, 0 cleanup reports unacknowledged" in text


def test_without_a_bridge_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert command(tmp_path, "drain", "--wait") == (
        0,
        "draining\nno bridge runs; the next start finds this host drained\n",
    )
    assert command(tmp_path, "drain") == (0, "draining already\n")
    assert command(tmp_path, "undrain") == (0, "taking work again\n")
    assert command(tmp_path, "undrain") == (0, "was not drained by this host\n")
