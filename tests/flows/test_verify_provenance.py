"""``forge sandbox verify-provenance`` and the key files, as an operator meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_core.errors import RefusedError
from forge_core.image_ports import BuiltImage, Evidence
from forge_core.provenance import BuildPlatform, signed_provenance
from forge_edges.signing_key import load_public_key, load_signing_key, load_verifier_key

pytestmark = pytest.mark.requirement("B-30")

IMAGE_ID = "sha256:" + "1" * 64
COMMIT = "3" * 40
FORGE = (sys.executable, "-c", "from forge_cli.main import main; main()")


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True, slots=True)
class Case:
    """Evidence of one image in a directory, with the key pair of openssl that signed it."""

    directory: Path

    @property
    def file(self) -> Path:
        return self.directory / "provenance.dsse.json"

    def run(self, *arguments: str, key: str = "key.pub") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(*FORGE, "sandbox", "verify-provenance", str(self.file)),
                *("--key", str(self.directory / key), *arguments),
            ],
            env={"PATH": os.environ["PATH"], "HOME": str(self.directory)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(params=["ed25519", "ecdsa-p256"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    key = make_key(tmp_path, request.param)
    bill = Evidence("sbom.spdx.json", b'{"spdxVersion":"SPDX-2.3"}')
    image = BuiltImage(
        image_id=IMAGE_ID,
        reference="forge.invalid/image:1",
        image_key="k" * 64,
        project_id="p",
        repository="demo",
        commit=COMMIT,
        materials=(),
        parameters={},
        started_at="2026-11-29T12:00:00.000Z",
        finished_at="2026-11-29T12:01:00.000Z",
    )
    platform = BuildPlatform.of_runner("prod", "runner-1", dedicated=True, version="1")
    sealed = signed_provenance(image, platform, (bill,), load_signing_key(key))
    for document in (bill, sealed):
        (tmp_path / document.name).write_bytes(document.content)
    return Case(tmp_path)


def make_key(directory: Path, kind: str = "ed25519", name: str = "key") -> Path:
    key = directory / name
    curve = ["-pkeyopt", "ec_paramgen_curve:P-256"] if kind == "ecdsa-p256" else []
    openssl("genpkey", "-algorithm", "EC" if curve else "ed25519", *curve, "-out", key)
    key.chmod(0o600)
    openssl("pkey", "-in", key, "-pubout", "-out", directory / f"{name}.pub")
    return key


def test_a_valid_document_is_told_about(case: Case) -> None:
    done = case.run("--image", IMAGE_ID, "--commit", COMMIT, "--repository", "demo", "--documents")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("valid")
    for said in (IMAGE_ID, COMMIT, "demo", "runner-1", "sbom.spdx.json", "2026-11-29T12:00:00"):
        assert said in done.stdout
    as_json = json.loads(case.run("--image", IMAGE_ID.removeprefix("sha256:"), "--json").stdout)
    assert as_json["valid"] is True
    assert (as_json["images"], as_json["commit"]) == ([IMAGE_ID], COMMIT)


def test_what_does_not_prove_it_ends_with_one(case: Case) -> None:
    make_key(case.directory, name="other")
    for arguments, reason in (
        (("--image", "sha256:" + "2" * 64), "it is about sha256:1"),
        (("--commit", "4" * 40), "it was built from commit"),
        (("--repository", "other"), "it was built from repository 'demo'"),
    ):
        done = case.run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert reason in done.stderr
        as_json = json.loads(case.run(*arguments, "--json").stdout)
        assert as_json["valid"] is False
        assert reason in as_json["reason"]
    done = case.run(key="other.pub")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no valid signature of the key" in done.stderr


def test_a_changed_document_ends_with_one(case: Case) -> None:
    (case.directory / "sbom.spdx.json").write_bytes(b"{}")
    assert case.run().returncode == 0
    done = case.run("--documents")
    assert done.returncode == 1
    assert "sbom.spdx.json is not the one that it names" in done.stderr
    case.file.write_bytes(case.file.read_bytes().replace(b"payload", b"pay1oad", 1))
    assert case.run().returncode == 1


def test_what_cannot_be_looked_at_ends_with_two(case: Case) -> None:
    for arguments, key, reason in (
        (("--image", "latest"), "key.pub", "it is no image id"),
        (("--commit", "main"), "key.pub", "it is no full commit id"),
        ((), "absent.pub", "make it, or name another file"),
        ((), "key", "it is a private key; keep it secret"),
        ((), "sbom.spdx.json", "no public key in PEM"),
    ):
        done = case.run(*arguments, key=key)
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
    (case.directory / "sbom.spdx.json").unlink()
    assert case.run("--documents").returncode == 2
    case.file.unlink()
    done = case.run()
    assert done.returncode == 2
    assert "cannot read" in done.stderr


def test_a_signing_key_that_others_could_use_or_change_is_refused(tmp_path: Path) -> None:
    key = make_key(tmp_path)
    load_signing_key(key)
    link = tmp_path / "link"
    link.symlink_to(key)
    load_signing_key(link)  # as secret stores and systemd credentials give them
    for mode in (0o640, 0o604, 0o660, 0o602):
        key.chmod(mode)
        with pytest.raises(RefusedError, match="chmod 600"):
            load_signing_key(key)
    key.chmod(0o600)
    os.chown(key, 12345, 12345)
    with pytest.raises(RefusedError, match="belongs to another account") as caught:
        load_signing_key(key)
    assert caught.value.field == "FORGE_SANDBOX_PROVENANCE_SIGNING_KEY"
    assert caught.value.code == "configuration"


def test_files_that_are_no_keys_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    large = tmp_path / "large"
    large.write_bytes(b"x" * 20_000)
    large.chmod(0o600)
    for path, reason in (
        (fifo, "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (large, "has more than 16384 bytes"),
        (tmp_path / "absent", "No such file"),
    ):
        for load in (load_signing_key, load_public_key, load_verifier_key):
            with pytest.raises(RefusedError, match=reason):
                load(path)


def test_an_encrypted_key_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    key = tmp_path / "key"
    openssl("genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:x", "-out", key)
    key.chmod(0o600)
    with pytest.raises(RefusedError, match=r"it is encrypted.*openssl pkey -in ENCRYPTED -out KEY"):
        load_signing_key(key)


def test_the_verifiers_key_may_be_of_any_kind_but_not_private(tmp_path: Path) -> None:
    key, public = tmp_path / "rsa", tmp_path / "rsa.pub"
    openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", key)
    openssl("pkey", "-in", key, "-pubout", "-out", public)
    found = load_verifier_key(public)
    assert found.pem == public.read_bytes()
    assert found.digest.startswith("sha256:")
    key.chmod(0o600)
    with pytest.raises(RefusedError, match="it is a private key"):
        load_verifier_key(key)
