"""``sandbox_required`` from end to end, on an engine that lacks nothing, with every gate on.

The engine is a rootless one in a virtual machine with cgroup v2 and AppArmor; hub and bridge are
processes of this machine, as everywhere.  Tools, keys, signatures, builder, proxy and remote are
real; the scanner is the strict stand-in, because no package has the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from project_parts import CONTRACT, Images

from egress_table import DOMAINS, NAMES
from engines import REPOSITORY, Engine, extra_image
from forge_core.blockers import OF_A_SESSION, Blocker
from git_server import GitServer, git, git_server, make_credentials
from image_tools import SYFT, TRIVY, Cosign, Registry, cosign_path, debian_layer, own_repository
from public_site import PUBLIC, PublicSite, public_site
from rig import Rig, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine("v26"),
    pytest.mark.timeout(2400),
    pytest.mark.requirement("B-51", "B-96"),
]

SLOWLY_S = 900.0
"""An emulated processor is some seventeen times slower; nothing here depends on how much."""

MIB = 1 << 20
BASE_PACKAGES = {"busybox-static": "1:1.35.0-4"}
TOOLING_PACKAGES = {"git": "1:2.39.5-0", "python3": "3.11.2-1"}
LISTED = {"policy": "public_allowlist", "domains": list(DOMAINS)}
RESOURCES = {"slots": 1, "memoryBytes": 192 * MIB, "cpuMillis": 500, "pids": 48}
LIMITS = {"hardWallMs": 600_000, "idleMs": 600_000}
FLAW = "CVE-2020-0001"
WALLS = """
set -e
status() { sed -n "s/^$1:[[:space:]]*//p" /proc/self/status; }
limit() { cat "/sys/fs/cgroup/$1"; }
echo "lsm=$(cat /proc/self/attr/current)"
echo "denied=$(cat /proc/kallsyms 2>&1 >/dev/null)"
echo "seccomp=$(status Seccomp) no_new_privileges=$(status NoNewPrivs) effective=$(status CapEff)"
echo "memory=$(limit memory.max) swap=$(limit memory.swap.max)"
echo "pids=$(limit pids.max) cpu=$(limit cpu.max)"
echo "user=$(id -u)"
echo changed > VERSION
"""
WAY_OUT = """
fetch() { wget -q -O - "$1" 2>&1 || true; }
echo "built=$(cat /built)"
echo "listed=$(fetch http://www.example.org/)"
echo "unlisted=$(fetch http://www.evil.test/)"
"""


@dataclass(frozen=True)
class Gated:
    """What a bridge is given that wants every gate, and what is left of it in the engine."""

    engine: Engine
    registry: Registry
    cosign: Cosign
    key: Path

    def signed(self, reference: str, packages: Mapping[str, str] | None = None) -> str:
        """A signed copy of an image of the test bed.

        :param packages: name → version for a package database, which those images lack.
        """
        layers = [debian_layer(packages)] if packages else []
        copy = self.registry.copy(reference, *layers)
        self.cosign.sign(copy, self.key.stem)
        self.engine.api.pull(copy)
        return copy

    def forget(self) -> None:
        for digest in self.registry.pushed:
            image = f"{self.registry.address}/{self.registry.repository}@{digest}"
            self.engine.api.call("DELETE", f"/images/{image}", {"force": "1"})


@contextmanager
def gated(engine: Engine, home: Path) -> Iterator[Gated]:
    home.mkdir()
    cosign = Cosign(cosign_path(), home)
    with own_repository() as registry:
        gates = Gated(engine, registry, cosign, cosign.new_key("images"))
        try:
            yield gates
        finally:
            gates.forget()


class EveryGate(Rig):
    """A rig whose bridge has everything that ``sandbox_required`` asks for."""

    def __init__(
        self, directory: Path, engine: Engine, runner_id: str, gates: Gated, server: GitServer
    ) -> None:
        super().__init__(directory, engine, runner_id)
        self.gates = gates
        self.server = server
        url = server.create("sample", source=self.repository)
        git(self.repository, "remote", "add", "origin", url)
        self.credentials = make_credentials(
            directory / "credentials", url, project="project", repository="sample"
        )
        self.provenance_key = directory / "provenance.pub"
        self.base = gates.signed(engine.busybox_image, BASE_PACKAGES)
        self._advise(FLAW)

    def settings(self) -> Mapping[str, str]:
        seccomp, signing = self.directory / "seccomp.json", self.directory / "provenance.key"
        shutil.copy(REPOSITORY / "examples/seccomp/forge-sandbox.json", seccomp)
        seccomp.chmod(0o644)
        generate = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(signing)]
        subprocess.run(generate, check=True, capture_output=True)
        signing.chmod(0o600)
        public = ["openssl", "pkey", "-in", str(signing), "-pubout"]
        public += ["-out", str(self.provenance_key)]
        subprocess.run(public, check=True, capture_output=True)
        sign, engine = self.gates.signed, self.engine
        return {
            "FORGE_AGENT_TOOLING_IMAGE": sign(engine.tooling_image, TOOLING_PACKAGES),
            "FORGE_SANDBOX_SECCOMP_PROFILE": str(seccomp),
            "FORGE_SANDBOX_LSM_SECURITY_OPT": "apparmor=forge-sandbox",
            "FORGE_SANDBOX_DEDICATED_DISK": "true",
            "FORGE_SANDBOX_SIGNATURE_EXECUTABLE": str(self.gates.cosign.path),
            "FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY": str(self.gates.key),
            "FORGE_SANDBOX_IMAGE_POLICY_ENFORCED": "true",
            "FORGE_SANDBOX_SBOM_EXECUTABLE": str(SYFT),
            "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE": str(TRIVY),
            "FORGE_SANDBOX_PROVENANCE_SIGNING_KEY": str(signing),
            "FORGE_SANDBOX_BUILDKIT_IMAGE": sign(extra_image(engine, "buildkit")),
            "FORGE_SANDBOX_BUILD_MEMORY": "512MiB",
            "FORGE_SANDBOX_BUILD_CPU_QUOTA": "100000",
            "FORGE_SANDBOX_BUILD_EGRESS_ENFORCED": "true",
            "FORGE_SANDBOX_EGRESS_PROXY_IMAGE": sign(extra_image(engine, "squid")),
            "FORGE_SANDBOX_EGRESS_ENFORCED": "true",
            "FORGE_SANDBOX_PUBLICATION_MODE": "bridge_push",
        }

    def _advise(self, flaw: str) -> None:
        """Have the scanner's database know one that no policy minds."""
        [(name, version)] = BASE_PACKAGES.items()
        about = {"package": name, "id": flaw, "severity": "LOW", "affected": [version]}
        database = self.directory / ".cache/trivy/db/advisories.json"
        database.parent.mkdir(parents=True)
        database.write_text(json.dumps({"advisories": [about], "endOfLife": []}))

    def approve(self) -> str:
        """A project with an image of its own on the signed base; returns its commit."""
        dockerfile = f"FROM {self.base}\nUSER root\nRUN echo from-the-project > /built\n"
        files = {".forge/forge.sandbox.yml": CONTRACT, ".forge/Dockerfile": dockerfile}
        return self.add_commit(files)

    def runner(self) -> dict[str, Any]:
        return dict(self.get(f"/runners/{self.runner_id}")["capabilities"])

    def run(
        self, script: str, approved: str, **more: Any
    ) -> tuple[dict[str, Any], Mapping[str, str]]:
        """A session for any runner that meets the policy, once it has succeeded.

        :returns: the session, and what its agent said, by name.
        """
        session_id = self.dispatch(
            *("sh", "-c", script),
            policy="sandbox_required",
            runnerId=None,
            inputCommit=approved,
            approvedCommit=approved,
            resources=RESOURCES,
            limits=LIMITS,
            leaseTtlMs=120_000,
            publication={"mode": "bridge_push"},
            **more,
        )

        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.get(f"/sessions/{session_id}")
            return found if found["endedAt"] else None

        session = dict(wait_for(f"the end of {session_id}", look, SLOWLY_S))
        shown = self.diagnostics(session_id)["logTail"]
        assert (session["state"], session["failureCode"]) == ("succeeded", None), (session, shown)
        return session, dict(line.partition("=")[::2] for line in shown.splitlines())

    def verify_provenance(self, file: Path, commit: str) -> str:
        forge = [sys.executable, "-c", "from forge_cli.main import main; main()"]
        words = ["sandbox", "verify-provenance", str(file), "--key", str(self.provenance_key)]
        done = subprocess.run(
            [*forge, *words, "--commit", commit, "--documents"],
            env={"PATH": os.environ["PATH"], "HOME": str(self.directory)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@pytest.fixture(scope="module")
def site(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PublicSite]:
    with public_site(engine, tmp_path_factory.mktemp("site"), NAMES) as site:
        yield site


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[EveryGate]:
    directory = tmp_path_factory.mktemp("every-gate")
    with ExitStack() as stack:
        server = stack.enter_context(git_server(directory / "served"))
        gates = stack.enter_context(gated(engine, directory / "signer"))
        rig = EveryGate(directory / "rig", engine, module_runner_id, gates, server)
        stack.callback(_clear, rig)
        rig.start_hub(FORGE_HUB_CREDENTIALS_DIRECTORY=str(rig.credentials))
        rig.start_bridge(rig.settings(), deadline_s=SLOWLY_S)
        yield rig


def _clear(rig: EveryGate) -> None:
    rig.stop()
    for name in rig.resources():
        assert name.startswith("forge-build-cache-"), name  # it outlives its builder
        rig.engine.api.call("DELETE", f"/volumes/{name}", {"force": "1"})
    Images(rig.engine, rig.runner_id).clear()


def test_it_is_advertised_on_the_strength_of_every_gate(rig: EveryGate) -> None:
    can = rig.runner()
    assert can["sandboxRequired"] == {"ready": True, "blockers": []}, can["sandboxRequired"]
    assert (can["engine"]["rootless"], can["engine"]["cgroupVersion"]) == (True, "2")
    assert can["lsm"] == "apparmor=forge-sandbox"
    assert can["seccompDigest"].startswith("sha256:")
    for gate in ("imagePolicyEnforced", "signatureVerification", "dedicatedDisk"):
        assert can[gate] is True, gate
    assert can["publicationModes"] == ["bridge_push"]
    assert can["networkPolicies"] == ["none", "public_allowlist"]


@pytest.mark.requirement("B-35", "B-61")
def test_a_session_is_placed_runs_within_every_wall_and_its_result_is_pushed(
    rig: EveryGate,
) -> None:
    session, said = rig.run(WALLS, rig.commit, branch="forge/walls")
    assert said["lsm"] == "forge-sandbox (enforce)"
    assert "Permission denied" in said["denied"]  # which only that profile does
    assert said["seccomp"] == "2 no_new_privileges=1 effective=0000000000000000"
    assert said["memory"] == f"{192 * MIB} swap=0"
    assert said["pids"] == "48 cpu=50000 100000"
    assert said["user"] == "1000"
    commit = session["result"]["resultCommit"]
    assert session["publication"]["outcome"] == "pushed"
    assert rig.server.branch("sample", "forge/walls") == commit
    assert git(rig.server.root / "sample.git", "show", f"{commit}:VERSION") == "changed"


@pytest.mark.requirement("B-30", "B-31", "B-33", "B-39", "B-54")
def test_a_project_brings_its_image_through_every_gate_and_reaches_what_is_listed(
    rig: EveryGate, site: PublicSite
) -> None:
    approved = rig.approve()
    session, said = rig.run(WAY_OUT, approved, branch="forge/image", network=LISTED)
    assert said["built"] == "from-the-project"
    assert said["listed"] == f"site-at {PUBLIC[0]}:80"
    assert "403" in said["unlisted"]
    assert [one["host"] for one in site.arrived("http")] == ["www.example.org"]
    image = rig.told(session["sessionId"])["image.resolved"]
    envelope = rig.state_root / "attestations" / image["imageKey"] / "provenance.dsse.json"
    valid = rig.verify_provenance(envelope, approved)
    assert image["digest"] in valid
    assert "/dedicated-builder" in valid
    assert FLAW in (envelope.parent / "vulnerabilities.json").read_text()


def test_without_what_a_session_must_bring_it_is_not_placed(rig: EveryGate) -> None:
    session_id = rig.dispatch("true", policy="sandbox_required", approvedCommit=None)

    def refusal() -> dict[str, Any] | None:
        found = rig.get(f"/sessions/{session_id}")["refusals"]
        return dict(found[0]) if found else None

    refused = wait_for("the refusal", refusal)
    assert Blocker.APPROVED_COMMIT in OF_A_SESSION
    assert refused["detail"] == f"cannot meet sandbox_required: {Blocker.APPROVED_COMMIT.value}"
    rig.post(f"/sessions/{session_id}/cancel")
