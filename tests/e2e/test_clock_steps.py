"""Steps of the wall clock change nothing; a host that slept outlives no lease (lifecycle.md)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engines import Engine
from needs import unavailable
from rig import Rig, wait_for
from stepped_clock import DAY_S, CompilerMissingError, SteppedClock, build_shim

TTL_MS = 2_000
NEAR_S = 600
"""What a slow machine may take; a day is far."""

pytestmark = [pytest.mark.engine("d26"), pytest.mark.timeout(180)]


class Clocks:
    """What the bridge's host and the hub's host believe."""

    def __init__(self, directory: Path, shim: Path) -> None:
        self.bridge = SteppedClock(shim, directory / "bridge.clock")
        self.hub = SteppedClock(shim, directory / "hub.clock")

    def set_wall(self, whose: str, days: int) -> None:
        """Step the wall clock of ``bridge``, ``hub`` or ``both``."""
        for name in ("bridge", "hub") if whose == "both" else (whose,):
            getattr(self, name).set_wall(days * DAY_S)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build_shim(tmp_path_factory.mktemp("shim"))
    except CompilerMissingError as error:
        unavailable(str(error))


@contextmanager
def stepped_rig(
    directory: Path, engine: Engine, runner_id: str, shim: Path
) -> Iterator[tuple[Rig, Clocks]]:
    """A real hub and a real bridge, each under clocks of its own."""
    rig = Rig(directory, engine, runner_id)
    clocks = Clocks(directory, shim)
    try:
        start_hub(rig, clocks)
        start_bridge(rig, clocks)
        yield rig, clocks
    finally:
        rig.close()


def start_hub(rig: Rig, clocks: Clocks, port: int = 0) -> None:
    rig.start_hub(port, FORGE_HUB_HEARTBEAT_INTERVAL_MS="1000", **clocks.hub.environment)


def start_bridge(rig: Rig, clocks: Clocks, *, wait: bool = True) -> None:
    settings = {"FORGE_MAX_CONCURRENT_SANDBOXES": "2", **clocks.bridge.environment}
    rig.start_bridge(settings, wait=wait)


@pytest.fixture(scope="module")
def stage(
    engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
    module_runner_id: str,
    shim: Path,
) -> Iterator[tuple[Rig, Clocks]]:
    with stepped_rig(tmp_path_factory.mktemp("rig"), engine, module_runner_id, shim) as stage:
        yield stage


@pytest.fixture(autouse=True)
def _right_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stage" in request.fixturenames:
        request.getfixturevalue("stage")[1].set_wall("both", 0)


def start(rig: Rig, *argv: str, **more: Any) -> str:
    session_id = rig.dispatch(*(argv or ("sleep", "300")), **{"leaseTtlMs": TTL_MS, **more})
    rig.wait_event(session_id, "agent.started")
    return session_id


def renewals(rig: Rig, session_id: str) -> int:
    view = rig.get(f"/sessions/{session_id}")
    assert view["state"] == "running", view
    return int(view["attempts"][0]["dispatches"][0]["leaseSequence"])


def _has_renewals(rig: Rig, session_id: str, goal: int) -> bool:
    return renewals(rig, session_id) >= goal


def days_off(utc: str) -> float:
    """How far a time that one of the two wrote is from the true one, in days."""
    return (datetime.fromisoformat(utc).timestamp() - time.time()) / DAY_S


def types(rig: Rig, session_id: str) -> list[str]:
    return [event["type"] for event in rig.diagnostics(session_id)["timeline"]]


def said(log: Path, what: str) -> list[dict[str, Any]]:
    """The JSON lines of a log about this."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == what]


# ---- steps of the wall clock


@pytest.mark.requirement("B-04", "B-70")
@pytest.mark.parametrize("whose", ["bridge", "hub", "both"])
def test_an_attempt_survives_steps_of_a_day(stage: tuple[Rig, Clocks], whose: str) -> None:
    rig, clocks = stage
    session_id = start(rig)
    for days in (1, -1):
        clocks.set_wall(whose, days)
        # Six thirds of the ttl: the lease that held at the step is over twice by then.
        goal = renewals(rig, session_id) + 6
        wait_for("six renewals after the step", partial(_has_renewals, rig, session_id, goal), 30)
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "seen enough"})
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("cancelled", "cancelled")
    timeline = rig.diagnostics(session_id)["timeline"]
    assert "warning" not in [event["type"] for event in timeline]
    # The step was real: whoever was stepped wrote yesterday's time to the end.
    last = timeline[-1]
    assert days_off(last["at"]) == pytest.approx(0 if whose == "hub" else -1, abs=0.1)
    assert days_off(last["receivedAt"]) == pytest.approx(0 if whose == "bridge" else -1, abs=0.1)
    assert not rig.resources()


