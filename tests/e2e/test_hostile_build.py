"""Repositories and images that want out of their build, or between PID 1 and its files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
from project_parts import Images, commit, dispatch

from forge_core.sealed import encode, seal, unseal
from rig import API_TOKEN, RUNNER_TOKEN, Rig, git, wait_for

MARKER = "words-that-only-the-build-says"
KEPT_BYTES = 1 << 20
MIB = 1 << 20

pytestmark = [pytest.mark.engine("d26", "r26"), pytest.mark.timeout(180)]


def log_of(rig: Rig, result: Mapping[str, Any]) -> bytes:
    """The log that the end of a failed build names."""
    name = str(result["summary"]).rpartition(" in ")[2]
    path = rig.state_root / name
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_bytes()


def require_untold(rig: Rig, session_id: str, *words: str) -> None:
    """Nobody has heard these words: neither hub nor log of the bridge (B-90)."""
    heard = json.dumps(rig.diagnostics(session_id)) + rig.bridge.log.read_text()
    assert [word for word in words if word in heard] == []


# -- what an image is -----------------------------------------------------------------------------


def rooted(*links: tuple[str, str]) -> tuple[str, ...]:
    """An image from scratch with these symbolic links."""
    make = "mkdir /out && for d in /bin /lib /lib64 /usr; do [ ! -e $d ] || cp -a $d /out; done"
    link = "".join(f" && ln -s {target} /out{name}" for name, target in links)
    return (f"RUN {make}{link}", "FROM scratch", "COPY --from=0 /out /")


@pytest.mark.requirement("B-29", "B-84")
@pytest.mark.parametrize(
    ("steps", "word"),
    [
        (rooted(("/.forge", "/workspace/tree")), "/.forge is no directory"),
        (rooted(("/workspace", "/.forge/tooling")), "/workspace is no directory"),
        (rooted(("/tmp", "/.forge")), "/tmp is no directory"),
        (rooted(("/run", "/etc")), "/run is no directory"),
        (("RUN touch /.forge",), "/.forge is no directory"),
        (("RUN ln -s /nowhere /etc/ld.so.preload",), "it has /etc/ld.so.preload"),
    ],
)
def test_an_image_that_leads_mounts_elsewhere_is_refused(
    rig: Rig, images: Images, steps: tuple[str, ...], word: str
) -> None:
    before = images.all()
    session_id = dispatch(rig, commit(rig, *steps), "true")
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "image_policy_denied"
    assert word in result["summary"]
    assert rig.told(session_id)["build.failed"]["stage"] == "contents"
    assert images.all() == before


@pytest.mark.requirement("B-84")
def test_directories_that_docker_makes_cannot_be_links(rig: Rig) -> None:
    """A preload file of the repository would be PID 1's, if the engine followed such a link."""
    links = (("/etc", "/workspace/tree"), ("/proc", "/tmp"), ("/sys", "/tmp"), ("/dev", "/tmp"))
    preload = {"ld.so.preload": "/workspace/tree/evil.so\n"}
    approved = commit(rig, *rooted(*links), files=preload)
    script = "for d in /etc /proc /sys /dev; do [ -h $d ] && echo $d; done; cat /etc/ld.so.preload"
    session_id = dispatch(rig, approved, "sh", "-c", f"{script}; true")
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded", (result, rig.diagnostics(session_id))
    assert rig.diagnostics(session_id)["logTail"].count("\n") == 1
    assert "can't open '/etc/ld.so.preload'" in rig.diagnostics(session_id)["logTail"]


