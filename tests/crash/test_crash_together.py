"""SIGKILL of the hub, of hub and bridge at once, and of a bridge whose disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from crash_checks import verify_recovered
from crash_parts import (
    DONE,
    UNTIL_ENDED,
    CrashRig,
    Evidence,
    HubRig,
    files,
    kill_agent,
)

from engines import Engine
from needs import tmpfs
from rig import wait_for

pytestmark = pytest.mark.engine("r26")

ONLINE = '"event": "online"'
STATE_BYTES = 8 << 20
AFTER_A_WHILE = ("sh", "-c", "echo begun; sleep 2")
"""It changes nothing: a change could not be published without the hub's credential."""


@pytest.fixture
def hub(engine: Engine, tmp_path: Path, runner_id: str) -> Iterator[HubRig]:
    directory = tmp_path / "hub"
    directory.mkdir()
    with closing(HubRig(directory, engine, runner_id)) as hub:
        hub.start_hub()
        yield hub


@pytest.fixture
def rig(hub: HubRig, tmp_path: Path, runner_id: str) -> Iterator[CrashRig]:
    with closing(CrashRig(tmp_path, hub.engine, f"{runner_id}-1", hub)) as rig:
        rig.come_online()
        yield rig


@pytest.mark.requirement("B-08")
def test_an_attempt_outlives_the_hub_and_is_told_to_the_next(hub: HubRig, rig: CrashRig) -> None:
    session_id = rig.dispatch(*AFTER_A_WHILE)
    rig.wait_event(session_id, "agent.started")
    hub.hub.kill()
    wait_for("the end of the attempt", lambda: not files(rig, "attempts"))
    assert rig.resources() == []
    assert files(rig, "outbox")
    hub.restart_hub()
    verify_recovered(rig, session_id, Evidence({1: DONE}, changes=False))


@pytest.mark.requirement("B-08", "B-82", "B-83")
def test_bridge_and_hub_die_together_while_an_agent_runs(hub: HubRig, rig: CrashRig) -> None:
    session_id = rig.dispatch(*UNTIL_ENDED)
    rig.agent_runs(session_id)
    evidence = rig.evidence(session_id)
    hub.hub.kill()
    rig.bridge.kill()
    assert evidence.started == {1}
    assert evidence.created == set(rig.resources())
    hub.restart_hub()
    rig.come_online()
    verify_recovered(rig, session_id, evidence)


@pytest.mark.requirement("B-08", "B-83")
def test_bridge_and_hub_die_with_a_result_that_only_the_disk_knows(
    hub: HubRig, rig: CrashRig
) -> None:
    session_id = rig.dispatch(*UNTIL_ENDED)
    rig.agent_runs(session_id)
    hub.hub.kill()
    kill_agent(rig)
    wait_for("the end of the attempt", lambda: not files(rig, "attempts"))
    rig.bridge.kill()
    hub.restart_hub()
    evidence = rig.evidence(session_id)
    assert evidence.outcomes == {1: ("failed", "supervisor_lost")}
    rig.come_online()
    verify_recovered(rig, session_id, evidence)


def fill(path: Path) -> None:
    """Leave no block to anybody else."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    assert shutil.disk_usage(path.parent).free == 0


@pytest.mark.requirement("B-82")
def test_a_bridge_killed_on_a_full_disk_recovers_once_there_is_room(
    hub: HubRig, tmp_path: Path, runner_id: str
) -> None:
    with (
        tmpfs(tmp_path / "state", f"size={STATE_BYTES},mode=0700"),
        closing(CrashRig(tmp_path, hub.engine, f"{runner_id}-1", hub)) as rig,
    ):
        rig.come_online()
        session_id = rig.dispatch(*UNTIL_ENDED)
        rig.agent_runs(session_id)
        filler = rig.state_root / "filler"
        fill(filler)
        rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
        wait_for("the disk to be felt", lambda: os.strerror(errno.ENOSPC) in rig.bridge_log())
        rig.bridge.kill()
        evidence = rig.evidence(session_id)

        # A start on the full disk may fail, as long as it loses nothing.
        starts = rig.bridge_log().count(ONLINE)
        rig.launch()
        over = lambda: rig.has_ended() or rig.bridge_log().count(ONLINE) > starts  # noqa: E731
        wait_for("a start on the full disk", over)
        rig.bridge.kill()

        filler.unlink()
        rig.come_online()
        verify_recovered(rig, session_id, evidence)