@pytest.mark.requirement("B-04")
@pytest.mark.parametrize("days", [1, -1])
def test_a_new_session_runs_to_its_commit_on_a_wrong_day(
    stage: tuple[Rig, Clocks], days: int
) -> None:
    rig, clocks = stage
    clocks.set_wall("bridge", days)
    clocks.set_wall("hub", -days)
    session_id = rig.dispatch("sh", "-c", "echo stepped >> VERSION", leaseTtlMs=TTL_MS)
    result = rig.wait_over(session_id)
    assert (result["outcome"], bool(result["resultCommit"])) == ("succeeded", True)
    assert 0 <= result["timings"]["agent"]["durationMs"] < NEAR_S * 1_000
    assert "warning" not in types(rig, session_id)


@pytest.mark.requirement("B-70", "B-71")
@pytest.mark.parametrize("days", [1, -1])
def test_deadlines_come_neither_early_nor_a_day_late(stage: tuple[Rig, Clocks], days: int) -> None:
    rig, clocks = stage
    idle_id = start(rig, limits={"idleMs": 4_000})
    lease_id = start(rig)
    began = time.monotonic()
    clocks.set_wall("both", days)
    wait_for("a renewal", lambda: renewals(rig, idle_id) and renewals(rig, lease_id))
    result = rig.wait_over(idle_id)
    assert (result["outcome"], result["failureCode"]) == ("expired", "idle_expired")
    assert result["timings"]["agent"]["durationMs"] >= 4_000
    rig.hub.signal(signal.SIGSTOP)
    try:
        wait_for("the container to go", lambda: not rig.resources(), 30)
    finally:
        rig.hub.signal(signal.SIGCONT)
    wait_for("the end", lambda: rig.get(f"/sessions/{lease_id}")["cleanup"] == "complete")
    assert rig.get(f"/sessions/{lease_id}")["failureCode"] == "lease_expired"
    assert time.monotonic() - began < NEAR_S


@pytest.mark.requirement("B-04")
def test_both_logs_tell_of_a_step(stage: tuple[Rig, Clocks]) -> None:
    rig, clocks = stage
    clocks.set_wall("both", 1)
    for log, what in (
        (rig.bridge.log, "the clocks jumped"),
        (rig.hub.log, "dispatcher.clocks_jumped"),
    ):
        wait_for(f"the step in {log.name}", partial(_is_told_in_full, log, what))
        last = said(log, what)[-1]
        assert last["host_suspended_ms"] == 0
        assert days_off(last.get("timestamp") or last["time"]) == pytest.approx(1, abs=0.1)


def _is_told_in_full(log: Path, what: str) -> bool:
    """Whether all steps of this log together are one day, as the clock stands now."""
    total_ms: int = sum(line["wall_clock_stepped_ms"] for line in said(log, what))
    return abs(total_ms - DAY_S * 1_000) < NEAR_S * 1_000


@pytest.mark.requirement("B-83", "B-84", "B-04")
def test_messages_keep_ids_and_order_across_steps_and_a_crash(
    engine: Engine, tmp_path: Path, runner_id: str, shim: Path
) -> None:
    with stepped_rig(tmp_path / "rig", engine, runner_id, shim) as (rig, clocks):
        sessions = [start(rig, leaseTtlMs=600_000, retries=0) for _ in range(2)]
        agents = agent_pids(rig)
        assert len(agents) == 2
        rig.hub.kill()
        written: list[list[Message]] = [[]]
        for days, pid in zip((1, -1), agents, strict=True):
            clocks.set_wall("bridge", days)
            os.kill(pid, signal.SIGKILL)
            known = {message.id for group in written for message in group}
            wait_for("its final result", partial(_has_final_result, rig, known))
            written.append([m for m in outbox(rig) if m.id not in known])
            at = [days_off(m.payload["at"]) for m in written[-1] if "at" in m.payload]
            assert at == [pytest.approx(days, abs=0.1)] * len(at)
            assert at
        rig.bridge.kill()
        _check_order(written[1], written[2])
        start_bridge(rig, clocks, wait=False)
        clocks.set_wall("hub", 1)
        start_hub(rig, clocks, int(rig.url.rpartition(":")[2]))
        for session_id in sessions:
            result = rig.wait_over(session_id)
            assert (result["failureCode"], result["signal"]) == ("agent_failed", signal.SIGKILL)
        wait_for("an empty outbox", lambda: not outbox(rig))
        told = [rig.diagnostics(session_id) for session_id in sessions]
        for diagnostics in told:
            timeline = diagnostics["timeline"]
            assert [e["sequence"] for e in timeline] == list(range(1, len(timeline) + 1))
            assert timeline[-1]["type"] == "teardown.finished"
        reports = [report["reportId"] for d in told for report in d["cleanupReports"]]
        assert len(reports) == len(set(reports)) == 2
        assert not list((rig.state_root / "rejected").glob("*.json"))


