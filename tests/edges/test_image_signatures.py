"""Signatures of images: the real Cosign with a real registry, and verifiers that lie."""

from __future__ import annotations

import json
import os
import textwrap
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines import TestBed
from forge_core.errors import RefusedError
from forge_edges.cosign import CosignVerifier
from forge_edges.gate_tools import ToolSetting, tool_environment
from forge_edges.process import Bounds
from forge_edges.signing_key import load_verifier_key
from image_tools import Cosign, Registry, cosign_path, guarded, own_repository

pytestmark = pytest.mark.requirement("B-31")

DIGEST = "sha256:" + "7" * 64
REFERENCE = f"registry.example/team/base@{DIGEST}"
QUICK = Bounds(timeout_ms=1_500, stdout_bytes=100_000)


@pytest.fixture(scope="module")
def cosign(tmp_path_factory: pytest.TempPathFactory) -> Cosign:
    signer = Cosign(cosign_path(), tmp_path_factory.mktemp("cosign"))
    signer.new_key("ours")
    signer.new_key("other")
    return signer


@pytest.fixture(scope="module")
def registry(testbed: TestBed) -> Iterator[Registry]:
    with own_repository() as found:
        yield found


@pytest.fixture
def setting(tmp_path: Path) -> ToolSetting:
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "FORGE_API_TOKEN": "secret"}
    return ToolSetting(tool_environment(environ), tmp_path / "scratch")


@pytest.fixture
def verifier(cosign: Cosign, setting: ToolSetting) -> Iterator[CosignVerifier]:
    key = load_verifier_key(cosign.home / "ours.pub")
    yield CosignVerifier(str(cosign.path), key, setting)
    assert_nothing_is_left(setting)


def assert_nothing_is_left(setting: ToolSetting) -> None:
    assert not setting.scratch.exists() or list(setting.scratch.iterdir()) == []


async def refusal(verifier: CosignVerifier, reference: str) -> str:
    with pytest.raises(RefusedError) as caught:
        await verifier.verify(reference)
    assert caught.value.code == "signature_invalid"
    assert str(caught.value).startswith(f"cannot trust the image {reference}: ")
    return str(caught.value)


async def test_a_signed_image_is_trusted(
    cosign: Cosign, registry: Registry, verifier: CosignVerifier
) -> None:
    image = registry.push()
    cosign.sign(image, "ours")
    await verifier.verify(image)


async def test_a_tag_beside_the_digest_changes_nothing(
    cosign: Cosign, registry: Registry, verifier: CosignVerifier
) -> None:
    image = registry.push()
    cosign.sign(image, "ours")
    repository, _, digest = image.partition("@")
    await verifier.verify(f"{repository}:12-slim@{digest}")


async def test_an_unsigned_image_is_not(registry: Registry, verifier: CosignVerifier) -> None:
    assert "it has no signature" in await refusal(verifier, registry.push())


async def test_a_signature_of_another_key_is_not(
    cosign: Cosign, registry: Registry, verifier: CosignVerifier
) -> None:
    image = registry.push()
    cosign.sign(image, "other")
    assert f"by the key {verifier.key.digest}" in await refusal(verifier, image)


async def test_a_signature_that_was_moved_to_another_image_is_not(
    cosign: Cosign, registry: Registry, verifier: CosignVerifier
) -> None:
    signed, tampered = registry.push(), registry.push()
    cosign.sign(signed, "ours")
    registry.replay_signature(signed, onto=tampered)
    assert "no signature on it is by the key" in await refusal(verifier, tampered)


async def test_an_image_that_is_not_there_is_not(
    registry: Registry, verifier: CosignVerifier
) -> None:
    absent = f"{registry.address}/{registry.repository}@{DIGEST}"
    assert "the registry has no such image" in await refusal(verifier, absent)


async def test_a_registry_that_does_not_answer_is_no_answer(verifier: CosignVerifier) -> None:
    said = await refusal(verifier, f"127.0.0.1:1/team/base@{DIGEST}")
    assert "the verifier gave no answer: exit code 1" in said
    assert "connection refused" in said


