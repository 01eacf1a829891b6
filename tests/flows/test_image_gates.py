"""The gates on a real engine: the real Syft, a scanner called like Trivy, real signatures."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engines import Engine
from forge_bridge.images.gates import Gates, GateTools
from forge_core.errors import RefusedError
from forge_core.image_ports import BuiltImage, Evidence, EvidenceReader, GateRefused
from forge_core.provenance import Expected, verify_provenance
from forge_core.signing import PrivateKey
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from forge_edges.gate_tools import ToolSetting, tool_environment
from forge_edges.scanners import bill_scanner, vulnerability_scanner
from image_tools import SYFT, TRIVY, cosign_path, debian_layer, layer, loaded_image

pytestmark = [pytest.mark.requirement("B-30"), pytest.mark.engine("d26")]

TODAY = "2026-11-29T12:00:00.000Z"
PACKAGES = {"openssl": "3.0.1-1", "zlib1g": "1:1.2.13"}
BASE = debian_layer(PACKAGES)
FIXABLE = {
    "id": "CVE-2026-1",
    "package": "openssl",
    "affected": ["3.0.1-1"],
    "fixed": "3.0.2-1",
    "severity": "HIGH",
}


@dataclass(slots=True)
class Bench:
    """Gates with their parts at hand."""

    engine: DockerEngine
    setting: ToolSetting
    home: Path
    key: PrivateKey
    tools: GateTools

    def gates(self, *, enforced: bool = True, today: str = TODAY, **tools: Any) -> Gates:
        return Gates(
            self.engine,
            replace(self.tools, **tools),
            enforced=enforced,
            trust_domain_id="test",
            runner_id="runner-1",
            utc=lambda: today,
        )

    def advise(self, *advisories: dict[str, Any], end_of_life: Sequence[str] = ()) -> None:
        """What the scanner's database knows."""
        database = self.home / ".cache/trivy/db/advisories.json"
        database.parent.mkdir(parents=True, exist_ok=True)
        database.write_text(json.dumps({"advisories": advisories, "endOfLife": list(end_of_life)}))

    def policy(self, text: str) -> Path:
        file = self.home / "policy.yml"
        file.write_text(text)
        file.chmod(0o600)
        return file

    def program(self, name: str, body: str) -> str:
        """A program of our own in place of a tool."""
        file = self.home / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
        return str(file)