@pytest.mark.requirement("B-84")
def test_what_an_image_says_about_its_containers_has_no_say(rig: Rig) -> None:
    approved = commit(
        rig,
        "RUN mkdir /suid && cp /bin/busybox /suid/id && chmod 6755 /suid/id",
        "ENV " + " ".join(f"VARIABLE_{n}={'x' * 1000}" for n in range(60)),
        "ENV PATH=/evil PYTHONPATH=/evil LD_PRELOAD=/evil.so GCONV_PATH=/evil",
        'ENTRYPOINT ["/nope"]',
        'CMD ["/nope"]',
        "HEALTHCHECK --interval=1s CMD false",
        "STOPSIGNAL SIGSTOP",
        "EXPOSE 80/tcp",
        "WORKDIR /nowhere",
        "USER 0:0",
    )
    script = "id -u; /suid/id -u; grep NoNewPrivs /proc/self/status; pwd; env"
    session_id = dispatch(rig, approved, "sh", "-c", script)
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded", result
    said = rig.diagnostics(session_id)["logTail"].split("\n")
    assert said[:4] == ["1000", "1000", "NoNewPrivs:\t1", "/workspace/tree"]
    assert [line for line in said[4:] if "evil" in line or "VARIABLE" in line] == []


@pytest.mark.requirement("B-27", "B-89")
def test_names_that_others_move_decide_nothing(rig: Rig, images: Images) -> None:
    """Whoever may speak to the engine may tag what they like; what runs is what was proven."""
    approved = commit(rig, "RUN echo proven > /which")
    first = dispatch(rig, approved, "cat", "/which")
    assert rig.wait_over(first)["outcome"] == "succeeded"
    resolved = rig.told(first)["image.resolved"]
    (name,) = images.all()[resolved["digest"]]
    images.tag(rig.engine.busybox_image, name)
    again = dispatch(rig, approved, "cat", "/which")
    assert rig.wait_over(again)["outcome"] == "succeeded"
    assert rig.told(again)["image.resolved"] == {**resolved, "cache": "hit"}
    assert rig.diagnostics(again)["logTail"] == "proven\n"
    images.remove(resolved["digest"])
    built = dispatch(rig, approved, "cat", "/which")
    assert rig.wait_over(built)["outcome"] == "succeeded"
    assert rig.told(built)["image.resolved"]["cache"] == "miss"
    assert rig.diagnostics(built)["logTail"] == "proven\n"


@pytest.mark.requirement("B-27", "B-30")
def test_a_record_that_names_another_image_is_not_believed(rig: Rig, images: Images) -> None:
    """Whoever has the state root can seal a record; what runs must carry the labels of its key."""
    approved = commit(rig, "RUN echo proven > /which && ls /etc > /more")
    first = dispatch(rig, approved, "cat", "/which")
    assert rig.wait_over(first)["outcome"] == "succeeded"
    resolved = rig.told(first)["image.resolved"]
    record = rig.state_root / "images" / f"{resolved['imageKey']}.json"
    other = rig.engine.api.get(f"/images/{rig.engine.tooling_image}/json")["Id"]
    rig.bridge.stop()
    record.write_bytes(seal(encode({**unseal(record.read_bytes()), "imageId": other})))
    log = rig.state_root / "build-logs" / resolved["imageKey"]
    log.symlink_to(rig.directory)
    rig.start_bridge()
    again = dispatch(rig, approved, "cat", "/which")
    assert rig.wait_over(again)["outcome"] == "succeeded"
    assert rig.diagnostics(again)["logTail"] == "proven\n"
    assert rig.told(again)["image.resolved"]["cache"] == "miss"
    assert other not in images.all()
    assert rig.engine.api.call("GET", f"/images/{other}/json")[0] == 200


@pytest.mark.requirement("B-89")
def test_what_others_made_of_an_image_stays_under_any_pressure(rig: Rig, images: Images) -> None:
    approved = commit(rig, "RUN echo ours > /which && ls /usr > /more")
    session_id = dispatch(rig, approved, "true")
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    image = rig.told(session_id)["image.resolved"]["digest"]
    tagged, child = (f"forge-test-{word}-{os.getpid()}:1" for word in ("tagged", "child"))
    images.tag(image, tagged)
    theirs = {images.commit(image, child), images.commit(image, "")}
    rig.bridge.stop()
    expired = {
        "FORGE_SANDBOX_IMAGE_RETENTION_COUNT": "0",
        "FORGE_SANDBOX_IMAGE_RETENTION_TTL_MS": "0",
    }
    try:
        rig.start_bridge(expired, FORGE_MINIMUM_WORKSPACE_BYTES="1000TiB")
        records = rig.state_root / "images"
        wait_for("the images to go", lambda: not [*records.glob("*.json")], 60)
        assert images.all() == {image: [tagged], **{one: images.all()[one] for one in theirs}}
    finally:
        rig.bridge.stop()
        rig.start_bridge()
        for one in (tagged, *theirs):
            images.remove(one)


