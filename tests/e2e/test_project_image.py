"""Images of projects on real parts: built from the approved commit, run, and got rid of."""

from __future__ import annotations

import hashlib
import json
import os
import signal

import pytest
from project_parts import Images, commit, dispatch

import processes
from rig import Rig, git, wait_for

MARKER = "words-that-only-the-build-says"

pytestmark = pytest.mark.engine("d26", "r26")


@pytest.mark.requirement("B-27", "B-29", "B-52", "B-84")
def test_an_attempt_runs_in_the_image_of_its_project(rig: Rig, images: Images) -> None:
    approved = commit(rig, "COPY VERSION /of-the-project", "ENV LC_ALL=evil PATH=/evil")
    script = "cat /of-the-project; command -v python3 || echo no python; echo 2 > VERSION; id -u"
    session_id = dispatch(rig, approved, "sh", "-c", script)
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("succeeded", None), result
    version = git(rig.repository, "show", f"{approved}:VERSION")
    assert rig.diagnostics(session_id)["logTail"].split("\n") == [version, "no python", "1000", ""]
    store = rig.state_root / "repositories" / "sample.git"
    assert git(store, "diff", "--name-only", approved, result["resultCommit"]) == "VERSION"
    events = rig.told(session_id)
    assert {"build.started", "build.finished"} < events.keys()
    resolved = events["image.resolved"]
    assert resolved["cache"] == "miss"
    assert [name for name in images.names() if resolved["imageKey"] in name] == [
        next(name for name in images.names() if name.endswith(f":{resolved['imageKey']}"))
    ]


@pytest.mark.requirement("B-27")
def test_the_same_key_needs_no_build_and_survives_the_bridge(rig: Rig) -> None:
    approved = commit(rig, "RUN echo once > /once")
    first = dispatch(rig, approved, "cat", "/once")
    result = rig.wait_over(first)
    assert result["outcome"] == "succeeded", result
    rig.bridge.stop()
    rig.start_bridge()
    again = rig.add_commit({"notes": "nothing that the build takes"})
    second = dispatch(rig, again, "cat", "/once")
    result = rig.wait_over(second)
    assert result["outcome"] == "succeeded", result
    assert "build.started" not in rig.told(second)
    one, other = (rig.told(session)["image.resolved"] for session in (first, second))
    assert (other["cache"], other["digest"]) == ("hit", one["digest"])


@pytest.mark.requirement("B-29")
@pytest.mark.parametrize(
    ("step", "word"),
    [
        ("RUN touch /etc/ld.so.preload", "/etc/ld.so.preload"),
        ("RUN mkdir -p /.forge/tooling", "/.forge/tooling"),
    ],
)
def test_an_image_that_would_reach_pid_1_is_refused(
    rig: Rig, images: Images, step: str, word: str
) -> None:
    before = images.names()
    session_id = dispatch(rig, commit(rig, step), "true")
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "image_policy_denied"
    assert word in result["summary"]
    assert rig.told(session_id)["build.failed"]["stage"] == "contents"
    assert images.names() == before


@pytest.mark.requirement("B-29", "B-52")
def test_a_pinned_reference_is_an_image_too(rig: Rig) -> None:
    contract = f"version: 1\nimage:\n  reference: {rig.engine.busybox_image}\n"
    approved = rig.add_commit({".forge/forge.sandbox.yml": contract})
    session_id = dispatch(rig, approved, "sh", "-c", "command -v python3 || echo no python")
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    assert "no python" in rig.diagnostics(session_id)["logTail"]


@pytest.mark.requirement("B-41")
def test_the_contract_shapes_the_container(rig: Rig) -> None:
    wishes = "tmp:\n  executable: true\nenvironment:\n  GREETING: hello\n"
    approved = commit(rig, wishes=wishes)
    script = 'cp "$(readlink -f /proc/$$/exe)" /tmp/busybox && /tmp/busybox echo "$GREETING"'
    session_id = dispatch(rig, approved, "sh", "-c", script)
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    assert rig.diagnostics(session_id)["logTail"] == "hello\n"


@pytest.mark.requirement("B-90")
def test_a_failed_build_leaves_its_log_and_tells_nothing_of_it(rig: Rig, images: Images) -> None:
    before = images.names()
    loud = f"for n in $(seq 1000); do echo $n {MARKER}; done; echo the end {MARKER} >&2; false"
    session_id = dispatch(rig, commit(rig, f"RUN {loud}"), "true")
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "image_build_failed"
    failed = rig.told(session_id)["build.failed"]
    key = result["summary"].partition("build-logs/")[2].partition("/")[0]
    log = rig.state_root / "build-logs" / key / "project.log"
    content = log.read_bytes()
    assert f"1 {MARKER}".encode() in content
    assert f"the end {MARKER}".encode() in content
    assert log.stat().st_mode & 0o777 == 0o600
    assert failed == {
        "stage": "project",
        "logDigest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "logBytes": len(content),
        "truncated": False,
    }
    assert MARKER not in json.dumps(rig.diagnostics(session_id))
    assert MARKER not in rig.bridge.log.read_text()
    assert images.names() == before