@pytest.fixture(scope="module")
def bill_of_base(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Syft says of :data:`BASE`, for the tests that are about the gates after it."""
    file = tmp_path_factory.mktemp("bill") / "sbom.json"
    with loaded_image(engine, [BASE]) as (_, tag, _), file.open("wb") as output:
        environment = {"DOCKER_HOST": engine.base_url, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
        command = [str(SYFT), tag, "-o", "spdx-json"]
        subprocess.run(command, env=environment, stdout=output, check=True, timeout=60)
    return file


@pytest.fixture
async def bench(engine: Engine, tmp_path: Path, bill_of_base: Path) -> Any:
    environ = {"DOCKER_HOST": engine.base_url, "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    endpoint = resolve_endpoint(None, environ)
    setting = ToolSetting(tool_environment(environ, endpoint), tmp_path / "scratch")
    async with DockerEngine.connect(endpoint) as door:
        key = ec.generate_private_key(ec.SECP256R1())
        made = Bench(door, setting, tmp_path, key, GateTools(signing_key=key))
        recorded = made.program("recorded", f"exec cat {bill_of_base}")
        made.tools = replace(
            made.tools,
            bill=bill_scanner(recorded, setting),
            vulnerabilities=vulnerability_scanner(str(TRIVY), setting),
        )
        made.advise()
        yield made
    assert not setting.scratch.exists() or list(setting.scratch.iterdir()) == []


@pytest.fixture
def image(engine: Engine) -> Iterator[BuiltImage]:
    with loaded_image(engine, [BASE]) as (image_id, tag, _):
        yield built(image_id, tag)


def built(image_id: str, tag: str) -> BuiltImage:
    return BuiltImage(
        image_id=image_id,
        reference=tag,
        image_key="k" * 64,
        project_id="p",
        repository="demo",
        commit="c" * 40,
        materials=("registry.example/debian@sha256:" + "2" * 64,),
        parameters={"dockerfile": ".forge/Dockerfile", "dedicatedBuilder": True},
        started_at=TODAY,
        finished_at=TODAY,
    )


def reader(evidence: Sequence[Evidence]) -> EvidenceReader:
    async def read() -> Sequence[Evidence]:
        return evidence

    return read


async def nobody_reads() -> Sequence[Evidence]:
    raise AssertionError


def named(evidence: Sequence[Evidence]) -> dict[str, bytes]:
    return {document.name: document.content for document in evidence}


async def refusal(gates: Gates, image: BuiltImage) -> GateRefused:
    with pytest.raises(GateRefused) as caught:
        await gates.after_build(image)
    assert caught.value.code == "image_policy_denied"
    assert str(caught.value).startswith(
        f"cannot use the image {image.image_id}: gate {caught.value.field}: "
    )
    return caught.value


@pytest.mark.engine("d26", "r26")
async def test_an_image_that_passes_leaves_its_evidence(bench: Bench, image: BuiltImage) -> None:
    syft = bill_scanner(str(SYFT), bench.setting)
    found = named(await bench.gates(bill=syft).after_build(image))
    assert list(found) == ["sbom.spdx.json", "vulnerabilities.json", "provenance.dsse.json"]
    bill = json.loads(found["sbom.spdx.json"])
    named_packages = {p["name"]: p.get("versionInfo") for p in bill["packages"]}
    assert named_packages.items() >= PACKAGES.items()
    assert json.loads(found["vulnerabilities.json"])["Metadata"]["ImageID"] == image.image_id
    told = verify_provenance(
        found["provenance.dsse.json"],
        bench.key.public_key(),
        Expected(image.image_id, "demo", "c" * 40),
    )
    assert told.builder_id.endswith("bridge/runner/test/runner-1/dedicated-builder")
    assert told.byproducts == {
        name: f"sha256:{hashlib.sha256(found[name]).hexdigest()}"
        for name in ("sbom.spdx.json", "vulnerabilities.json")
    }


async def test_cosign_verifies_our_provenance_of_the_image(
    bench: Bench, engine: Engine, tmp_path: Path
) -> None:
    """The image's id is the digest of its configuration, which is what is given to Cosign."""
    with loaded_image(engine, [BASE]) as (image_id, tag, config):
        found = named(await bench.gates().after_build(built(image_id, tag)))
    assert f"sha256:{hashlib.sha256(config).hexdigest()}" == image_id
    (tmp_path / "provenance.json").write_bytes(found["provenance.dsse.json"])
    (tmp_path / "key.pub").write_bytes(
        bench.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )

    def verify(blob: bytes) -> int:
        (tmp_path / "blob").write_bytes(blob)
        return subprocess.run(
            [
                *(cosign_path(), "verify-blob-attestation", "--key", "key.pub"),
                *("--insecure-ignore-tlog=true", "--type", "slsaprovenance1"),
                *("--signature", "provenance.json", "blob"),
            ],
            cwd=tmp_path,
            env={"HOME": str(tmp_path)},
            check=False,
            timeout=60,
        ).returncode

    assert verify(config) == 0
    assert verify(config + b" ") != 0


async def test_a_vulnerability_refuses_and_the_evidence_stays(
    bench: Bench, image: BuiltImage
) -> None:
    bench.advise(FIXABLE)
    error = await refusal(bench.gates(), image)
    assert error.field == "vulnerabilities"
    assert "1 high: CVE-2026-1 (high) in openssl 3.0.1-1, fixed in 3.0.2-1" in str(error)
    assert list(named(error.evidence)) == ["sbom.spdx.json", "vulnerabilities.json"]


async def test_an_exception_lets_it_pass_until_its_day_is_over(
    bench: Bench, image: BuiltImage
) -> None:
    bench.advise(FIXABLE)
    policy = bench.policy(
        "version: 1\nexceptions:\n  - id: CVE-2026-1\n    reason: not reachable\n"
        '    expires: "2026-11-30"\n'
    )
    evidence = await bench.gates(policy_file=policy).after_build(image)
    assert len(evidence) == 3
    later = bench.gates(policy_file=policy, today="2026-12-01T00:00:00.000Z")
    assert "has expired on 2026-11-30" in str(await refusal(later, image))
    with pytest.raises(GateRefused, match="has expired on 2026-11-30"):
        await later.before_use(image.image_id, reader(evidence))
    await bench.gates(policy_file=policy).before_use(image.image_id, reader(evidence))


async def test_a_policy_that_cannot_be_used_refuses(bench: Bench, image: BuiltImage) -> None:
    broken = bench.policy("version: 1\nrefuse:\n  hihg: any\n")
    error = await refusal(bench.gates(policy_file=broken), image)
    assert error.field == "vulnerabilities"
    assert f"cannot use the image policy {broken}: line 3" in str(error)
    broken.chmod(0o666)
    error = await refusal(bench.gates(policy_file=broken), image)
    assert "can be changed by other accounts" in str(error)


async def test_a_system_at_its_end_of_life_refuses(bench: Bench, image: BuiltImage) -> None:
    bench.advise(end_of_life=["debian 12"])
    assert "end of life" in str(await refusal(bench.gates(), image))


async def test_an_image_that_hides_its_packages_is_refused(bench: Bench, engine: Engine) -> None:
    bench.advise(FIXABLE)
    hides = layer({"var/lib/dpkg/.wh.status": "", "usr/bin/x": "x"})
    syft = bill_scanner(str(SYFT), bench.setting)
    with loaded_image(engine, [BASE, hides]) as (image_id, tag, _):
        for gate, gates in (("sbom", bench.gates(bill=syft)), ("vulnerabilities", bench.gates())):
            error = await refusal(gates, built(image_id, tag))
            assert error.field == gate
            assert "names no package" in str(error)


async def test_a_scanner_without_its_database_passes_nothing(
    bench: Bench, image: BuiltImage
) -> None:
    (bench.home / ".cache/trivy/db/advisories.json").unlink()
    error = await refusal(bench.gates(), image)
    assert error.field == "vulnerabilities"
    assert "exit code 1: Error: failed to download vulnerability DB" in str(error)
    assert list(named(error.evidence)) == ["sbom.spdx.json"]


async def test_a_tag_that_was_moved_proves_nothing(
    bench: Bench, engine: Engine, image: BuiltImage
) -> None:
    """Somebody gives the tag to a harmless image while the tool looks, and back afterwards."""
    with loaded_image(engine, [debian_layer({"other": "1"})]) as (_, other_tag, _):
        repository, _, tag = image.reference.partition(":")
        move = (
            f"curl -s --unix-socket {engine.socket_path} -X POST "
            f"'http://d/images/{other_tag}/tag?repo={repository}&tag={tag}'"
        )
        back = move.replace(other_tag, image.image_id)
        moved = bench.program("moved", f'{move}; exec {SYFT} "$@"')
        error = await refusal(bench.gates(bill=bill_scanner(moved, bench.setting)), image)
        assert error.field == "sbom"
        assert "somebody has moved the tag" in str(error)
        assert error.evidence == ()
        await refusal(bench.gates(), image)
        engine.api.call("POST", f"/images/{image.image_id}/tag?repo={repository}&tag={tag}")
        there = bench.program("there", f'{move}; {TRIVY} "$@"; {back}')
        scanner = vulnerability_scanner(there, bench.setting)
        error = await refusal(bench.gates(vulnerabilities=scanner), image)
        assert "the report is about the image sha256:" in str(error)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo '{}'", "no SPDX 2"),
        ("true", "no SPDX 2"),
        ("echo broken >&2; exit 3", "exit code 3: broken"),
    ],
)
async def test_a_tool_that_prints_nonsense_passes_nothing(
    bench: Bench, image: BuiltImage, body: str, reason: str
) -> None:
    broken = bill_scanner(bench.program("broken", body), bench.setting)
    error = await refusal(bench.gates(bill=broken), image)
    assert (error.field, error.evidence) == ("sbom", ())
    assert reason in str(error)


