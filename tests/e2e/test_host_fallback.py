"""Attempts on the host of a real runner, whose sandbox is not fit (B-53)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import processes
from engines import Engine
from rig import TRUST_DOMAIN, Rig, git, running_rig, wait_for

pytestmark = [pytest.mark.requirement("B-53"), pytest.mark.engine("r26")]
"""One engine: no attempt of these touches it."""

NO_SUCH_IMAGE = f"tooling@sha256:{'0' * 64}"
WITHOUT_SANDBOX = {
    "FORGE_AGENT_TOOLING_IMAGE": NO_SUCH_IMAGE,
    "FORGE_ALLOW_HOST_EXECUTION": "true",
}
AGENT = "python3 -m unittest -q && python3 release.py"
PERSISTENT = """
trap '' TERM HUP INT
setsid sh -c 'setsid sh -c "while :; do sleep 1; done" "$0" & exit' "$0" &
env -i setsid sh -c 'while :; do sleep 1; done' "$0" &
echo up
while :; do sleep 1; done
"""


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    """A runner whose engine answers and whose tooling image is not there."""
    directory = tmp_path_factory.mktemp("rig")
    with running_rig(directory, engine, module_runner_id, **WITHOUT_SANDBOX) as rig:
        yield rig
    assert rig.left_on_host() == []


def permit(rig: Rig, *, enabled: bool = True, ahead: timedelta | None = timedelta(days=1)) -> None:
    """What the project's owner and the operator say."""
    policy: dict[str, Any] = {"policy": "sandbox_preferred", "trustDomainId": TRUST_DOMAIN}
    if ahead is not None:
        expires_at = (datetime.now(UTC) + ahead).isoformat(timespec="milliseconds")
        policy["hostFallback"] = {"reason": "the engine is replaced", "expiresAt": expires_at}
    rig.put("/projects/project/sandbox-policy", policy)
    rig.put(f"/runners/{rig.runner_id}/host-fallback", {"enabled": enabled})


def refusal(rig: Rig, session_id: str) -> str:
    found = wait_for("a refusal", lambda: rig.get(f"/sessions/{session_id}")["refusals"])
    return str(found[0]["reason"])


def persistent(rig: Rig, **more: Any) -> tuple[str, str]:
    """An attempt that does not want to end, and what its processes have in their command lines."""
    sign = uuid.uuid4().hex
    session_id = rig.dispatch("sh", "-c", PERSISTENT, sign, **more)
    wait_for("the agent", lambda: "up" in rig.diagnostics(session_id)["logTail"])
    assert len(processes.saying(sign)) >= 3
    return session_id, sign


def test_it_waits_for_both_sides_and_goes_through(rig: Rig) -> None:
    permit(rig, enabled=False, ahead=None)
    session_id = rig.dispatch("sh", "-c", AGENT)
    assert refusal(rig, session_id) == "host_fallback_denied"
    permit(rig, enabled=False)
    assert refusal(rig, session_id) == "host_fallback_denied"
    permit(rig)
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["exitCode"]) == ("succeeded", 0), result
    store = rig.state_root / "repositories" / "sample.git"
    commit = result["resultCommit"]
    assert git(store, "rev-parse", f"{commit}^@") == rig.commit
    assert git(store, "diff", "--name-only", rig.commit, commit) == "CHANGES.md\nVERSION"
    found = rig.diagnostics(session_id)
    (dispatch,) = found["session"]["attempts"][0]["dispatches"]
    assert dispatch["runtime"] == "host"
    warnings = [e["payload"] for e in found["timeline"] if e["type"] == "warning"]
    assert [w["code"] for w in warnings] == ["not_contained"]
    assert "the engine is replaced" in warnings[0]["detail"]
    (report,) = found["cleanupReports"]
    assert sorted((r["kind"], r["role"]) for r in report["resources"]) == [
        ("container", "host-agent"),
        ("container", "host-helper"),
        ("volume", "host-workspace"),
    ]
    assert rig.left_on_host() == []
    assert rig.resources() == []