async def test_an_image_that_is_only_in_the_engine_has_no_signature(
    verifier: CosignVerifier,
) -> None:
    assert "it is in no registry" in await refusal(verifier, DIGEST)


async def test_what_is_not_pinned_is_not_even_asked_about(verifier: CosignVerifier) -> None:
    with pytest.raises(RefusedError, match="not pinned by digest"):
        await verifier.verify("registry.example/team/base:12")
    with pytest.raises(RefusedError, match="not pinned by digest"):
        await verifier.verify(f"--help@{DIGEST}")


async def test_the_key_file_may_change_and_the_key_does_not(
    cosign: Cosign, registry: Registry, setting: ToolSetting, tmp_path: Path
) -> None:
    file = tmp_path / "key.pub"
    file.write_bytes((cosign.home / "ours.pub").read_bytes())
    verifier = CosignVerifier(str(cosign.path), load_verifier_key(file), setting)
    file.write_bytes((cosign.home / "other.pub").read_bytes())
    image, foreign = registry.push(), registry.push()
    cosign.sign(image, "ours")
    cosign.sign(foreign, "other")
    await verifier.verify(image)
    assert "by the key" in await refusal(verifier, foreign)


async def test_the_operators_credentials_open_a_private_registry(
    cosign: Cosign, registry: Registry, setting: ToolSetting, tmp_path: Path
) -> None:
    signed = registry.push()
    cosign.sign(signed, "ours")
    key = load_verifier_key(cosign.home / "ours.pub")
    with guarded(registry, "runner", "s3cret") as private:
        image = signed.replace(registry.address, private.address)
        stranger = CosignVerifier(str(cosign.path), key, setting)
        assert "gave no answer" in await refusal(stranger, image)
        login = {"auths": {private.address: {"auth": b64encode(b"runner:s3cret").decode()}}}
        for variable, folder in (("HOME", tmp_path / ".docker"), ("DOCKER_CONFIG", tmp_path / "d")):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(login))
            place = str(tmp_path if variable == "HOME" else folder)
            environ = {"HOME": "/nonexistent", "PATH": os.environ["PATH"], variable: place}
            known = ToolSetting(tool_environment(environ), setting.scratch)
            await CosignVerifier(str(cosign.path), key, known).verify(image)


async def test_that_it_verifies_is_shown_with_a_key_and_against_one(
    cosign: Cosign, registry: Registry, verifier: CosignVerifier
) -> None:
    image = registry.push()
    assert "it has no signature" in await refusal_to_prove(verifier, image)
    cosign.sign(image, "ours")
    evidence = await verifier.prove(image)
    assert f"verified {image} with the key {verifier.key.digest}, and not with another" in evidence


async def refusal_to_prove(verifier: CosignVerifier, reference: str) -> str:
    with pytest.raises(RefusedError) as caught:
        await verifier.prove(reference)
    assert caught.value.code == "signature_invalid"
    return str(caught.value)


# Verifiers that are not what they should be


def program(folder: Path, body: str) -> str:
    path = folder / "verifier"
    path.write_text(f"#!/bin/sh\n{textwrap.dedent(body)}")
    path.chmod(0o755)
    return str(path)


def told(digest: str) -> str:
    claim = {"critical": {"image": {"docker-manifest-digest": digest}}}
    return json.dumps([claim])


