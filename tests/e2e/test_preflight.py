"""Preflight on real engines: what it finds is what is so, and it leaves nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engines import Engine as BedEngine
from forge_bridge.doctor import Preflight, PreflightSettings, Verdict, run_checks
from forge_core.labels import PREFLIGHT, Owner, runner_filter
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import Hardening
from forge_core.wire.codes import PublicationMode, Runtime
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

SETTINGS = PreflightSettings(
    owner=Owner.of_runner(PREFLIGHT, "runner", "instance", "domain"),
    tooling_image=None,
    hardening=Hardening(),
    capacity=ResourceCapacity(1),
)
GENEROUS_S = 10
REFUSES_UNSHARE = json.dumps(
    {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}],
    }
)
UNPROVEN = {"build_egress", "builder", "image_policy", "signatures"}
APPARMOR = Path("/sys/module/apparmor/parameters/enabled")


@pytest.fixture
async def door(engine: BedEngine) -> AsyncIterator[DockerEngine]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    async with DockerEngine.connect(endpoint) as door:
        yield door


@pytest.fixture
def settings(engine: BedEngine, runner_id: str) -> PreflightSettings:
    owner = replace(SETTINGS.owner, runner_id=runner_id)
    return replace(SETTINGS, owner=owner, tooling_image=engine.tooling_image)


def verdicts(preflight: Preflight) -> dict[str, Verdict]:
    found = {result.id: result.verdict for result in preflight.results}
    assert len(found) == len(preflight.results), "an id was used twice"
    return found


@pytest.mark.requirement("B-05", "B-06", "B-51")
@pytest.mark.engine("d26", "d20", "r26", "r20")
async def test_every_finding_is_what_is_so(
    engine: BedEngine, door: DockerEngine, settings: PreflightSettings
) -> None:
    began = time.monotonic()
    preflight = await run_checks(door, settings)
    assert time.monotonic() - began < GENEROUS_S
    found = verdicts(preflight)
    hopeless = [one for one in preflight.results if one.verdict is Verdict.BLOCK_ALL]
    assert hopeless == []
    expected = {*UNPROVEN, "disk_quota", "lsm", "publication_mode", "seccomp"}
    expected |= set() if engine.rootless else {"rootless"}
    expected |= set() if engine.limits_enforced else {"limits"}
    readiness = preflight.capabilities.sandbox_required
    assert set(readiness.blockers) == expected
    assert not readiness.ready
    assert preflight.exit_code == 1
    assert preflight.capabilities.runtimes == (Runtime.DOCKER,)
    assert (found["api_version"] is Verdict.WARN) == engine.version.startswith("20.")
    left = await door.list_resources(runner_filter(settings.owner.runner_id))
    assert left == []


@pytest.mark.requirement("B-51", "B-26", "B-37")
@pytest.mark.engine("d26")
async def test_what_the_operator_does_ends_its_blocker(
    door: DockerEngine, settings: PreflightSettings
) -> None:
    better = replace(
        settings,
        hardening=Hardening(REFUSES_UNSHARE),
        dedicated_disk=True,
        publication_mode=PublicationMode.BRIDGE_PUSH,
        proofs=dict.fromkeys({*UNPROVEN, "publication_mode"}, "seen"),
    )
    preflight = await run_checks(door, better)
    assert set(preflight.capabilities.sandbox_required.blockers) == {"rootless", "lsm"}
    assert preflight.capabilities.seccomp_digest == better.hardening.seccomp_digest
    assert preflight.capabilities.signature_verification
    assert preflight.capabilities.image_policy_enforced
    assert preflight.capabilities.dedicated_disk


@pytest.mark.requirement("B-35")
@pytest.mark.engine("d26", "r26")
@pytest.mark.parametrize("option", ["label=type:no_such_t", "apparmor=no-such-profile"])
async def test_an_lsm_option_that_the_engine_merely_accepts_is_no_evidence(
    door: DockerEngine, settings: PreflightSettings, option: str
) -> None:
    if option.startswith("apparmor") and APPARMOR.exists() and APPARMOR.read_text().startswith("Y"):
        pytest.skip("AppArmor is there, and the engine refuses a profile that is not")
    accepted = replace(settings, hardening=Hardening(None, option))
    preflight = await run_checks(door, accepted)
    [lsm] = [result for result in preflight.results if result.id == "lsm"]
    assert lsm.verdict is Verdict.BLOCK_REQUIRED
    assert "was accepted" in lsm.evidence
    assert preflight.capabilities.lsm is None


@pytest.mark.requirement("B-35")
@pytest.mark.engine("d26", "r26")
async def test_a_profile_that_lets_user_namespaces_be_made_is_found_out(
    door: DockerEngine, settings: PreflightSettings
) -> None:
    lax = replace(settings, hardening=Hardening('{"defaultAction": "SCMP_ACT_ALLOW"}'))
    preflight = await run_checks(door, lax)
    [seccomp] = [result for result in preflight.results if result.id == "seccomp"]
    assert seccomp.verdict is Verdict.BLOCK_REQUIRED
    assert preflight.capabilities.seccomp_digest is None


@pytest.mark.requirement("B-35", "B-05")
@pytest.mark.engine("d26", "r26")
async def test_a_seccomp_profile_that_the_engine_cannot_use_blocks_everything(
    door: DockerEngine, settings: PreflightSettings
) -> None:
    broken = replace(settings, hardening=Hardening('{"defaultAction": "NONSENSE"}'))
    preflight = await run_checks(door, broken)
    assert verdicts(preflight)["container"] is Verdict.BLOCK_ALL
    assert preflight.capabilities.runtimes == ()
    assert preflight.exit_code == 1
    assert await door.list_resources(runner_filter(settings.owner.runner_id)) == []


@pytest.mark.requirement("B-05", "B-29")
@pytest.mark.engine("d26")
@pytest.mark.parametrize(
    ("image_of", "words"),
    [
        (lambda engine: None, "no tooling image is configured"),
        (lambda engine: "tooling:latest", "not pinned by digest"),
        (lambda engine: "tooling@sha256:" + "0" * 64, "does not have"),
    ],
)
async def test_without_a_usable_tooling_image_no_docker_is_advertised(
    engine: BedEngine,
    door: DockerEngine,
    settings: PreflightSettings,
    image_of: Callable[[BedEngine], str | None],
    words: str,
) -> None:
    preflight = await run_checks(door, replace(settings, tooling_image=image_of(engine)))
    [tooling] = [result for result in preflight.results if result.id == "tooling_image"]
    assert tooling.verdict is Verdict.BLOCK_ALL
    assert words in tooling.evidence
    assert tooling.remedy
    assert preflight.capabilities.runtimes == ()
    assert "tooling_image" in preflight.capabilities.sandbox_required.blockers


@pytest.mark.requirement("B-29")
@pytest.mark.engine("d26")
async def test_an_image_without_python_is_no_tooling_image(
    engine: BedEngine, door: DockerEngine, settings: PreflightSettings
) -> None:
    preflight = await run_checks(door, replace(settings, tooling_image=engine.busybox_image))
    assert verdicts(preflight)["container"] is Verdict.BLOCK_ALL
    assert preflight.capabilities.runtimes == ()
    assert await door.list_resources(runner_filter(settings.owner.runner_id)) == []


@pytest.mark.requirement("B-05")
async def test_an_engine_that_is_not_there_is_a_finding_not_a_crash(tmp_path: Path) -> None:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    async with DockerEngine.connect(endpoint) as door:
        preflight = await run_checks(door, replace(SETTINGS, host_execution_allowed=True))
    engine = preflight.results[0]
    assert (engine.id, engine.verdict, engine.looked) == ("engine", Verdict.BLOCK_ALL, False)
    assert "nothing listens" in engine.evidence
    assert preflight.exit_code == 2
    assert preflight.capabilities.engine is None
    assert preflight.capabilities.runtimes == (Runtime.HOST,)
