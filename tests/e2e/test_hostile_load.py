"""Bombs and hogs: the limits end or bound them, and nobody else notices."""

from __future__ import annotations

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
