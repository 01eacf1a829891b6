"""Bombs and hogs: the limits end or bound them, and nobody else notices."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engines import Engine
from rig import Rig, running_rig

MIB = 1 << 20
SMALL = {"slots": 1, "memoryBytes": 64 * MIB, "cpuMillis": 500, "pids": 32}
PEER_PATIENCE_S = 20.0

# Only an engine that enforces its limits: anywhere else these would be real.
pytestmark = [pytest.mark.engine("d26"), pytest.mark.requirement("B-10", "B-35")]


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    assert engine.limits_enforced
    slots = {"FORGE_MAX_CONCURRENT_SANDBOXES": "2"}
    with running_rig(tmp_path_factory.mktemp("rig"), engine, module_runner_id, **slots) as rig:
        yield rig


def start(rig: Rig, script: str, **more: Any) -> str:
    session_id = rig.dispatch("python3", "-c", script, resources=SMALL, **more)
    rig.wait_event(session_id, "agent.started")
    return session_id


BOMB = """
import errno, os
while True:
    try:
        os.fork()
    except OSError as error:
        assert error.errno == errno.EAGAIN
        os.write(1, b"full\\n")
        while True:
            pass
"""


def test_a_fork_bomb_that_spins_hurts_nobody_and_ends(rig: Rig) -> None:
    session_id = start(rig, BOMB)
    began = time.monotonic()
    peer = rig.wait_over(rig.dispatch("true"), PEER_PATIENCE_S)
    assert peer["outcome"] == "succeeded", f"after {time.monotonic() - began:.1f} s: {peer}"
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    assert rig.wait_over(session_id)["failureCode"] == "cancelled"
    # PID 1 is one of the 32.
    assert 1 <= rig.diagnostics(session_id)["logTail"].count("full") <= SMALL["pids"] - 1
    assert not rig.resources()


STARVE_PID_1 = """
import os
def tried(attempt):
    try:
        attempt()
    except PermissionError:
        os.write(1, b"refused\\n")
tried(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
tried(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
tried(lambda: os.sched_setaffinity(1, {0}))
os.sched_setaffinity(0, {0})
"""


@pytest.mark.requirement("B-71", "B-72")
def test_a_starved_supervisor_buys_no_time(rig: Rig) -> None:
    began = time.monotonic()
    session_id = start(rig, STARVE_PID_1 + BOMB, limits={"hardWallMs": 2_000})
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("expired", "hard_wall_expired")
    assert time.monotonic() - began < PEER_PATIENCE_S
    assert not rig.resources()


HOG = "hog = []\nwhile True: hog.append(bytearray(1 << 20))"
MANY_SMALL_HOGS = """
import os, time
for _ in range(24):
    if os.fork() == 0:
        open("/proc/self/oom_score_adj", "w").write("0")  # no longer the kernel's first choice
        hog = bytearray(4 << 20)
        for at in range(0, len(hog), 4096):
            hog[at] = 1
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize("script", [HOG, MANY_SMALL_HOGS], ids=["one", "many small"])
def test_memory_that_runs_out_is_named_as_a_suspicion(rig: Rig, script: str) -> None:
    session_id = start(rig, script, limits={"hardWallMs": 10_000})
    peer = rig.wait_over(rig.dispatch("true"), PEER_PATIENCE_S)
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "out_of_memory", result
    assert "suspects" in result["summary"]
    assert peer["outcome"] == "succeeded"
    assert not rig.resources()


FILL = """
import os
descriptor = os.open("big", os.O_CREAT | os.O_WRONLY)
os.posix_fallocate(descriptor, 0, 2 << 30)
"""


@pytest.mark.requirement("B-04")
def test_a_huge_workspace_is_refused_by_name_and_removed(rig: Rig) -> None:
    """Nothing stops it from being written: docs/explanation/threat-model.md, What is not."""
    result = rig.wait_over(rig.dispatch("python3", "-c", FILL))
    assert result["failureCode"] == "output_invalid"
    assert "size: 'big' has 2147483648 bytes" in result["summary"]
    assert not rig.resources()


def test_the_bridge_lives_through_all_of_it(rig: Rig) -> None:
    assert rig.wait_over(rig.dispatch("true"))["outcome"] == "succeeded"
    assert rig.bridge.process.poll() is None


LONG_LINE = "import sys\nsys.stdout.write('x' * 10_000_000)"
TINY_LINES = "import os\nfor _ in range(1_000_000): os.write(1, b'\\n')"
CONTROLS = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


@pytest.mark.requirement("B-04")
@pytest.mark.parametrize("script", [LONG_LINE, TINY_LINES], ids=["long line", "tiny lines"])
def test_output_of_any_shape_costs_no_memory(rig: Rig, script: str) -> None:
    before_kib = rig.bridge.memory_peak_kib()
    session_id = rig.dispatch("python3", "-c", script, limits={"maxOutputBytes": 1 << 30})
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded", result
    grown_kib = rig.bridge.memory_peak_kib() - before_kib
    assert grown_kib < 32 * 1024, f"grew by {grown_kib} KiB"
    assert rig.diagnostics(session_id)["logTail"]


BINARY = """
import os
for stream in (1, 2):
    os.write(stream, bytes(range(256)) + b"\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80\\xc0\\x80")
    os.write(stream, b"\\x1b]0;title\\x07\\x1b[2J\\x1b[31m\\xc2\\x9b31mred\\r\\n")
"""


@pytest.mark.requirement("B-04")
def test_binary_output_and_escapes_reach_no_log_and_no_terminal(rig: Rig) -> None:
    session_id = rig.dispatch("python3", "-c", BINARY)
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    printed = rig.diagnostics(session_id)["logTail"]
    assert printed.count("\x1b]0;title") == 2  # as it was, for who asks for it
    assert "\N{REPLACEMENT CHARACTER}" in printed
    for log in (rig.bridge.log, rig.hub.log):
        assert CONTROLS.search(log.read_bytes()) is None