def agent_pids(rig: Rig) -> list[int]:
    """The agents' own processes: the children of the PIDs 1."""
    found = []
    for name in rig.resources():
        if name.startswith("forge-agent-"):
            first = rig.engine.api.get(f"/containers/{name}/json")["State"]["Pid"]
            children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
            found += [int(pid) for pid in children]
    return found


class Message(NamedTuple):
    """A message that waits for the hub, as it lies on the disk."""

    created: int
    id: str
    method: str
    payload: dict[str, Any]


def outbox(rig: Rig) -> list[Message]:
    """The messages that wait, in the order in which they will be sent."""
    found = []
    for folder in ("outbox", "cleanup-reports"):
        for file in (rig.state_root / folder).glob("*.json"):
            try:
                kept = json.loads(file.read_text())
            except FileNotFoundError:
                continue  # a later revision has taken its place
            found.append(Message(kept["created"], kept["id"], kept["method"], kept["payload"]))
    return sorted(found)


def _has_final_result(rig: Rig, known: set[str]) -> bool:
    """Whether one waits that was not known."""
    return any(m.payload.get("revision") == 2 and m.id not in known for m in outbox(rig))


def _check_order(earlier: list[Message], later: list[Message]) -> None:
    """What was made two days before, by the wall clock, comes after what was made first."""
    numbers = [message.created for message in [*earlier, *later]]
    assert numbers == sorted(set(numbers))
    assert len({message.id for message in [*earlier, *later]}) == len(numbers)
    for group in (earlier, later):
        sequences = [m.payload["sequence"] for m in group if "sequence" in m.payload]
        assert sequences == sorted(sequences)
        assert {"SubmitDispatchEvent", "SubmitDispatchResult", "SubmitCleanupReport"} <= {
            m.method for m in group
        }


# ---- a host that slept


@pytest.mark.requirement("B-70", "B-72")
@pytest.mark.parametrize("first", ["container", "bridge", "hub"])
def test_what_was_frozen_beyond_its_lease_is_over_whoever_wakes_first(
    stage: tuple[Rig, Clocks], first: str
) -> None:
    rig, _ = stage
    session_id = start(rig)
    state = rig.agent_state()
    assert state is not None
    pids = {
        "container": [*agent_pids(rig), state["Pid"]],
        "bridge": [rig.bridge.pid],
        "hub": [rig.hub.pid],
    }
    for pid in (pid for group in pids.values() for pid in group):
        os.kill(pid, signal.SIGSTOP)
    frozen_at = time.monotonic()
    try:
        wait_for("the lease to be over", lambda: time.monotonic() - frozen_at > TTL_MS / 1_000 + 1)
        state = rig.agent_state()
        assert state is not None
        assert state["Status"] == "running"
        for pid in pids[first]:
            os.kill(pid, signal.SIGCONT)
        if first == "container":
            ended = wait_for("PID 1 to end by itself", lambda: _exited(rig), 20)
            assert ended["ExitCode"] == 70
        elif first == "bridge":
            wait_for("the watchdog to end it", lambda: not rig.resources(), 20)
    finally:
        for pid in (pid for group in pids.values() for pid in group):
            _thaw(pid)
    wait_for("the end", lambda: rig.get(f"/sessions/{session_id}")["cleanup"] == "complete")
    view = rig.get(f"/sessions/{session_id}")
    assert (view["state"], view["failureCode"]) == ("expired", "lease_expired")
    assert not rig.resources()


def _exited(rig: Rig) -> dict[str, Any] | None:
    state = rig.agent_state()
    return state if state and state["Status"] == "exited" else None


def _thaw(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


@pytest.mark.requirement("B-70", "B-72")
def test_an_hour_of_sleep_ends_the_lease_and_work_goes_on(
    engine: Engine, tmp_path: Path, runner_id: str, shim: Path
) -> None:
    with stepped_rig(tmp_path / "rig", engine, runner_id, shim) as (rig, clocks):
        long_ms = 7_200_000
        limits = {"hardWallMs": long_ms, "idleMs": long_ms}
        session_id = start(rig, leaseTtlMs=60_000, limits=limits)
        for clock in (clocks.hub, clocks.bridge):
            clock.sleep_host(3_600)
        wait_for("the end", lambda: rig.get(f"/sessions/{session_id}")["cleanup"] == "complete")
        view = rig.get(f"/sessions/{session_id}")
        assert (view["state"], view["failureCode"]) == ("expired", "lease_expired")
        assert not rig.resources()
        line = wait_for("a line", lambda: said(rig.bridge.log, "the clocks jumped"))[0]
        assert line["host_suspended_ms"] == pytest.approx(3_600_000, abs=5_000)
        assert line["wall_clock_stepped_ms"] == 0
        again = rig.dispatch("true", leaseTtlMs=60_000)
        assert rig.wait_over(again)["outcome"] == "succeeded"
