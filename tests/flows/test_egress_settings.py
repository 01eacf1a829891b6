"""Upstream proxy and certificates, as the operator hands them over."""

from __future__ import annotations

import io
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from forge_bridge.egress.from_settings import custom_ca, egress_trial
from forge_bridge.egress.trust import CA_FILE, ca_archive, trust_environment
from forge_bridge.settings import default_bridge_service_config
from forge_core.errors import RefusedError
from forge_core.squid_conf import UpstreamProxy

pytestmark = pytest.mark.requirement("B-39", "B-54")

PROXY = "registry.example/squid@sha256:" + "a" * 64
ENFORCED = {"sandbox_egress_enforced": True, "sandbox_egress_proxy_image": PROXY}


async def unsigned(_references: tuple[str, ...]) -> None:
    """Signatures are not what is tried here."""


def certificate() -> bytes:
    """A certificate authority of its own."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Corporate CA")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
    )
    return builder.sign(key, None).public_bytes(serialization.Encoding.PEM)


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


async def trial_of(**more: Any) -> UpstreamProxy | None:
    settings = default_bridge_service_config(**{**ENFORCED, **more})
    trial = await egress_trial(settings, unsigned)
    assert trial is not None
    assert trial.reference == PROXY
    return trial.upstream


async def test_nothing_is_tried_that_is_not_enforced() -> None:
    settings = default_bridge_service_config(sandbox_egress_proxy_image=PROXY)
    assert await egress_trial(settings, unsigned) is None


async def test_an_upstream_proxy_with_and_without_a_login(tmp_path: Path) -> None:
    assert await trial_of() is None
    url = {"sandbox_upstream_proxy": "http://proxy.corp:3128"}
    assert await trial_of(**url) == UpstreamProxy("proxy.corp", 3128)
    login = written(tmp_path / "login", b"user:pass word:%\n")
    upstream = await trial_of(**url, sandbox_upstream_proxy_login_file=login)
    assert upstream == UpstreamProxy("proxy.corp", 3128, "user:pass word:%")


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"user:hunter2", 0o644, "open to other accounts"),
        (b"hunter2", 0o600, "does not hold user:password"),
        (b":hunter2", 0o600, "does not hold user:password"),
        (b"user:hun", 0o600, "too short to be masked"),
        (b"user:hunter2\nhttp_access allow all", 0o600, "does not hold user:password"),
        (b"user:hunter2\xff", 0o600, "does not hold user:password"),
        (b"user:" + b"s" * 2000, 0o600, "more than 1024 bytes"),
    ],
)
async def test_a_login_that_cannot_be_used_is_refused_without_being_told(
    tmp_path: Path, content: bytes, mode: int, why: str
) -> None:
    login = written(tmp_path / "login", content, mode)
    with pytest.raises(RefusedError, match=why) as refusal:
        await trial_of(
            sandbox_upstream_proxy="http://proxy.corp:3128",
            sandbox_upstream_proxy_login_file=login,
        )
    assert refusal.value.field == "FORGE_SANDBOX_UPSTREAM_PROXY_LOGIN_FILE"
    assert "hun" not in str(refusal.value)


async def test_certificates_are_read_or_refused(tmp_path: Path) -> None:
    assert await custom_ca(default_bridge_service_config()) is None
    bundle = certificate() + certificate()
    path = written(tmp_path / "ca.pem", bundle, 0o644)
    assert await custom_ca(default_bridge_service_config(sandbox_custom_ca=path)) == bundle
    for content in (b"", b"-----BEGIN CERTIFICATE-----\n", bundle.replace(b"MI", b"!!")):
        written(path, content)
        with pytest.raises(RefusedError, match="FORGE_SANDBOX_CUSTOM_CA"):
            await custom_ca(default_bridge_service_config(sandbox_custom_ca=path))


async def test_the_file_is_roots_and_the_variables_name_it() -> None:
    content = b"".join([piece async for piece in ca_archive(b"certificates")])
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        [entry] = tar.getmembers()
        assert (entry.uid, entry.gid, entry.mode) == (0, 0, 0o444)
        assert CA_FILE.endswith(f"/{entry.name}")
    assert set(trust_environment().values()) == {CA_FILE}
