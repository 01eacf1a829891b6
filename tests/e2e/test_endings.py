"""Cancel and the three deadlines end a real container that does everything not to end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from rig import Rig, wait_for

STUBBORN = r"""
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(1)
        os._exit(0)
print("stubborn", flush=True)
while True:
    %s
"""
FLOOD = "os.write(1, b'flood ' * 2000 + b'\\n')"
SILENCE = "time.sleep(1)"

pytestmark = pytest.mark.engine("d26", "r26")


def start(rig: Rig, behaviour: str, **more: object) -> str:
    limits = {"maxOutputBytes": 1 << 40, **more.pop("limits", {})}  # type: ignore[dict-item]
    session_id = rig.dispatch("python3", "-c", STUBBORN % behaviour, limits=limits, **more)
    rig.wait_event(session_id, "agent.started")
    return session_id


@pytest.mark.requirement("B-04")
@pytest.mark.parametrize("behaviour", [FLOOD, SILENCE], ids=["flood", "silence"])
def test_cancel(rig: Rig, behaviour: str) -> None:
    session_id = start(rig, behaviour)
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("cancelled", "cancelled")
    assert not rig.resources()


@pytest.mark.requirement("B-71")
def test_the_hard_wall(rig: Rig) -> None:
    session_id = start(rig, FLOOD, limits={"hardWallMs": 2_000})
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("expired", "hard_wall_expired")
    assert not rig.resources()


@pytest.mark.requirement("B-71")
def test_idle(rig: Rig) -> None:
    session_id = start(rig, SILENCE, limits={"idleMs": 2_000})
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("expired", "idle_expired")
    assert not rig.resources()


@pytest.mark.requirement("B-70", "B-71")
def test_the_lease_when_renewals_stop_coming(rig: Rig) -> None:
    session_id = start(rig, FLOOD, leaseTtlMs=3_000)
    rig.hub.signal(signal.SIGSTOP)
    try:
        wait_for("the container to go", lambda: not rig.resources(), 20)
    finally:
        rig.hub.signal(signal.SIGCONT)
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("expired", "lease_expired")


@pytest.mark.requirement("B-70")
def test_a_renewed_lease_outlives_its_first_ttl(rig: Rig) -> None:
    session_id = rig.dispatch("sleep", "4", leaseTtlMs=1_500)
    assert rig.wait_over(session_id)["outcome"] == "succeeded"


@pytest.mark.requirement("B-70")
def test_with_the_bridge_frozen_the_container_ends_by_its_own_lease(rig: Rig) -> None:
    session_id = start(rig, SILENCE, leaseTtlMs=3_000)
    rig.bridge.signal(signal.SIGSTOP)
    try:
        state = wait_for(
            "PID 1 to end by itself",
            lambda: (s := rig.agent_state()) and s["Status"] == "exited" and s,
            20,
        )
        assert state["ExitCode"] == 70
    finally:
        rig.bridge.signal(signal.SIGCONT)
    assert rig.wait_over(session_id)["failureCode"] == "lease_expired"
    assert not rig.resources()


@pytest.mark.requirement("B-72")
def test_with_pid_1_frozen_the_watchdog_ends_the_lease(rig: Rig) -> None:
    session_id = start(rig, SILENCE, leaseTtlMs=3_000)
    state = rig.agent_state()
    assert state is not None
    os.kill(state["Pid"], signal.SIGSTOP)
    rig.hub.signal(signal.SIGSTOP)
    try:
        wait_for("the container to go", lambda: not rig.resources(), 20)
    finally:
        rig.hub.signal(signal.SIGCONT)
    assert rig.wait_over(session_id)["failureCode"] == "lease_expired"


def test_output_beyond_its_limit_ends_the_attempt(rig: Rig) -> None:
    session_id = start(rig, FLOOD, limits={"maxOutputBytes": 1 << 20})
    assert rig.wait_over(session_id)["failureCode"] == "output_limit"
    assert not rig.resources()


@pytest.mark.timeout(240)
def test_memory_stays_flat_under_a_gibibyte_of_output(rig: Rig) -> None:
    rig.wait_over(rig.dispatch("true"))
    before_kib = rig.bridge.memory_peak_kib()
    command = "head -c 1073741824 /dev/zero | tr '\\0' 'x' | fold -w 200"
    began = time.monotonic()
    limits = {"maxOutputBytes": 1 << 40, "hardWallMs": 180_000}
    session_id = rig.dispatch("sh", "-c", command, limits=limits)
    result = rig.wait_over(session_id, deadline_s=200)
    assert result["outcome"] == "succeeded", result
    grown_kib = rig.bridge.memory_peak_kib() - before_kib
    assert grown_kib < 64 * 1024, f"grew by {grown_kib} KiB in {time.monotonic() - began:.0f} s"