def test_a_permission_that_has_ended_fails_closed(rig: Rig) -> None:
    permit(rig, ahead=timedelta(seconds=1))
    ends_at = datetime.now(UTC) + timedelta(seconds=1)
    wait_for("the permission to end", lambda: datetime.now(UTC) > ends_at)
    session_id = rig.dispatch("true")
    assert refusal(rig, session_id) == "host_fallback_denied"
    rig.post(f"/sessions/{session_id}/cancel")


def test_sandbox_required_never_falls_back(rig: Rig) -> None:
    permit(rig)
    session_id = rig.dispatch("true", policy="sandbox_required", approvedCommit=rig.commit)
    assert refusal(rig, session_id) == "policy_unsatisfied"
    rig.post(f"/sessions/{session_id}/cancel")


@pytest.mark.requirement("B-19")
def test_nothing_runs_where_the_operator_of_the_host_does_not_allow_it(
    engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    settings = {**WITHOUT_SANDBOX, "FORGE_ALLOW_HOST_EXECUTION": "false"}
    with running_rig(tmp_path, engine, runner_id, **settings) as rig:
        permit(rig)
        fallback = rig.dispatch("true")
        assert refusal(rig, fallback) == "runtime_unavailable"
        host = rig.dispatch("true", policy="host", projectId="another")
        assert refusal(rig, host) == "host_execution_denied"
        assert rig.left_on_host() == []


def test_the_policy_host_needs_no_fallback_and_no_image(rig: Rig) -> None:
    session_id = rig.dispatch("sh", "-c", "pwd; id -u", policy="host", projectId="another")
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    where, uid = rig.diagnostics(session_id)["logTail"].split()
    assert Path(where).is_relative_to(rig.state_root / "host")
    assert int(uid) == os.geteuid()


def test_the_environment_is_filtered_and_the_home_is_its_own(rig: Rig) -> None:
    session_id = rig.dispatch("env", policy="host", projectId="another")
    rig.wait_over(session_id)
    lines = rig.diagnostics(session_id)["logTail"].splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert not {name for name in names if name.startswith("FORGE_")} - {
        "FORGE_ATTEMPT_ID",
        "FORGE_BRANCH",
        "FORGE_HOST_RESOURCE",
    }
    assert f"HOME={rig.directory}" not in lines


@pytest.mark.requirement("B-04", "B-71")
@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({}, "cancelled"),
        ({"hardWallMs": 2_000}, "hard_wall_expired"),
        ({"idleMs": 2_000}, "idle_expired"),
    ],
)
def test_whatever_ends_it_ends_the_whole_tree(rig: Rig, limits: dict[str, int], code: str) -> None:
    session_id, sign = persistent(rig, policy="host", projectId="another", limits=limits)
    if not limits:
        rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    assert rig.wait_over(session_id)["failureCode"] == code
    assert processes.saying(sign) == []
    assert rig.left_on_host() == []


@pytest.mark.requirement("B-72")
def test_the_lease_when_renewals_stop_coming(rig: Rig) -> None:
    session_id, sign = persistent(rig, policy="host", projectId="another", leaseTtlMs=3_000)
    rig.hub.signal(signal.SIGSTOP)
    try:
        wait_for("the tree to go", lambda: not processes.saying(sign), 20)
    finally:
        rig.hub.signal(signal.SIGCONT)
    assert rig.wait_over(session_id)["failureCode"] == "lease_expired"


@pytest.mark.requirement("B-70")
def test_with_the_bridge_frozen_the_tree_ends_by_its_own_lease(rig: Rig) -> None:
    session_id, sign = persistent(rig, policy="host", projectId="another", leaseTtlMs=3_000)
    rig.bridge.signal(signal.SIGSTOP)
    try:
        wait_for("the tree to go", lambda: not processes.saying(sign), 20)
    finally:
        rig.bridge.signal(signal.SIGCONT)
    assert rig.wait_over(session_id)["failureCode"] == "lease_expired"
    assert rig.left_on_host() == []


