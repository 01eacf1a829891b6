"""Each blocker of ``sandbox_required`` by itself: advertised, refused by name, and mendable.

A bridge on a real engine lacks one thing more than this machine does.  What it advertises names
it, the hub places no ``sandbox_required`` session there and says the same name, the doctor shows it
with a remedy, and a session that can do without is placed all the same.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from blocker_parts import (
    ABSENT,
    PROVEN,
    UNLIMITED,
    Desktop,
    Lack,
    Operator,
    doing,
    host,
    nobody,
)

from engines import Engine, TestBed, extra_image
from forge_bridge.flows import engine as engine_flow
from forge_core.blockers import OF_A_SESSION, Blocker
from forge_core.wire.codes import Runtime
from image_tools import SYFT, TRIVY, Cosign, cosign_path, debian_layer, own_repository

pytestmark = [
    pytest.mark.requirement("B-51", "B-96"),
    pytest.mark.engine("d26"),
    pytest.mark.timeout(120),
]

NOTHING = Lack(Blocker.ENGINE, "nothing")
UNLOOKED = frozenset({Blocker.LSM, Blocker.LIMITS})
"""Only a container that ran shows them."""

LAX = '{"defaultAction": "SCMP_ACT_ALLOW"}'
NONSENSE = '{"defaultAction": "NONSENSE"}'
FAR_EXCEPTION = """\
version: 1
exceptions:
  - {id: CVE-2020-0001, reason: for ever, expires: 2099-01-01}
