"""Two hundred attempts while bridge, hub and engine are killed again and again."""

from __future__ import annotations

import os
import random  # noqa: TID251 - a seeded schedule
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests

from forge_bridge.status import read_status
from own_daemon import OwnDaemon
from rig import Rig, wait_for

ATTEMPTS = int(os.environ.get("FORGE_SOAK_ATTEMPTS", "200"))
SEED = int(os.environ.get("FORGE_SOAK_SEED", "1"))
AT_ONCE = 6
RETRIES = 10
AGENT = "echo run >> VERSION; sleep 0.3"

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(3600)]


class Chaos:
    """Kills one of the three now and then, and starts it again."""

    def __init__(self, rig: Rig, daemon: OwnDaemon) -> None:
        self._rig = rig
        self._daemon = daemon
        self._chance = random.Random(SEED)
        self._next_at = time.monotonic() + 3
        self.kills: Counter[str] = Counter()

    def maybe_kill(self) -> None:
        if time.monotonic() < self._next_at:
            return
        whom = self._chance.choices(("bridge", "hub", "engine"), (6, 3, 2))[0]
        self.kills[whom] += 1
        getattr(self, f"_kill_{whom}")()
        self._next_at = time.monotonic() + self._chance.uniform(2, 6)

    def _kill_bridge(self) -> None:
        self._rig.bridge.kill()
        self._rig.start_bridge(wait=False, FORGE_MAX_CONCURRENT_SANDBOXES="4")

    def _kill_hub(self) -> None:
        port = int(self._rig.url.rpartition(":")[2])
        self._rig.hub.kill()
        self._rig.start_hub(port)

    def _kill_engine(self) -> None:
        self._daemon.signal(signal.SIGKILL)
        self._daemon.start()


def result_of(rig: Rig, session_id: str) -> dict[str, Any] | None:
    try:
        view = rig.get(f"/sessions/{session_id}")
    except requests.ConnectionError:
        return None
    over = view["endedAt"] is not None and view["cleanup"] != "pending"
    return dict(view) if over else None


@pytest.mark.requirement("B-80", "B-82", "B-83", "B-86")
def test_nothing_is_lost_and_nothing_is_left(tmp_path: Path, runner_id: str) -> None:
    daemon = OwnDaemon(tmp_path / "engine")
    rig = Rig(tmp_path / "rig", daemon.engine(), runner_id)
    try:
        rig.start_hub()
        rig.start_bridge(FORGE_MAX_CONCURRENT_SANDBOXES="4")
        chaos, waiting, over = Chaos(rig, daemon), list[str](), dict[str, dict[str, Any]]()
        while len(over) < ATTEMPTS:
            while len(waiting) < AT_ONCE and len(over) + len(waiting) < ATTEMPTS:
                waiting.append(rig.dispatch("sh", "-c", AGENT, retries=RETRIES, leaseTtlMs=8_000))
            chaos.maybe_kill()
            for session_id in tuple(waiting):
                if view := result_of(rig, session_id):
                    waiting.remove(session_id)
                    over[session_id] = view
        wait_for("the bridge to be idle", lambda: _is_idle(rig), 180)
        assert not rig.resources()
        for session_id, view in over.items():
            _check_session(rig, session_id, view)
        outcomes = Counter(view["result"]["failureCode"] or "succeeded" for view in over.values())
        print(f"{ATTEMPTS} attempts, seed {SEED}, kills {dict(chaos.kills)}: {dict(outcomes)}")
        assert outcomes["succeeded"] >= ATTEMPTS * 0.9, outcomes
    finally:
        rig.close()
        daemon.remove()


def _is_idle(rig: Rig) -> bool:
    found = read_status(rig.state_root)
    return (
        found is not None
        and found.pid == rig.bridge.pid
        and found.used_resources.slots == 0
        and found.degraded_reservation_count == 0
        and found.pending_reports == 0
        and not list((rig.state_root / "attempts").glob("*.ledger"))
        and not list((rig.state_root / "outbox").glob("*.json"))
    )


def _check_session(rig: Rig, session_id: str, view: dict[str, Any]) -> None:
    """One outcome; each fence started its agent at most once; no sequence twice."""
    assert view["result"] is not None, session_id
    timeline = rig.diagnostics(session_id)["timeline"]
    started = Counter(
        (e["attemptId"], e["fence"]) for e in timeline if e["type"] == "agent.started"
    )
    assert all(count == 1 for count in started.values()), (session_id, started)
    numbers = Counter((e["attemptId"], e["fence"], e["sequence"]) for e in timeline)
    assert all(count == 1 for count in numbers.values()), (session_id, numbers)
    succeeded = [
        d
        for a in view["attempts"]
        for d in a["dispatches"]
        if d["result"] and d["result"]["outcome"] == "succeeded"
    ]
    assert len(succeeded) <= 1, session_id