@pytest.mark.requirement("B-82", "B-83")
def test_a_bridge_that_is_killed_takes_the_tree_along_and_its_next_life_the_rest(rig: Rig) -> None:
    session_id, sign = persistent(rig, policy="host", projectId="another")
    rig.bridge.kill()
    wait_for("the tree to go", lambda: not processes.saying(sign), 20)
    assert [name for name in rig.left_on_host() if name.startswith("forge-")]
    rig.start_bridge(WITHOUT_SANDBOX)
    assert rig.wait_over(session_id)["failureCode"] == "bridge_stopped"
    assert rig.left_on_host() == []
    (report,) = rig.diagnostics(session_id)["cleanupReports"]
    outcomes = {item["role"]: item["outcome"] for item in report["resources"]}
    assert outcomes == {"host-agent": "absent", "host-workspace": "removed"}


@pytest.mark.requirement("B-42", "B-82")
def test_what_outlives_bridge_and_supervisor_is_ended_by_a_reap(rig: Rig) -> None:
    """A supervisor that stands still dies of nothing; its tree is found by its mark."""
    session_id, sign = persistent(rig, policy="host", projectId="another")
    (supervisor,) = [
        pid
        for pid in rig.left_on_host()
        if pid.isdigit() and b"forge_supervisor.host_agent" in command_line(pid)
    ]
    os.kill(int(supervisor), signal.SIGSTOP)
    rig.bridge.kill()
    assert processes.saying(sign)
    program = [sys.executable, "-m", "forge_bridge", "sandbox", "reap", "--json"]
    environment = rig._environment(
        DOCKER_HOST=rig.engine.base_url,
        FORGE_RUNNER_ID=rig.runner_id,
        FORGE_TRUST_DOMAIN_ID=TRUST_DOMAIN,
        FORGE_SANDBOX_STATE_ROOT=str(rig.state_root),
    )
    planned = json.loads(subprocess.check_output([*program, "--dry-run"], env=environment))
    roles = ["host-agent", "host-workspace"]
    assert sorted(r["role"] for r in planned["resources"]) == roles
    assert all(r["listed"] for r in planned["resources"])
    assert processes.saying(sign)
    done = json.loads(subprocess.check_output(program, env=environment))
    assert sorted(r["role"] for r in done["resources"] if r["outcome"] == "removed") == roles
    assert processes.saying(sign) == []
    assert rig.left_on_host() == []
    rig.start_bridge(WITHOUT_SANDBOX)
    assert rig.wait_over(session_id)["failureCode"] == "bridge_stopped"


def command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_fit_sandbox_is_taken_though_both_have_agreed(
    engine: Engine, tmp_path: Path, runner_id: str
) -> None:
    with running_rig(tmp_path, engine, runner_id, FORGE_ALLOW_HOST_EXECUTION="true") as rig:
        permit(rig)
        session_id = rig.dispatch("pwd")
        assert rig.wait_over(session_id)["outcome"] == "succeeded"
        assert rig.diagnostics(session_id)["logTail"].strip() == "/workspace/tree"


def test_hostile_leftovers_go_and_nothing_else(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    script = """
cd "$TMPDIR"; ln -s "$1" link; mkfifo pipe; touch "$(printf 'n\\nl')"
mkdir -p a/b; chmod 000 a/b a .
cd "$HOME"; for i in $(seq 300); do mkdir d && cd d || exit 1; done
"""
    argv = ("sh", "-c", script, "sh", str(tmp_path))
    session_id = rig.dispatch(*argv, policy="host", projectId="another")
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    assert rig.left_on_host() == []
    assert (tmp_path / "kept").read_text() == "kept"
