"""What the doctor takes for proof that the image gates work: that each has worked."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines import Engine
from forge_bridge.doctor.image_checks import ImageProver
from forge_bridge.doctor.policy_checks import policy_checks
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.results import CheckResult, Verdict
from forge_bridge.images.from_settings import open_gate_tools
from forge_bridge.images.gates import GateTools
from forge_bridge.settings import default_bridge_service_config
from forge_core.errors import RefusedError
from forge_core.labels import Owner
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import Hardening
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from image_tools import SYFT, TRIVY, debian_layer, loaded_image

pytestmark = [pytest.mark.requirement("B-51"), pytest.mark.engine("d26")]

TODAY = "2026-11-29T12:00:00.000Z"


class Signatures:
    """A verifier that can prove itself, or not."""

    def __init__(self, fault: str = "") -> None:
        self.asked = 0
        self._fault = fault

    async def verify(self, reference: str) -> None:
        raise AssertionError("only proofs are asked for")

    async def prove(self, reference: str) -> str:
        self.asked += 1
        if self._fault:
            raise RefusedError(self._fault, code="signature_invalid")
        return f"verified {reference}"


@pytest.fixture(scope="module")
def tooling(engine: Engine) -> Iterator[str]:
    with loaded_image(engine, [debian_layer({"bash": "5.2"})]) as (_, tag, _):
        yield tag


@pytest.fixture
async def door(engine: Engine) -> AsyncIterator[DockerEngine]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url, "HOME": "/nonexistent"})
    async with DockerEngine.connect(endpoint) as opened:
        yield opened


@pytest.fixture
async def tools(engine: Engine, tmp_path: Path) -> GateTools:
    """As the settings name them."""
    database = tmp_path / ".cache/trivy/db/advisories.json"
    database.parent.mkdir(parents=True)
    database.write_text(json.dumps({"advisories": [], "endOfLife": []}))
    key = tmp_path / "key"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    key.chmod(0o600)
    settings = default_bridge_service_config(
        sandbox_image_policy_enforced=True,
        sandbox_sbom_executable=str(SYFT),
        sandbox_vulnerability_executable=str(TRIVY),
        sandbox_provenance_signing_key=key,
    )
    environ = {"DOCKER_HOST": engine.base_url, "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    endpoint = resolve_endpoint(None, environ)
    return await open_gate_tools(settings, endpoint, environ, tmp_path / "scratch")


def prover(tools: GateTools, *, enforced: bool = True) -> ImageProver:
    return ImageProver(tools, enforced=enforced, utc=lambda: TODAY)


async def findings(
    prover: ImageProver, door: DockerEngine, tooling: str | None
) -> dict[str, CheckResult]:
    """The doctor's findings about images on the strength of these proofs."""
    proofs = await prover.prove(door, tooling)
    settings = PreflightSettings(
        owner=Owner("runner", "instance", "preflight", 1, "preflight", "domain"),
        tooling_image=tooling,
        hardening=Hardening(),
        capacity=ResourceCapacity(1),
    ).with_proofs(proofs)
    return {result.id: result for result in policy_checks(settings)}


async def test_gates_that_worked_pass(tools: GateTools, door: DockerEngine, tooling: str) -> None:
    found = await findings(prover(replace(tools, signatures=Signatures())), door, tooling)
    assert found["signatures"].verdict is Verdict.PASS
    assert found["signatures"].evidence == f"verified {tooling}"
    policy = found["image_policy"]
    assert policy.verdict is Verdict.PASS
    assert f"syft-1.18.1 named 1 packages of {tooling}" in policy.evidence
    assert "the scanner looked at 1 and knew of 0 vulnerabilities" in policy.evidence


async def test_a_setting_alone_is_no_proof(
    tools: GateTools, door: DockerEngine, tooling: str
) -> None:
    for each, enforced, image in (
        (GateTools(), False, tooling),
        (tools, False, tooling),
        (tools, True, None),
    ):
        found = await findings(prover(each, enforced=enforced), door, image)
        assert found["image_policy"].verdict is Verdict.BLOCK_REQUIRED
        assert found["signatures"].verdict is Verdict.BLOCK_REQUIRED
        assert found["image_policy"].evidence == "nothing has shown it"


async def test_a_gate_that_does_not_work_blocks_and_says_why(
    tools: GateTools, door: DockerEngine, tooling: str, tmp_path: Path
) -> None:
    broken = replace(tools, signatures=Signatures("the verifier accepts any key"))
    (tmp_path / ".cache/trivy/db/advisories.json").unlink()
    found = await findings(prover(broken), door, tooling)
    assert found["signatures"].verdict is Verdict.BLOCK_REQUIRED
    assert found["signatures"].evidence == "the verifier accepts any key"
    assert found["image_policy"].verdict is Verdict.BLOCK_REQUIRED
    assert "failed to download vulnerability DB" in found["image_policy"].evidence


async def test_a_missing_tool_a_broken_policy_and_an_absent_image_block(
    tools: GateTools, door: DockerEngine, tooling: str, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text("version: 2\n")
    for each, image, why in (
        (replace(tools, bill=None), tooling, "no tool for signatures, sbom"),
        (replace(tools, policy_file=policy), tooling, "cannot use the image policy"),
        (tools, "forge.invalid/absent:1", "forge.invalid/absent:1"),
    ):
        found = await findings(prover(each), door, image)
        assert found["image_policy"].verdict is Verdict.BLOCK_REQUIRED
        assert why in found["image_policy"].evidence


async def test_what_was_shown_is_remembered_and_what_was_not_is_tried_again(
    tools: GateTools, door: DockerEngine, tooling: str
) -> None:
    good = Signatures()
    twice = prover(GateTools(signatures=good), enforced=False)
    for _ in range(2):
        assert (await twice.prove(door, tooling)).shown == {"signatures": f"verified {tooling}"}
    assert good.asked == 1
    bad = Signatures("no")
    twice = prover(GateTools(signatures=bad), enforced=False)
    for _ in range(2):
        assert (await twice.prove(door, tooling)).failed == {"signatures": "no"}
    assert bad.asked == 2


async def test_a_key_that_cannot_be_used_is_told_at_the_start(
    engine: Engine, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("no key")
    key.chmod(0o600)
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url, "HOME": "/nonexistent"})
    for setting, named in (
        ({"sandbox_provenance_signing_key": key}, "cannot sign provenance with the key"),
        (
            {"sandbox_signature_executable": "cosign", "sandbox_signature_public_key": key},
            "cannot verify image signatures with the key",
        ),
    ):
        settings = default_bridge_service_config(**setting)
        with pytest.raises(RefusedError, match=named) as caught:
            await open_gate_tools(settings, endpoint, {}, tmp_path)
        assert caught.value.code == "configuration"