# -- what a build does ----------------------------------------------------------------------------


@pytest.mark.requirement("B-90")
def test_200_mb_of_output_take_no_memory_and_little_disk(rig: Rig, images: Images) -> None:
    before, peak_kib = images.all(), rig.bridge.memory_peak_kib()
    # One line: the engine's own limit counts lines.
    loud = f"echo {MARKER}; tr '\\0' x < /dev/zero | head -c 200000000; echo {MARKER}; exit 3"
    session_id = dispatch(rig, commit(rig, f"RUN {loud}"), "true")
    result = rig.wait_over(session_id, 150)
    assert result["failureCode"] == "image_build_failed"
    log, failed = log_of(rig, result), rig.told(session_id)["build.failed"]
    assert MARKER.encode() in log
    assert len(log) <= KEPT_BYTES + 100
    # BuildKit leaves out most of it by itself, at so much a second.
    assert failed["logBytes"] == len(log)
    assert failed["truncated"] is (b" bytes left out]" in log)
    assert rig.bridge.memory_peak_kib() - peak_kib < 48 * 1024
    require_untold(rig, session_id, MARKER)
    assert images.all() == before


@pytest.mark.requirement("B-90")
@pytest.mark.parametrize(
    "step",
    [
        f"RUN echo 'ERROR: {MARKER}: no space left on device'; exit 28",
        f"RUN printf '\\rERROR: cannot connect to the docker daemon {MARKER}\\r\\n'; exit 1",
        f'COPY ["{MARKER} no space left on device", "/"]',
        f'COPY ["{MARKER} error during connect", "/"]',
    ],
)
def test_a_build_cannot_choose_how_its_end_is_called(rig: Rig, step: str) -> None:
    session_id = dispatch(rig, commit(rig, step), "true")
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "image_build_failed"
    assert result["summary"].startswith("cannot build the image of the project: the build failed;")
    assert MARKER.encode() in log_of(rig, result)
    require_untold(rig, session_id, MARKER)


@pytest.mark.requirement("B-29", "B-90")
def test_a_base_that_is_not_to_be_had_is_named_and_its_registry_not_quoted(rig: Rig) -> None:
    base = f"127.0.0.1:9/no/such@sha256:{'1' * 64}"
    session_id = dispatch(rig, commit(rig, f"FROM {base}"), "true")
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "image_build_failed"
    assert f"the base image {base} cannot be fetched" in result["summary"]
    assert b"connection refused" in log_of(rig, result)
    # A repository could ask for any address, and read here who listens there.
    require_untold(rig, session_id, "connection refused")


@pytest.mark.requirement("B-32", "B-90")
def test_a_build_sees_no_secret_and_no_way_out(rig: Rig) -> None:
    look = "cat /proc/*/environ /proc/*/cmdline /proc/mounts; env; ls -laR /run /root"
    approved = commit(rig, f"RUN ({look}) > /seen 2>&1; cat /proc/net/dev > /net; true")
    session_id = dispatch(rig, approved, "cat", "/seen", "/net", env={"OF_THE_AGENT": "canary-1"})
    assert rig.wait_over(session_id)["outcome"] == "succeeded"
    seen = rig.diagnostics(session_id)["logTail"]
    words = ("FORGE_", RUNNER_TOKEN, API_TOKEN, "canary-1", "docker.sock", str(rig.directory))
    assert [word for word in words if word in seen] == []
    assert [line.split(":")[0].strip() for line in seen.split("\n") if ":" in line][-1] == "lo"


