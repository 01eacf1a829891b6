"""Images of projects from a builder of the runner's own: built, bounded, kept, pruned and gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from project_parts import Images, commit, dispatch, rig_with_builder

import processes
from engines import Engine, extra_image
from rig import Rig, wait_for

MIB = 2**20
MEMORY_MIB = 512
PIDS = 220
NOFILE = 1_024
CPU_QUOTA_US = 150_000
CACHE_MAX_MIB = 64
CACHE_RESERVED_MIB = 8
BIG_BYTES = 24 * MIB
LIMITS = {
    "FORGE_SANDBOX_BUILD_MEMORY": f"{MEMORY_MIB}MiB",
    "FORGE_SANDBOX_BUILD_CPU_QUOTA": str(CPU_QUOTA_US),
    "FORGE_SANDBOX_BUILD_NOFILE": str(NOFILE),
    "FORGE_SANDBOX_BUILDER_PIDS_LIMIT": str(PIDS),
    "FORGE_SANDBOX_BUILDKIT_CACHE_MAX": f"{CACHE_MAX_MIB}MiB",
    "FORGE_SANDBOX_BUILDKIT_CACHE_RESERVED": f"{CACHE_RESERVED_MIB}MiB",
}
NO_SPACE_IS_ENOUGH = {"FORGE_MINIMUM_WORKSPACE_BYTES": "1000TiB"}

pytestmark = [pytest.mark.slow, pytest.mark.engine("d26", "r26"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def settings(engine: Engine) -> dict[str, str]:
    """Of every life of the bridge."""
    return {"FORGE_SANDBOX_BUILDKIT_IMAGE": extra_image(engine, "buildkit"), **LIMITS}


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("rig")
    with rig_with_builder(directory, engine, module_runner_id, **LIMITS) as rig:
        yield rig


def builders(rig: Rig) -> list[str]:
    return [name for name in rig.resources() if name.startswith("forge-builder-")]


def inspect(rig: Rig) -> dict[str, Any]:
    """The one builder that there is, as its engine sees it."""
    (name,) = builders(rig)
    found: dict[str, Any] = rig.engine.api.get(f"/containers/{name}/json")
    return found


def inside(rig: Rig, *argv: str) -> str:
    """What a program in the builder prints, by the Docker CLI and not by our door."""
    (name,) = builders(rig)
    environment = {**os.environ, "DOCKER_HOST": rig.engine.base_url}
    command = [rig.engine.docker_executable, "exec", name, *argv]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def cached_bytes(rig: Rig) -> int:
    records = json.loads(inside(rig, "buildctl", "du", "--format={{json .}}")) or ()
    return sum(int(record.get("size", 0)) for record in records)


def blockers(rig: Rig) -> set[str]:
    runner = rig.get(f"/runners/{rig.runner_id}")
    return set(runner["capabilities"]["sandboxRequired"]["blockers"])


def succeed(rig: Rig, approved: str, *argv: str) -> dict[str, dict[str, Any]]:
    """What was told of a session that went well."""
    session_id = dispatch(rig, approved, *argv)
    result = rig.wait_over(session_id, 180)
    assert (result["outcome"], result["failureCode"]) == ("succeeded", None), result
    told: dict[str, dict[str, Any]] = rig.told(session_id)
    return told


@pytest.mark.requirement("B-33", "B-51")
def test_its_limits_are_read_back_before_they_count(rig: Rig) -> None:
    host = inspect(rig)["HostConfig"]
    asked = (host["Memory"], host["MemorySwap"], host["PidsLimit"], host["CpuQuota"])
    assert asked == (MEMORY_MIB * MIB, MEMORY_MIB * MIB, PIDS, CPU_QUOTA_US)
    assert host["NetworkMode"] == "none"
    assert f" {NOFILE} " in next(
        line
        for line in inside(rig, "cat", "/proc/1/limits").splitlines()
        if line.startswith("Max open files")
    )
    # A rootless engine without cgroup delegation echoes the others and keeps none.
    assert ("builder" not in blockers(rig)) is rig.engine.limits_enforced


@pytest.mark.requirement("B-27", "B-32", "B-52")
def test_an_attempt_runs_in_what_it_built_and_the_next_one_needs_no_build(rig: Rig) -> None:
    steps = ("RUN ip -o link | grep -c . > /links; ulimit -n > /nofile", "COPY VERSION /version")
    wishes = "environment:\n  GREETING: hello\n"
    approved = commit(rig, *steps, wishes=wishes)
    script = 'cat /links /nofile; cmp /version VERSION && echo "$GREETING"'
    first = dispatch(rig, approved, "sh", "-c", script)
    result = rig.wait_over(first, 180)
    assert (result["outcome"], result["failureCode"]) == ("succeeded", None), result
    assert rig.diagnostics(first)["logTail"].split() == ["1", str(NOFILE), "hello"]
    told = rig.told(first)
    assert {"build.started", "build.finished"} < told.keys()
    resolved = told["image.resolved"]
    assert resolved["cache"] == "miss"
    life = inspect(rig)["State"]["StartedAt"]
    warm = succeed(rig, approved, "sh", "-c", script)
    assert "build.started" not in warm
    assert warm["image.resolved"] == {**resolved, "cache": "hit"}
    assert inspect(rig)["State"]["StartedAt"] == life


@pytest.mark.requirement("B-27", "B-34")
def test_it_goes_with_its_bridge_and_what_it_built_stays(
    rig: Rig, settings: dict[str, str]
) -> None:
    approved = commit(rig, "RUN head -c 16 /dev/urandom > /once")
    before = succeed(rig, approved, "cat", "/once")["image.resolved"]
    (old,) = builders(rig)
    assert rig.bridge.stop() == 0
    left = rig.resources()
    assert [name.rpartition("-")[0] for name in left] == ["forge-build-cache"]
    rig.start_bridge(settings)
    assert succeed(rig, approved, "cat", "/once")["image.resolved"] == {**before, "cache": "hit"}
    assert old not in rig.resources()
    assert set(left) < set(rig.resources())  # the same cache


@pytest.mark.requirement("B-82", "B-33")
def test_that_of_a_killed_bridge_goes_with_the_next_one_and_its_build_at_once(
    rig: Rig, settings: dict[str, str], engine: Engine, module_runner_id: str
) -> None:
    images, marker = Images(engine, module_runner_id), f"600.{os.getpid()}3"
    before = images.names()
    session_id = dispatch(rig, commit(rig, f"RUN sleep {marker}"), "true")
    wait_for("the step to run", lambda: processes.with_argument(marker))
    (old,) = builders(rig)
    rig.bridge.kill()
    wait_for("the step to end", lambda: not processes.with_argument(marker), 20)
    assert builders(rig) == [old]
    rig.start_bridge(settings)
    assert rig.wait_over(session_id)["failureCode"] == "bridge_stopped"
    wait_for("the builder to go", lambda: old not in rig.resources())
    succeed(rig, commit(rig, "RUN true"))
    assert old not in builders(rig)
    assert len(builders(rig)) == 1
    assert set(images.names()) >= set(before)


@pytest.mark.requirement("B-82", "B-88")
def test_that_of_a_killed_bridge_goes_without_a_next_one_too(
    rig: Rig, settings: dict[str, str]
) -> None:
    rig.bridge.kill()
    assert len(builders(rig)) == 1
    program = [sys.executable, "-m", "forge_bridge", "sandbox", "reap"]
    environment = rig._environment(
        DOCKER_HOST=rig.engine.base_url,
        FORGE_RUNNER_ID=rig.runner_id,
        FORGE_SANDBOX_STATE_ROOT=str(rig.state_root),
    )
    subprocess.run(program, env=environment, check=True, capture_output=True)
    assert [name.rpartition("-")[0] for name in rig.resources()] == ["forge-build-cache"]
    rig.start_bridge(settings)


@pytest.mark.requirement("B-34", "B-89")
def test_pressure_takes_its_cache_down_to_what_is_reserved(
    rig: Rig, settings: dict[str, str]
) -> None:
    approved = commit(rig, f"RUN head -c {BIG_BYTES} /dev/urandom > /big")
    succeed(rig, approved)
    assert cached_bytes(rig) > BIG_BYTES
    rig.bridge.stop()
    rig.start_bridge({**settings, **NO_SPACE_IS_ENOUGH})
    wait_for("the cache to go", lambda: cached_bytes(rig) <= CACHE_RESERVED_MIB * MIB, 60)
    rig.bridge.stop()
    rig.start_bridge(settings)
    # Its image is another's affair: it has not expired, and is still there.
    assert succeed(rig, approved)["image.resolved"]["cache"] == "hit"
    fresh = commit(rig, "RUN echo after > /after")
    assert succeed(rig, fresh, "cat", "/after")["image.resolved"]["cache"] == "miss"