"""
"""A policy that nobody has looked at within a year."""

OF_THE_MACHINE = {
    Blocker.ROOTLESS: "d26",
    Blocker.LIMITS: "r26",
}
"""What an engine of the test bed lacks by itself, and which."""

CASES = [
    # With real parts.
    Lack(Blocker.TOOLING_IMAGE, "absent", {"agent_tooling_image": ABSENT}, hides=UNLOOKED),
    Lack(Blocker.CONTAINER, "profile that no engine takes", {"profile": NONSENSE}, hides=UNLOOKED),
    Lack(Blocker.SECCOMP, "none", {"sandbox_seccomp_profile": None}),
    Lack(Blocker.SECCOMP, "allows user namespaces", {"profile": LAX}),
    Lack(Blocker.LSM, "none", {"sandbox_lsm_security_opt": None}),
    Lack(Blocker.LSM, "unknown to the kernel", {"sandbox_lsm_security_opt": "label=type:none_t"}),
    Lack(Blocker.DISK_QUOTA, "neither quota nor disk", {"sandbox_dedicated_disk": False}),
    Lack(Blocker.BUILD_EGRESS, "nobody vouches", {"sandbox_build_egress_enforced": False}),
    Lack(Blocker.PUBLICATION_MODE, "kept", {"sandbox_publication_mode": "shared_filesystem"}),
    Lack(Blocker.EGRESS, "no proxy image", tried=frozenset({Blocker.EGRESS})),
    Lack(Blocker.IMAGE_POLICY, "not enforced", tried=frozenset({Blocker.IMAGE_POLICY})),
    Lack(
        Blocker.IMAGE_POLICY,
        "tool that lists nothing",
        {"policy": "tools", "sandbox_sbom_executable": "/bin/false"},
        tried=frozenset({Blocker.IMAGE_POLICY}),
    ),
    Lack(
        Blocker.IMAGE_POLICY,
        "exception for ever",
        {"policy": FAR_EXCEPTION},
        tried=frozenset({Blocker.IMAGE_POLICY}),
    ),
    Lack(Blocker.SIGNATURES, "no verifier", tried=frozenset({Blocker.SIGNATURES})),
    Lack(
        Blocker.SIGNATURES,
        "another key",
        {"key": "other"},
        tried=frozenset({Blocker.SIGNATURES}),
    ),
    Lack(
        Blocker.BUILDER,
        "the one of the engine",
        {"docker": True},
        tried=frozenset({Blocker.BUILDER}),
        also=frozenset({Blocker.BUILD_EGRESS}),
    ),
    Lack(
        Blocker.ENGINE,
        "gone since it was locked",
        door=nobody,
        hides=UNLOOKED | {Blocker.ROOTLESS},
    ),
    # No engine of the test bed is like this: the door to the real one is bent.
    Lack(Blocker.BUILDER, "without a limit", builder=UNLIMITED),
    Lack(Blocker.DOCKER_DESKTOP, "for all", door=Desktop),
    Lack(
        Blocker.DOCKER_DESKTOP,
        "for developers",
        {"allow_docker_desktop_sandbox": True},
        door=Desktop,
    ),
    Lack(Blocker.USER, "root", door=doing(lambda request: request.update(User="0:0"))),
    Lack(Blocker.CAPABILITIES, "kept", door=host(CapDrop=[])),
    Lack(Blocker.NO_NEW_PRIVILEGES, "not set", door=host(SecurityOpt=[])),
    Lack(Blocker.READ_ONLY_ROOT, "writable", door=host(ReadonlyRootfs=False)),
    Lack(Blocker.TMPFS, "with exec", door=host(Tmpfs={"/tmp": "exec,mode=1777"})),
    Lack(Blocker.MOUNTS, "of the host", door=host(Binds=["/etc:/host:ro"])),
    Lack(Blocker.NETWORK, "of the engine", door=host(NetworkMode="bridge")),
]

SESSIONS: list[tuple[dict[str, Any], set[Blocker]]] = [
    ({"approvedCommit": None}, {Blocker.APPROVED_COMMIT}),
    ({"network": {"policy": "open_public"}}, {Blocker.OPEN_PUBLIC}),
]


class Signed(NamedTuple):
    """References by digest.

    :ivar tooling: has packages that a scanner finds.
    """

    tooling: str
    squid: str


@pytest.fixture(scope="module")
def operator(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Operator]:
    operator = Operator(tmp_path_factory.mktemp("hub") / "rig", engine, module_runner_id)
    yield operator
    operator.close()


@pytest.fixture(scope="module")
def cosign(tmp_path_factory: pytest.TempPathFactory) -> Cosign:
    signer = Cosign(cosign_path(), tmp_path_factory.mktemp("cosign"))
    for name in ("ours", "other"):
        signer.new_key(name)
    return signer


@pytest.fixture(scope="module")
def signed(engine: Engine, testbed: TestBed, cosign: Cosign) -> Iterator[Signed]:
    """Images under names of their own, with signatures."""
    with own_repository() as registry:
        packages = debian_layer({"bash": "5.2"})
        images = Signed(
            registry.copy(engine.tooling_image, packages),
            registry.copy(extra_image(engine, "squid")),
        )
        for reference in images:
            cosign.sign(reference, "ours")
            engine.api.pull(reference)
        yield images
        for reference in images:
            engine.api.call("DELETE", f"/images/{reference}")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of image gates that work."""
    database = tmp_path / ".cache/trivy/db/advisories.json"
    database.parent.mkdir(parents=True)
    database.write_text(json.dumps({"advisories": [], "endOfLife": []}))
    monkeypatch.setenv("HOME", str(tmp_path))
    key = tmp_path / "signing.key"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    key.chmod(0o600)
    return {
        "sandbox_image_policy_enforced": True,
        "sandbox_sbom_executable": str(SYFT),
        "sandbox_vulnerability_executable": str(TRIVY),
        "sandbox_provenance_signing_key": key,
    }


def file(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o644)
    return path


@pytest.fixture
def lack(request: pytest.FixtureRequest, tmp_path: Path, operator: Operator) -> Lack:
    """A case, with the files that its settings name."""
    case: Lack = request.param
    settings = dict(case.settings)
    if (profile := settings.pop("profile", None)) is not None:
        settings["sandbox_seccomp_profile"] = file(tmp_path / "profile.json", profile)
    if settings.pop("docker", False):
        settings["docker_executable"] = operator.engine.docker_executable
    if (policy := settings.pop("policy", None)) is not None:
        settings = {**request.getfixturevalue("tools"), **settings}
        if policy != "tools":
            settings["sandbox_image_policy_file"] = file(tmp_path / "policy.yml", policy)
    if (key := settings.pop("key", None)) is not None:
        cosign: Cosign = request.getfixturevalue("cosign")
        settings |= verifier(cosign, key)
        settings["agent_tooling_image"] = request.getfixturevalue("signed").tooling
    return replace(case, settings=settings)