@pytest.mark.requirement("B-25", "B-33")
def test_a_build_that_fills_the_disk_is_ended_before_it_is_full(rig: Rig, images: Images) -> None:
    before = images.all()
    free = shutil.disk_usage(rig.state_root).free
    rig.bridge.stop()
    rig.start_bridge(FORGE_MINIMUM_WORKSPACE_BYTES=str(free - 600 * MIB))
    try:
        step = "RUN dd if=/dev/zero of=/file bs=1M count=4096"
        session_id = dispatch(rig, commit(rig, step), "true")
        result = rig.wait_over(session_id, 120)
        assert result["failureCode"] == "disk_full"
        assert "must remain" in result["summary"]
        assert images.all() == before
    finally:
        rig.bridge.stop()
        rig.start_bridge()
    # What the step had written is given back.
    wait_for("the space", lambda: shutil.disk_usage(rig.state_root).free > free - 300 * MIB)


# -- what a repository is -------------------------------------------------------------------------


@pytest.mark.requirement("B-52")
def test_nothing_beside_the_approved_commit_has_a_say(rig: Rig) -> None:
    approved = commit(rig, "COPY which /which", files={"which": "approved\n"})
    evil = commit(rig, "RUN echo evil > /which", files={"which": "evil\n"})
    clone = rig.repository
    git(clone, "config", "filter.evil.smudge", "echo evil")
    git(clone, "config", "filter.evil.clean", "echo evil")
    (clone / ".git" / "info" / "attributes").write_text("* filter=evil ident\n")
    git(clone, "replace", approved, evil)
    for name in ("which", ".forge/Dockerfile", ".forge/forge.sandbox.yml"):
        (clone / name).write_text("evil\n")
    try:
        session_id = dispatch(rig, approved, "sh", "-c", "cat /which which")
        result = rig.wait_over(session_id)
        assert result["outcome"] == "succeeded", result
        assert rig.diagnostics(session_id)["logTail"] == "approved\napproved\n"
    finally:
        git(clone, "replace", "--delete", approved)
        (clone / ".git" / "info" / "attributes").unlink()
        git(clone, "checkout", "--quiet", "--force", "HEAD")


@pytest.mark.requirement("B-31", "B-52")
@pytest.mark.parametrize(
    ("dockerfile", "line"),
    [
        ("# syntax=evil/frontend@sha256:{digest}\nFROM {busybox}\n", "line 1, # syntax"),
        ("ARG BASE=busybox\nFROM ${{BASE:-{busybox}}}\n", "line 2, FROM"),
        ("FROM {busybox}\nCOPY --from=busybox:latest /bin /b\n", "line 2, COPY"),
        ("FROM {busybox}\nADD http://127.0.0.1/x /x\n", "line 2, ADD"),
        ("FROM {busybox}\nRUN --mount=type=secret,id=x true\n", "line 2, RUN"),
        ("FROM {busybox}\nRUN <<A cat\nA\nFROM busybox\n", "line 4, FROM"),
        ("FROM {busybox}\nRUN true \u2028FROM busybox\n", "line 2"),
    ],
)
def test_a_dockerfile_that_would_build_otherwise_than_it_reads_is_not_built(
    rig: Rig, dockerfile: str, line: str
) -> None:
    text = dockerfile.format(busybox=rig.engine.busybox_image, digest="2" * 64)
    approved = commit(rig, files={".forge/Dockerfile": text})
    session_id = dispatch(rig, approved, "true")
    result = rig.wait_over(session_id)
    assert result["failureCode"] == "image_policy_denied"
    assert line in result["summary"]
    assert "build.started" not in rig.told(session_id)


@pytest.mark.requirement("B-52")
def test_ten_thousand_files_are_sent_and_too_many_bytes_are_not(rig: Rig) -> None:
    files = {f"many/{n % 100}/{n}": f"{n}\n" for n in range(10_000)}
    approved = commit(rig, "COPY many /many", "RUN find /many -type f | wc -l > /n", files=files)
    session_id = dispatch(rig, approved, "cat", "/n")
    result = rig.wait_over(session_id, 120)
    assert result["outcome"] == "succeeded", result
    assert rig.diagnostics(session_id)["logTail"].strip() == "10000"
    git(rig.repository, "rm", "-r", "--quiet", "many")