@pytest.mark.requirement("B-72")
def test_a_cancel_ends_the_build_at_once(rig: Rig, images: Images) -> None:
    marker, before = f"600.{os.getpid()}1", images.names()
    session_id = dispatch(rig, commit(rig, f"RUN sleep {marker}"), "true")
    wait_for("the step to run", lambda: processes.with_argument(marker))
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    assert rig.wait_over(session_id, 20)["outcome"] == "cancelled"
    wait_for("the step to end", lambda: not processes.with_argument(marker), 15)
    assert images.names() == before
    assert "build.failed" not in rig.told(session_id)


@pytest.mark.requirement("B-27")
def test_attempts_that_want_the_same_image_share_one_build(rig: Rig) -> None:
    rig.bridge.stop()
    rig.start_bridge(FORGE_MAX_CONCURRENT_SANDBOXES="2", FORGE_MAX_CONCURRENT_SANDBOX_BUILDS="2")
    approved = commit(rig, "RUN sleep 2 && echo shared > /shared")
    sessions = [dispatch(rig, approved, "cat", "/shared") for _ in range(2)]
    for session_id in sessions:
        assert rig.wait_over(session_id)["outcome"] == "succeeded"
    events = [rig.told(session_id) for session_id in sessions]
    assert sorted(one["image.resolved"]["cache"] for one in events) == ["hit", "miss"]
    assert sum("build.started" in one for one in events) == 1
    when = [
        {event["type"]: event["at"] for event in rig.diagnostics(session_id)["timeline"]}
        for session_id in sessions
    ]
    finished = next(one["build.finished"] for one in when if "build.finished" in one)
    assert all(one["offer.reserved"] < finished for one in when)


@pytest.mark.requirement("B-52")
def test_only_the_approved_commit_has_a_say(rig: Rig) -> None:
    approved = commit(rig, "RUN echo approved > /which")
    later = commit(rig, "RUN echo later > /which")
    (rig.repository / ".forge" / "Dockerfile").write_text("FROM evil\n")
    try:
        session_id = rig.dispatch("cat", "/which", inputCommit=later, approvedCommit=approved)
        assert rig.wait_over(session_id)["outcome"] == "succeeded"
        assert rig.diagnostics(session_id)["logTail"] == "approved\n"
    finally:
        git(rig.repository, "checkout", "--quiet", "--", ".forge")


@pytest.mark.requirement("B-80")
def test_a_bridge_that_is_killed_in_a_build_leaves_nothing(rig: Rig, images: Images) -> None:
    marker, before = f"600.{os.getpid()}2", images.names()
    session_id = dispatch(rig, commit(rig, f"RUN sleep {marker}"), "true")
    wait_for("the step to run", lambda: processes.with_argument(marker))
    rig.bridge.signal(signal.SIGKILL)
    rig.bridge.process.wait(30)
    rig.start_bridge()
    assert rig.wait_over(session_id)["failureCode"] == "bridge_stopped"
    wait_for("the step to end", lambda: not processes.with_argument(marker), 15)
    assert images.names() == before
    assert list((rig.state_root / "build-work").glob("builder/build-*")) == []


@pytest.mark.requirement("B-27", "B-34", "B-89")
def test_images_go_under_disk_pressure_and_only_then(rig: Rig, images: Images) -> None:
    approved = commit(rig, "RUN echo to-be-collected > /file")
    session_id = dispatch(rig, approved, "true")
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    key = rig.told(session_id)["image.resolved"]["imageKey"]
    expired = {
        "FORGE_SANDBOX_IMAGE_RETENTION_COUNT": "0",
        "FORGE_SANDBOX_IMAGE_RETENTION_TTL_MS": "0",
    }
    rig.bridge.stop()
    rig.start_bridge(expired)
    assert rig.wait_over(dispatch(rig, approved, "true"))["outcome"] == "succeeded"
    assert any(key in name for name in images.names())
    rig.bridge.stop()
    rig.start_bridge(expired, FORGE_MINIMUM_WORKSPACE_BYTES="1000TiB")
    records = rig.state_root / "images"
    wait_for("the images to go", lambda: not images.names() and not [*records.glob("*.json")], 30)
    rig.bridge.stop()
    rig.start_bridge()
