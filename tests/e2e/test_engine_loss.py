"""The engine dies or freezes under a running attempt, and comes back: nothing is lost or left."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from own_daemon import OwnDaemon
from rig import Rig, running_rig, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def rig(tmp_path: Path, daemon: OwnDaemon, runner_id: str) -> Iterator[Rig]:
    with running_rig(tmp_path, daemon.engine(), runner_id) as rig:
        yield rig


@pytest.mark.requirement("B-05", "B-86")
def test_a_killed_engine_ends_the_attempt_and_takes_work_again(rig: Rig, daemon: OwnDaemon) -> None:
    session_id = rig.dispatch("sleep", "600", leaseTtlMs=60_000, limits={"idleMs": 60_000})
    rig.wait_event(session_id, "agent.started")
    daemon.signal(signal.SIGKILL)
    wait_for("the bridge to notice", lambda: rig.status().engine_away)
    daemon.start()
    wait_for("the bridge to look again", lambda: rig.status().engine_away is None)
    result = rig.wait_over(session_id, deadline_s=120)
    assert result["failureCode"] in {"engine_lost", "supervisor_lost"}, result
    wait_for("the capacity to be whole", lambda: rig.status().degraded_reservation_count == 0, 90)
    assert not rig.resources()
    assert rig.wait_over(rig.dispatch("true"))["outcome"] == "succeeded"


@pytest.mark.requirement("B-05")
def test_a_frozen_engine_admits_nothing_and_thaws(rig: Rig, daemon: OwnDaemon) -> None:
    daemon.signal(signal.SIGSTOP)
    try:
        wait_for("the bridge to notice", lambda: rig.status().engine_away)
        session_id = rig.dispatch("true")
        refused = wait_for(
            "the refusal",
            lambda: [
                d
                for a in rig.get(f"/sessions/{session_id}")["attempts"]
                for d in a["dispatches"]
                if d["declineCode"] == "runtime_unavailable"
            ],
        )
        assert "did not answer" in refused[0]["declineDetail"]
    finally:
        daemon.signal(signal.SIGCONT)
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
