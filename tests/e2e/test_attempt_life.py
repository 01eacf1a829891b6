"""The main job on real parts: offer, container, one commit back, all removed and reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig import Rig, git

AGENT = "python3 -m unittest -q && python3 release.py"


@pytest.mark.requirement("B-01", "B-04", "B-08", "B-83", "B-84")
def test_an_attempt_goes_through(rig: Rig) -> None:
    session_id = rig.dispatch("sh", "-c", AGENT)
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"], result["exitCode"]) == ("succeeded", None, 0)
    store = rig.state_root / "repositories" / "sample.git"
    commit = result["resultCommit"]
    assert git(store, "rev-parse", f"{commit}^@") == rig.commit
    assert git(store, "diff", "--name-only", rig.commit, commit) == "CHANGES.md\nVERSION"
    found = rig.diagnostics(session_id)
    kinds = [event["type"] for event in found["timeline"]]
    assert kinds[:4] == ["offer.reserved", "image.resolved", "inventory", "agent.started"]
    assert {"agent.exited", "output.imported", "teardown.started"} < set(kinds)
    assert "Ran 3 tests" in found["logTail"]
    (report,) = found["cleanupReports"]
    removed = {(r["kind"], r["role"]): r["outcome"] for r in report["resources"]}
    assert removed == {
        ("container", "agent"): "removed",
        ("container", "helper"): "removed",
        ("volume", "workspace"): "removed",
    }
    assert not rig.resources()


@pytest.mark.requirement("B-04")
def test_an_agent_that_changes_nothing_has_no_result_commit(rig: Rig) -> None:
    result = rig.wait_over(rig.dispatch("true"))
    assert (result["outcome"], result["resultCommit"]) == ("succeeded", None)


def test_an_agent_that_fails_says_how(rig: Rig) -> None:
    result = rig.wait_over(rig.dispatch("sh", "-c", "echo broken > VERSION; exit 3"))
    assert (result["failureCode"], result["exitCode"]) == ("agent_failed", 3)
    assert result["resultCommit"] is None


def test_a_command_that_does_not_exist_is_the_agents_failure(rig: Rig) -> None:
    result = rig.wait_over(rig.dispatch("no-such-command"))
    assert (result["failureCode"], result["exitCode"]) == ("agent_failed", 127)


@pytest.mark.requirement("B-52")
def test_the_agent_sees_a_clean_clone_of_exactly_one_commit(rig: Rig) -> None:
    script = "git status --porcelain; git rev-list --count HEAD; git remote; id -u; pwd"
    session_id = rig.dispatch("sh", "-c", script)
    rig.wait_over(session_id)
    assert rig.diagnostics(session_id)["logTail"].split() == ["1", "1000", "/workspace/tree"]


def test_a_commit_that_nobody_has_is_refused_by_name(rig: Rig) -> None:
    result = rig.wait_over(rig.dispatch("true", inputCommit="0" * 39 + "1"))
    assert result["failureCode"] == "workspace_invalid"


def test_the_operators_clone_is_only_read(rig: Rig) -> None:
    def picture() -> dict[str, tuple[int, bytes]]:
        files = (p for p in rig.repository.rglob("*") if p.is_file())
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    before = picture()
    rig.wait_over(rig.dispatch("sh", "-c", AGENT))
    assert picture() == before


@pytest.mark.requirement("B-21")
def test_capacity_is_whole_again(rig: Rig) -> None:
    sessions = [rig.dispatch("true") for _ in range(4)]
    for session_id in sessions:
        assert rig.wait_over(session_id)["outcome"] == "succeeded"
    ledgers = list((rig.state_root / "attempts").iterdir())
    assert ledgers == [], f"ledgers left: {ledgers}"
    assert not list((Path(rig.state_root) / "outbox").glob("*.json"))
