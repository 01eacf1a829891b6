"""Processes are found by their mark and end with everything below them, and nobody else does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from forge_core.errors import RefusedError
from forge_edges.host_processes import end_marked, marks

pytestmark = pytest.mark.requirement("B-53")

VARIABLE = "FORGE_TEST_MARK"
PATIENCE_MS = 10_000

DAEMON = "setsid sh -c 'sleep 600 & sleep 600' >/dev/null 2>&1 & exit"
CLEARED = "env -i setsid sh -c 'echo $$; exec sleep 600' 2>/dev/null & wait"
STUBBORN = "trap '' TERM HUP INT; echo up; while :; do sleep 600; done"


@pytest.fixture
def mark() -> Iterator[str]:
    """A value of its own; what a failed test leaves is ended here."""
    mark = uuid.uuid4().hex
    yield mark
    end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)


def start(mark: str, script: str, *prefix: str) -> subprocess.Popen[bytes]:
    command = [*prefix, "sh", "-c", script]
    environment = {**os.environ, VARIABLE: mark}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def reap(process: subprocess.Popen[bytes]) -> int:
    with process:
        return process.wait(30)


def test_nobody_is_ended_where_nobody_carries_the_mark(mark: str) -> None:
    other = start(f"{mark}-other", "echo up; exec sleep 600")
    try:
        assert first_line(other) == "up"
        assert f"{mark}-other" in marks(VARIABLE)
        assert mark not in marks(VARIABLE)
        assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS) is False
        assert other.poll() is None
    finally:
        assert end_marked(VARIABLE, f"{mark}-other", within_ms=PATIENCE_MS)
        assert reap(other) == -9


def test_a_stubborn_process_ends(mark: str) -> None:
    process = start(mark, STUBBORN)
    assert first_line(process) == "up"
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS) is True
    assert mark not in marks(VARIABLE)
    assert reap(process) == -9


def test_a_stopped_process_ends(mark: str) -> None:
    process = start(mark, "echo up; kill -STOP $$; sleep 600")
    assert first_line(process) == "up"
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
    assert reap(process) == -9


def test_a_daemon_whose_parents_have_ended_is_found_by_its_mark(mark: str) -> None:
    assert reap(start(mark, DAEMON)) == 0
    assert mark in marks(VARIABLE)
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
    assert mark not in marks(VARIABLE)


def test_what_has_cleared_its_environment_is_found_below_its_parent(mark: str) -> None:
    process = start(mark, CLEARED)
    pidfd = os.pidfd_open(int(first_line(process)))
    try:
        assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
        assert select.select([pidfd], [], [], 0)[0], "it still runs"
    finally:
        os.close(pidfd)
        reap(process)


def test_a_process_that_keeps_forking_ends(mark: str) -> None:
    forks = "while :; do sh -c 'sleep 0.01' & done"
    process = start(mark, f"echo up; {forks}")
    assert first_line(process) == "up"
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
    assert mark not in marks(VARIABLE)
    reap(process)


def test_a_large_environment_hides_no_mark(mark: str) -> None:
    process = start(
        mark, "echo up; exec sleep 600", "env", *(f"A{n}={'x' * 100_000}" for n in (1, 2))
    )
    assert first_line(process) == "up"
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
    reap(process)


def test_this_process_is_never_ended(mark: str) -> None:
    """A bridge may itself run inside of an attempt of another one."""
    program = (
        "from forge_edges.host_processes import end_marked;"
        f"print(end_marked('{VARIABLE}', '{mark}', within_ms=1000))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, VARIABLE: mark},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_what_does_not_end_in_time_is_said(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(mark, STUBBORN)
    assert first_line(process) == "up"
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        began = time.monotonic()
        with pytest.raises(RefusedError, match="SIGKILL within 300 ms") as refused:
            end_marked(VARIABLE, mark, within_ms=300)
        assert refused.value.code == "process_resists"
        assert time.monotonic() - began < 5
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
    reap(process)


def test_what_belongs_to_another_user_is_said(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(mark, STUBBORN)
    assert first_line(process) == "up"

    def refuse(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", refuse)
        with pytest.raises(RefusedError, match="not ours to kill"):
            end_marked(VARIABLE, mark, within_ms=300)
    assert end_marked(VARIABLE, mark, within_ms=PATIENCE_MS)
    reap(process)
