"""The engine dies or freezes while it builds an image: nothing is lost, left or held up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from project_parts import commit, dispatch

import processes
from own_daemon import OwnDaemon
from rig import Rig, running_rig, wait_for

PATIENT = {"leaseTtlMs": 60_000}

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def rig(tmp_path: Path, daemon: OwnDaemon, runner_id: str) -> Iterator[Rig]:
    several = {
        "FORGE_MAX_CONCURRENT_SANDBOXES": "2",
        "FORGE_MAX_CONCURRENT_SANDBOX_BUILDS": "2",
    }
    with running_rig(tmp_path, daemon.engine(), runner_id, **several) as rig:
        yield rig


def of_attempts(rig: Rig) -> list[str]:
    """What the engine holds for attempts; the bridge's own goes with the bridge."""
    return [name for name in rig.resources() if not name.startswith("forge-tooling")]


def require_builds(rig: Rig) -> None:
    session_id = dispatch(rig, commit(rig, "RUN true"), **PATIENT)
    assert rig.wait_over(session_id)["outcome"] == "succeeded"


@pytest.mark.requirement("B-05", "B-27", "B-86")
def test_an_engine_that_dies_ends_all_that_wait_for_its_build(rig: Rig, daemon: OwnDaemon) -> None:
    marker = f"601.{os.getpid()}"
    approved = commit(rig, f"RUN sleep {marker}")
    sessions = [dispatch(rig, approved, **PATIENT) for _ in range(2)]
    for session_id in sessions:
        rig.wait_event(session_id, "offer.reserved")
    wait_for("the step to run", lambda: processes.with_argument(marker))
    daemon.signal(signal.SIGKILL)
    wait_for("the bridge to notice", lambda: rig.status().engine_away)
    daemon.start()
    wait_for("the bridge to look again", lambda: rig.status().engine_away is None)
    for session_id in sessions:
        result = rig.wait_over(session_id, deadline_s=120)
        assert result["failureCode"] == "engine_lost", result
    assert not of_attempts(rig)
    require_builds(rig)
    # An engine that is killed leaves a step of its own builder to its host, which is this one.
    for process_id in processes.with_argument(marker):
        os.kill(process_id, signal.SIGKILL)


@pytest.mark.requirement("B-05", "B-72")
def test_a_build_in_a_frozen_engine_can_be_cancelled(rig: Rig, daemon: OwnDaemon) -> None:
    marker = f"602.{os.getpid()}"
    session_id = dispatch(rig, commit(rig, f"RUN sleep {marker}"), **PATIENT)
    wait_for("the step to run", lambda: processes.with_argument(marker))
    daemon.signal(signal.SIGSTOP)
    try:
        rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
        wait_for("the client to end", lambda: not processes.children(rig.bridge.pid))
    finally:
        daemon.signal(signal.SIGCONT)
    assert rig.wait_over(session_id, deadline_s=120)["outcome"] == "cancelled"
    wait_for("the step to end", lambda: not processes.with_argument(marker))
    assert not of_attempts(rig)
    require_builds(rig)