async def test_a_tool_that_floods_or_hangs_is_ended(bench: Bench, image: BuiltImage) -> None:
    flood = bill_scanner(bench.program("flood", "exec cat /dev/zero"), bench.setting)
    assert "more than" in str(await refusal(bench.gates(bill=flood), image))
    hang = bill_scanner(bench.program("hang", "exec sleep 600"), bench.setting)
    short = replace(hang, bounds=replace(hang.bounds, timeout_ms=500))
    assert "did not end within 500 ms" in str(await refusal(bench.gates(bill=short), image))


@pytest.mark.parametrize("missing", ["bill", "vulnerabilities", "signing_key"])
async def test_a_gate_without_a_tool_refuses_where_the_policy_is_enforced(
    bench: Bench, image: BuiltImage, missing: str
) -> None:
    without: dict[str, Any] = {missing: None}
    gates = bench.gates(**without)
    error = await refusal(gates, image)
    assert error.field == gates.tools.missing[1]  # the first is the signature verifier
    assert "is configured for it" in str(error)


async def test_without_enforcement_the_gates_only_warn(bench: Bench, image: BuiltImage) -> None:
    bench.advise(FIXABLE)
    gates = bench.gates(enforced=False, bill=None)
    with structlog.testing.capture_logs() as logs:
        evidence = await gates.after_build(image)
    assert list(named(evidence)) == ["vulnerabilities.json", "provenance.dsse.json"]
    (warning,) = logs
    assert (warning["log_level"], warning["gate"]) == ("warning", "vulnerabilities")
    assert "CVE-2026-1" in warning["reason"]
    await gates.before_use(image.image_id, nobody_reads)
    none: dict[str, Any] = dict.fromkeys(TOOLS)
    assert await bench.gates(enforced=False, **none).after_build(image) == []