@pytest.fixture
def lying(cosign: Cosign, setting: ToolSetting, tmp_path: Path) -> Iterator[object]:
    key = load_verifier_key(cosign.home / "ours.pub")

    def make(body: str) -> CosignVerifier:
        return CosignVerifier(program(tmp_path, body), key, setting, bounds=QUICK)

    yield make
    assert_nothing_is_left(setting)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 0", "printed no JSON"),
        ("echo all is well", "printed no JSON"),
        ("echo '[]'", "named no signature"),
        ("echo '{}'", "named no signature"),
        ("echo '[1]'", "verified something else"),
        ("""echo '[{"critical": null}]'""", "verified something else"),
        (f"echo '{told('sha256:' + '8' * 64)}'", "the verifier verified sha256:8"),
        (f"echo '{told(DIGEST)[:-1]}, 1]'", "verified something else"),
        (f"echo '{told(DIGEST)}'; exit 3", "exit code 3"),
        ("echo 'Error: \033[2Jno' >&2; exit 1", r"exit code 1: Error: \?\[2Jno"),
        ("kill -9 $$", "exit code -9"),
        ("yes '[' | head -c 1000000000", "more than 100000 bytes"),
        ("yes >&2 & sleep 60", "did not end within 1500 ms"),
        ("trap '' TERM; while :; do sleep 1; done", "did not end within 1500 ms"),
    ],
)
async def test_a_verifier_that_lies_or_hangs_proves_nothing(
    lying: object, body: str, reason: str
) -> None:
    assert callable(lying)
    with pytest.raises(RefusedError, match=reason) as caught:
        await lying(body).verify(REFERENCE)
    assert caught.value.code == "signature_invalid"


async def test_children_of_the_verifier_end_with_it(lying: object, tmp_path: Path) -> None:
    assert callable(lying)
    body = f"sleep 300 & echo $! >> {tmp_path}/pids; sleep 300 & echo $! >> {tmp_path}/pids; exit 1"
    with pytest.raises(RefusedError):
        await lying(body).verify(REFERENCE)
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cwd").exists() for pid in pids):
        assert time.monotonic() < deadline


async def test_a_verifier_that_always_agrees_is_found_out(lying: object) -> None:
    assert callable(lying)
    agrees = lying(f"echo '{told(DIGEST)}'")
    await agrees.verify(REFERENCE)
    assert "accepts a key that has signed nothing" in await refusal_to_prove(agrees, REFERENCE)


async def test_a_program_that_is_not_there_proves_nothing(
    cosign: Cosign, setting: ToolSetting, tmp_path: Path
) -> None:
    key = load_verifier_key(cosign.home / "ours.pub")
    absent = CosignVerifier(str(tmp_path / "absent"), key, setting)
    assert "cannot run" in await refusal(absent, REFERENCE)


async def test_the_verifier_is_called_as_documented_and_sees_little(
    lying: object, cosign: Cosign, tmp_path: Path
) -> None:
    assert callable(lying)
    body = f"""
        printf '%s\\n' "$@" > {tmp_path}/arguments
        env > {tmp_path}/environment
        cat "$3" > {tmp_path}/key
        pwd > {tmp_path}/directory
        echo '{told(DIGEST)}'
        echo x > leftover
        """
    verifier = lying(body)
    await verifier.verify(REFERENCE)
    directory = (tmp_path / "directory").read_text().strip()
    assert (tmp_path / "arguments").read_text().split("\n") == [
        "verify",
        "--key",
        f"{directory}/key.pub",
        "--insecure-ignore-tlog=true",
        "--output",
        "json",
        REFERENCE,
        "",
    ]
    assert (tmp_path / "key").read_bytes() == (cosign.home / "ours.pub").read_bytes()
    seen = (tmp_path / "environment").read_text()
    names = {line.partition("=")[0] for line in seen.splitlines()}
    assert names <= {"HOME", "PATH", "TMPDIR", "PWD", "_", "SHLVL", "OLDPWD"}
    assert "secret" not in seen
    assert f"TMPDIR={directory}" in seen


async def test_what_was_verified_is_remembered_and_what_was_not_is_asked_again(
    lying: object, tmp_path: Path
) -> None:
    assert callable(lying)
    asked = tmp_path / "asked"
    body = f"echo x >> {asked}; test -e {tmp_path}/good && echo '{told(DIGEST)}' || exit 10"
    verifier = lying(body)
    for _ in range(2):
        assert "no signature" in await refusal(verifier, REFERENCE)
    (tmp_path / "good").touch()
    for _ in range(3):
        await verifier.verify(REFERENCE)
    assert len(asked.read_text().split()) == 3
