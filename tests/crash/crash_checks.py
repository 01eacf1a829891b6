"""What must be true once a bridge that was killed is online again."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from crash_parts import (
    DONE,
    REPOSITORY,
    STOPPED,
    CrashRig,
    Evidence,
    Outcome,
    files,
    outcome_of,
)

from forge_core.resources import ResourceVector
from rig import git, wait_for

OWED = ("attempts", "outbox", "cleanup-reports")
LASTING = "forge-tooling-"
"""What lives as long as the bridge that made it."""

REFUSED = ("outbox/rejected", "cleanup-reports/rejected")


def verify_recovered(
    rig: CrashRig, session_id: str, evidence: Evidence, after: Outcome = DONE
) -> None:
    """Everything that must be true once the bridge is online again.

    :param after: how the session ends if the hub had to dispatch it again.
    """
    wait_for(f"the end of {session_id}", lambda: _is_over(rig, session_id))
    wait_for("nothing to be owed", lambda: not files(rig, *OWED))
    assert [name for name in rig.resources() if not name.startswith(LASTING)] == []
    assert rig.left_on_host() == []
    _verify_images(rig)
    _verify_outcomes(rig, session_id, evidence, after)
    _verify_starts(rig, session_id)
    _verify_reports(rig, session_id, evidence)
    _verify_capacity(rig)
    _verify_refused(rig, session_id)
    rig.is_fit = True


def _verify_outcomes(rig: CrashRig, session_id: str, evidence: Evidence, after: Outcome) -> None:
    """One outcome a dispatch: the one that was durable, else that the bridge had stopped."""
    dispatches = rig.dispatches(session_id)
    for number, dispatch in enumerate(dispatches, 1):
        assert dispatch["fence"] == number
        if dispatch["result"] is None:
            # Whoever comes first ends it: its time, or the instance that registers after this one.
            assert dispatch["endReason"] in ("offer_expired", "instance_gone")
            assert number < len(dispatches)
            assert number not in evidence.started
        elif number in evidence.outcomes:
            assert outcome_of(dispatch["result"]) == evidence.outcomes[number]
        else:
            assert outcome_of(dispatch["result"]) == (STOPPED if number == 1 else after)
    session = rig.get(f"/sessions/{session_id}")
    published = _published(rig, session)
    state = outcome_of(dispatches[-1]["result"]) if published is None else DONE
    assert (session["state"], session["failureCode"]) == state
    assert (published is not None) == (session["state"] == "succeeded" and evidence.changes)
    if published is not None:
        store = rig.state_root / "repositories" / "sample.git"
        assert git(store, "rev-parse", f"{published}^@") == rig.commit


def _published(rig: CrashRig, session: dict[str, Any]) -> str | None:
    """The commit that the remote has, which is what the hub knows, by its runner or by itself."""
    (attempt,) = session["attempts"]
    at_the_remote = rig.remote.branch(REPOSITORY, attempt["input"]["branch"])
    told = session["publication"]
    if told is None or told["outcome"] not in ("pushed", "already_published"):
        assert at_the_remote is None, told
        return None
    assert at_the_remote == told["resultCommit"]
    outcomes = [p["outcome"] for d in attempt["dispatches"] for p in d["publications"]]
    assert outcomes in (["pushed"], ["unknown", "pushed"])
    return at_the_remote


def _verify_images(rig: CrashRig) -> None:
    """What the engine has is promoted and recorded, and what is recorded is there, proven."""
    records = {path.stem for path in (rig.state_root / "images").glob("*.json")}
    found = rig.images()
    assert found.keys() == records
    for key, names in found.items():
        (name,) = names
        assert name.endswith(f":{key}"), name
        assert (rig.state_root / "attestations" / key).is_dir()


def _verify_starts(rig: CrashRig, session_id: str) -> None:
    """No fence has two agents: by the engine's events or its own notes, and by what was told."""
    (attempt,) = rig.get(f"/sessions/{session_id}")["attempts"]
    counts = rig.starts_of(attempt["attemptId"])
    assert all(count == 1 for count in counts.values()), counts
    found = rig.diagnostics(session_id)
    told = Counter(e["fence"] for e in found["timeline"] if e["type"] == "agent.started")
    assert all(count == 1 for count in told.values()), told
    # On the host an agent can die with its bridge before it has noted that it was started.
    unnoted = {d["fence"] for d in attempt["dispatches"] if d["runtime"] == "host"}
    assert told.keys() - unnoted <= counts.keys()
    assert found["logTail"].count("begun") <= len(counts)
    for dispatch in attempt["dispatches"]:
        if dispatch["result"] is not None:
            events = [e["sequence"] for e in found["timeline"] if e["fence"] == dispatch["fence"]]
            assert sorted(events) == list(range(1, len(events) + 1)), "the timeline has holes"


def _verify_reports(rig: CrashRig, session_id: str, evidence: Evidence) -> None:
    """Each resource is in exactly one report at the hub, and none of them resisted."""
    reports = rig.diagnostics(session_id)["cleanupReports"]
    assert all(report["complete"] for report in reports)
    items = [item for report in reports for item in report["resources"]]
    assert {item["outcome"] for item in items} <= {"removed", "absent"}
    named = Counter(item["name"] for item in items)
    assert all(count == 1 for count in named.values()), named
    assert evidence.created <= named.keys(), f"not reported: {evidence.created - named.keys()}"


def _verify_capacity(rig: CrashRig) -> None:
    """Whole again: as the bridge sees it, and as the hub was told."""

    def is_whole() -> bool:
        status = rig.status()
        told = rig.get(f"/runners/{rig.runner_id}")
        return (
            status.used_resources == ResourceVector()
            and not any(told["usedResources"].values())
            and status.degraded_reservation_count == told["degradedReservationCount"] == 0
            and status.pending_reports == told["pendingReports"] == 0
            and told["runnerInstanceId"] == status.runner_instance_id
        )

    wait_for("the capacity to be whole", is_whole)


def _verify_refused(rig: CrashRig, session_id: str) -> None:
    """The hub refuses only what came under a fence that it had superseded meanwhile."""
    last = rig.dispatches(session_id)[-1]["fence"]
    for name in files(rig, *REFUSED):
        path = rig.state_root / name
        message = json.loads(path.read_text())
        assert message["rejection"]["reason"] == "stale_fence", message
        assert message["payload"]["fence"] < last
        path.unlink()


def _is_over(rig: CrashRig, session_id: str) -> bool:
    session = rig.get(f"/sessions/{session_id}")
    return bool(session["endedAt"]) and session["cleanup"] != "pending"
