"""What ``forge-bridge status`` believes, and what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forge_bridge.cli import app
from forge_bridge.state_root.locks import take_locks
from forge_bridge.status import (
    STALE_AFTER_MS,
    STATUS_FILE,
    BridgeStatus,
    Liveness,
    boot_ms,
    liveness,
    process_identity,
    read_status,
    write_status,
)
from forge_bridge.status_show import duration
from forge_core.connection import ConnectionPhase
from forge_core.errors import RefusedError
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.codes import ReservationState, RunnerState
from forge_core.wire.shapes import DiskState, HeartbeatAttempt

pytestmark = pytest.mark.requirement("B-08", "B-86")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Some process that lives until it is told otherwise."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


def status_of(pid: int, *, age_ms: int = 0, **changes: object) -> BridgeStatus:
    """What a bridge with this pid told ``age_ms`` ago."""
    values: dict[str, object] = {
        "version": "0.1.0",
        "pid": pid,
        "process": process_identity(pid),
        "runner_id": "runner-1",
        "runner_instance_id": "instance-1",
        "state": RunnerState.ONLINE,
        "connection": ConnectionPhase.ONLINE,
        "connection_since": "2026-11-29T14:00:00.000Z",
        "started_at": "2026-11-29T13:00:00.000Z",
        "reserved_count": 0,
        "starting_count": 1,
        "active_count": 2,
        "degraded_reservation_count": 3,
        "used_resources": ResourceVector(slots=6, pids=1536, memory_bytes=6 * 2**30),
        "resource_capacity": ResourceCapacity(slots=8, builds=1, pids=4096),
        "disk": DiskState(latched=True, used_percent=93, free_bytes=5 * 2**30),
        "pending_reports": 4,
        "attempts": (
            HeartbeatAttempt(attempt_id="att-1", fence=7, state=ReservationState.DEGRADED),
        ),
        "last_error": "cannot remove network n3 of attempt att-1: it still has endpoint e9",
        "written_at": "2026-11-29T14:05:00.000Z",
        "written_boot_ms": boot_ms() - age_ms,
    }
    return BridgeStatus.model_validate(values | changes)


def shown(state_root: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["status", *arguments], env={"FORGE_SANDBOX_STATE_ROOT": str(state_root)}
    )
    return result.exit_code, result.output


def test_a_status_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    status = status_of(os.getpid())
    write_status(tmp_path, status)
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]
    assert (tmp_path / STATUS_FILE).stat().st_mode & 0o777 == 0o600


def test_only_the_process_that_wrote_it_makes_it_true(
    process: subprocess.Popen[bytes],
) -> None:
    status = status_of(process.pid)
    assert liveness(status)[0] is Liveness.RUNNING
    reused = status.model_copy(update={"process": process_identity(os.getpid())})
    assert liveness(reused)[0] is Liveness.NOT_RUNNING
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert liveness(status)[0] is Liveness.NOT_RUNNING, "a zombie runs nothing"
    process.wait()
    assert liveness(status)[0] is Liveness.NOT_RUNNING


def test_silence_makes_it_stale(process: subprocess.Popen[bytes]) -> None:
    status = status_of(process.pid)
    at = status.written_boot_ms
    assert liveness(status, at + STALE_AFTER_MS) == (Liveness.RUNNING, STALE_AFTER_MS)
    assert liveness(status, at + STALE_AFTER_MS + 1) == (Liveness.STALE, STALE_AFTER_MS + 1)
    assert liveness(status, at - 5) == (Liveness.RUNNING, 0)


def test_a_bridge_that_has_told_nothing_yet_is_seen_by_its_lock(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    by_this = f"process {os.getpid()} holds {tmp_path}: a bridge that starts, or a cleanup"
    names = {"engine_id": "engine-1", "runner_id": "r-1", "instance_id": "i-1", "since": "now"}
    lock = take_locks(tmp_path, **names)
    try:
        assert shown(tmp_path) == (3, f"not running: {by_this}\n")
        write_status(tmp_path, status_of(process.pid))
        process.kill()
        process.wait()
        code, text = shown(tmp_path)
        assert (code, text.splitlines()[-1]) == (3, by_this)
    finally:
        lock.release()
    assert by_this not in shown(tmp_path)[1]


def test_the_command_says_how_it_is(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    code, text = shown(tmp_path)
    assert (code, text) == (3, f"not running: no bridge has told anything in {tmp_path}\n")
    write_status(tmp_path, status_of(process.pid))
    code, text = shown(tmp_path)
    assert code == 0
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if line)
    assert text.startswith("running: online, hub online\n")
    assert rows["attempts"] == "0 reserved, 1 starting, 2 active, 3 degraded"
    assert rows["slots"] == "6 of 8"
    assert rows["memory"].split(maxsplit=1) == ["bytes", "6 GiB, no ceiling"]
    assert rows["disk"] == "93 % used, 5 GiB free, offers refused"
    assert rows["att-1"].split() == ["7", "degraded"]
    assert "endpoint e9" in text
    write_status(tmp_path, status_of(process.pid, age_ms=61_500))
    code, text = shown(tmp_path)
    assert code == 1
    assert text.startswith(
        f"stale: process {process.pid} is there and has told nothing for 1 min 1 s"
    )
    process.kill()
    process.wait()
    code, text = shown(tmp_path)
    assert code == 3
    assert text.startswith(f"not running: process {process.pid} is gone. What it told last, 1 min ")


def test_programs_get_the_same_as_json(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    code, text = shown(tmp_path, "--json")
    assert code == 3
    assert json.loads(text) == {"liveness": "not_running", "ageMs": None, "status": None}
    write_status(tmp_path, status_of(process.pid))
    code, text = shown(tmp_path, "--json")
    parsed = json.loads(text)
    assert (code, parsed["liveness"]) == (0, "running")
    assert parsed["status"]["degradedReservationCount"] == 3
    assert parsed["status"]["usedResources"]["memoryBytes"] == 6 * 2**30


@pytest.mark.parametrize("content", [b"", b"\0" * 9, b"[]", b'{"pid": 1}', b"[" * 99_999])
def test_a_damaged_status_is_an_error_and_no_guess(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATUS_FILE).write_bytes(content)
    with pytest.raises(RefusedError, match=f"cannot read {tmp_path / STATUS_FILE}"):
        read_status(tmp_path)
    code, text = shown(tmp_path)
    assert code == 2
    assert "cannot read" in text


@pytest.mark.requirement("B-51")
def test_a_part_that_was_not_seen_is_named_with_its_reason(tmp_path: Path) -> None:
    why = "cannot try the egress proxy in 90 s"
    write_status(tmp_path, status_of(os.getpid(), parts_unseen={"egress": why}))
    _, output = shown(tmp_path)
    assert f"egress: {why}" in output
    _, output = shown(tmp_path, "--json")
    assert json.loads(output)["status"]["partsUnseen"] == {"egress": why}


def test_durations() -> None:
    assert [duration(ms) for ms in (0, 59_999, 61_000, 3_600_000, 90_000_000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h 0 min",
        "1 d 1 h",
    ]