TOOLS = ("bill", "vulnerabilities", "signing_key")


async def test_evidence_that_was_changed_is_not_used(bench: Bench, image: BuiltImage) -> None:
    gates = bench.gates()
    evidence = await gates.after_build(image)
    await gates.before_use(image.image_id, reader(evidence))
    other_id = "sha256:" + "9" * 64
    with pytest.raises(GateRefused, match="gate provenance: it is about sha256"):
        await gates.before_use(other_id, reader(evidence))
    for name in ("sbom.spdx.json", "vulnerabilities.json"):
        tampered = [Evidence(e.name, e.content + b" ") if e.name == name else e for e in evidence]
        with pytest.raises(GateRefused, match=f"{name} is not the document that was signed"):
            await gates.before_use(image.image_id, reader(tampered))
        with pytest.raises(GateRefused, match=f"{name} is not among what the build left"):
            await gates.before_use(image.image_id, reader([e for e in evidence if e.name != name]))
    stranger = bench.gates(signing_key=ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(GateRefused, match="no valid signature of the key"):
        await stranger.before_use(image.image_id, reader(evidence))


class Signatures:
    """Says no to one image and notes what it is asked."""

    def __init__(self, bad: str = "") -> None:
        self.asked: list[str] = []
        self._bad = bad

    async def verify(self, reference: str) -> None:
        self.asked.append(reference)
        if reference == self._bad:
            raise RefusedError(f"cannot trust {reference}", code="signature_invalid")


@pytest.mark.requirement("B-31")
@pytest.mark.parametrize("enforced", [True, False])
async def test_every_source_is_verified_and_a_bad_signature_refuses_in_any_mode(
    bench: Bench, enforced: bool
) -> None:
    good = Signatures()
    await bench.gates(enforced=enforced, signatures=good).before_build(["a", "b"])
    assert good.asked == ["a", "b"]
    bad = Signatures("a")
    with pytest.raises(RefusedError, match="cannot trust a"):
        await bench.gates(enforced=enforced, signatures=bad).before_build(["a", "b"])


@pytest.mark.requirement("B-31")
async def test_without_a_verifier_there_is_a_warning(bench: Bench) -> None:
    with structlog.testing.capture_logs() as logs:
        await bench.gates().before_build(["a"])
        await bench.gates().before_build([])
    assert [(log["event"], log["images"]) for log in logs] == [
        ("image signatures are not verified", ["a"])
    ]