def verifier(cosign: Cosign, key: str) -> dict[str, Any]:
    return {
        "sandbox_signature_executable": str(cosign.path),
        "sandbox_signature_public_key": cosign.home / f"{key}.pub",
    }


@pytest.mark.parametrize("lack", CASES, indirect=True, ids=str)
async def test_what_a_bridge_lacks_is_refused_by_name(
    operator: Operator, lack: Lack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {lack.blocker, *lack.also, *(operator.baseline - lack.hides)}
    async with operator.lacking(tmp_path, lack, monkeypatch) as bridge:
        other = await bridge.dispatch_other()
        assert await bridge.refused() == expected
        assert await bridge.advertised() == sorted(expected)
        shown = bridge.findings()
        assert shown.keys() == expected
        assert all(finding.evidence and finding.remedy for finding in shown.values())
        where = Runtime.DOCKER if bridge.runs_containers else Runtime.HOST
        assert await bridge.ran(other) is where


@pytest.mark.parametrize(("lacks", "names"), SESSIONS, ids=["approved_commit", "open_public"])
async def test_what_a_session_lacks_is_refused_by_name(
    operator: Operator,
    lacks: dict[str, Any],
    names: set[Blocker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = replace(NOTHING, settings={"allow_open_public_sandbox": True})
    async with operator.lacking(tmp_path, nothing, monkeypatch) as bridge:
        other = await bridge.dispatch_other(**lacks)
        assert await bridge.refused(**lacks) == operator.baseline | names
        assert await bridge.ran(other) is Runtime.DOCKER


@pytest.mark.engine(*sorted(OF_THE_MACHINE.values()))
async def test_what_an_engine_lacks_by_itself_is_refused_by_name(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {blocker for blocker, on in OF_THE_MACHINE.items() if on == operator.engine.name}
    async with operator.lacking(tmp_path, NOTHING, monkeypatch) as bridge:
        other = await bridge.dispatch_other()
        assert await bridge.refused() == operator.baseline >= names
        assert await bridge.advertised() == sorted(operator.baseline)
        assert all(bridge.findings()[name].remedy for name in names)
        assert await bridge.ran(other) is Runtime.DOCKER


@pytest.mark.requirement("B-05", "B-06")
async def test_what_could_not_be_looked_at_is_looked_at_again(
    operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = iter([nobody, nobody])
    back = replace(NOTHING, door=lambda engine: next(doors, lambda same: same)(engine))
    monkeypatch.setattr(engine_flow, "LOOK_EVERY_MS", 500)
    async with operator.lacking(tmp_path, back, monkeypatch) as bridge:
        assert await bridge.refused() == {Blocker.ENGINE}
        await bridge.until_advertised(sorted(operator.baseline))
        assert await bridge.ran(await bridge.dispatch("sandbox_preferred")) is Runtime.DOCKER


async def test_what_is_taken_for_shown_is_shown(
    operator: Operator,
    cosign: Cosign,
    signed: Signed,
    tools: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        **tools,
        **verifier(cosign, "ours"),
        "agent_tooling_image": signed.tooling,
        "sandbox_egress_proxy_image": signed.squid,
    }
    everything = replace(NOTHING, settings=settings, tried=PROVEN - {Blocker.BUILDER})
    async with operator.lacking(tmp_path, everything, monkeypatch) as bridge:
        assert bridge.findings().keys() == operator.baseline, bridge.findings()


def test_every_blocker_has_a_case() -> None:
    of_sessions = {name for _, names in SESSIONS for name in names}
    assert of_sessions == OF_A_SESSION
    assert {case.blocker for case in CASES} | OF_THE_MACHINE.keys() | of_sessions == set(Blocker)
