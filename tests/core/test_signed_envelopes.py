"""Keys and DSSE envelopes: against the specification, and against another implementation."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope as OtherEnvelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from forge_core.dsse import (
    MAX_ENVELOPE_BYTES,
    EnvelopeRefused,
    pre_authentication_encoding,
    read_envelope,
    seal,
)
from forge_core.signing import (
    KeyUnusable,
    PrivateKey,
    is_signed,
    key_id,
    read_private_key,
    read_public_key,
    sign,
)

pytestmark = pytest.mark.requirement("B-30")
KINDS = ("ed25519", "ecdsa-p256")
TYPE = "application/vnd.in-toto+json"


def new_key(kind: str = "ed25519") -> PrivateKey:
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    how = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    )


def public_pem(key: Any) -> bytes:
    return bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def changed(envelope: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(envelope), **fields}).encode()


def test_the_encoding_is_that_of_the_specification() -> None:
    """The example of DSSE itself (Protocol, Test Vectors)."""
    encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pre_authentication_encoding("ü", b"") == b"DSSEv1 2 \xc3\xbc 0 "


def test_the_specifications_own_signature_verifies() -> None:
    """DSSE gives r and s side by side; ours are DER, so they are wrapped first."""
    from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

    key = ec.EllipticCurvePublicNumbers(
        46950820868899156662930047687818585632848591499744589407958293238635476079160,
        5640078356564379163099075877009565129882514886557779369047442380624545832820,
        ec.SECP256R1(),
    ).public_key()
    raw = base64.b64decode(
        "A3JqsQGtVsJ2O2xqrI5IcnXip5GToJ3F+FnZ+O88SjtR6rDAajabZKciJTfUiHqJPcIAriEGAHTVeCUjW2JIZA=="
    )
    der = encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:]))
    envelope = {
        "payload": base64.b64encode(b"hello world").decode(),
        "payloadType": "http://example.com/HelloWorld",
        "signatures": [{"sig": base64.b64encode(der).decode()}],
    }
    found = read_envelope(json.dumps(envelope).encode())
    assert found.verified_payload(key, "http://example.com/HelloWorld") == b"hello world"


@pytest.mark.parametrize("kind", KINDS)
def test_another_implementation_accepts_ours(kind: str) -> None:
    key = new_key(kind)
    sealed = seal(TYPE, b'{"a":1}', key)
    other = OtherEnvelope.from_dict(json.loads(sealed))
    theirs = SSlibKey.from_crypto(key.public_key(), keyid=key_id(key.public_key()))
    assert set(other.verify([theirs], 1)) == {theirs.keyid}
    stranger = SSlibKey.from_crypto(new_key(kind).public_key(), keyid=theirs.keyid)
    with pytest.raises(VerificationError):
        other.verify([stranger], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_ours_accepts_that_of_another_implementation(kind: str) -> None:
    key = new_key(kind)
    other = OtherEnvelope(b"payload", TYPE, {})
    other.sign(CryptoSigner(key))
    sealed = json.dumps(other.to_dict()).encode()
    assert read_envelope(sealed).verified_payload(key.public_key(), TYPE) == b"payload"


@pytest.mark.parametrize("kind", KINDS)
@given(payload=st.binary(max_size=200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_changed_bit_passes(kind: str, payload: bytes, at: int, bit: int) -> None:
    key = new_key(kind)
    envelope = read_envelope(seal(TYPE, payload, key))
    assert envelope.verified_payload(key.public_key(), TYPE) == payload
    message = bytearray(pre_authentication_encoding(TYPE, payload))
    message[at % len(message)] ^= 1 << bit
    assert not is_signed(key.public_key(), envelope.signatures[0], bytes(message))


def test_another_key_or_another_type_is_refused() -> None:
    key = new_key()
    envelope = read_envelope(seal(TYPE, b"{}", key))
    with pytest.raises(EnvelopeRefused, match="no valid signature of the key"):
        envelope.verified_payload(new_key().public_key(), TYPE)
    with pytest.raises(EnvelopeRefused, match="no valid signature of the key"):
        envelope.verified_payload(new_key("ecdsa-p256").public_key(), TYPE)
    with pytest.raises(EnvelopeRefused, match="of the type"):
        envelope.verified_payload(key.public_key(), "application/other")


def test_a_type_cannot_be_changed_after_signing() -> None:
    key = new_key()
    moved = changed(seal("application/other", b"{}", key), payloadType=TYPE)
    with pytest.raises(EnvelopeRefused, match="no valid signature"):
        read_envelope(moved).verified_payload(key.public_key(), TYPE)


def test_one_good_signature_among_several_is_enough_and_key_ids_decide_nothing() -> None:
    ours, other = new_key(), new_key("ecdsa-p256")
    sealed = json.loads(seal(TYPE, b"{}", ours))
    good = {**sealed["signatures"][0], "keyid": "somebody else's"}
    bad = {"keyid": key_id(ours.public_key()), "sig": base64.b64encode(b"x" * 64).decode()}
    theirs = json.loads(seal(TYPE, b"{}", other))["signatures"][0]
    both = json.dumps({**sealed, "signatures": [bad, theirs, good]}).encode()
    assert read_envelope(both).verified_payload(ours.public_key(), TYPE) == b"{}"
    only_bad = json.dumps({**sealed, "signatures": [bad, theirs]}).encode()
    with pytest.raises(EnvelopeRefused):
        read_envelope(only_bad).verified_payload(ours.public_key(), TYPE)


def test_url_safe_base64_and_unknown_fields_are_read_too() -> None:
    key = new_key()
    sealed = json.loads(seal(TYPE, b"\xfb\xff\xfe", key))
    as_url = {"payload": base64.urlsafe_b64encode(b"\xfb\xff\xfe").decode(), "more": [1]}
    found = read_envelope(json.dumps({**sealed, **as_url}).encode())
    assert found.verified_payload(key.public_key(), TYPE) == b"\xfb\xff\xfe"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"payload":NaN}', "NaN"),
        (b'{"payload":"","payload":""}', "stands twice"),
        (b"{}", "signatures is not a list"),
        (b'{"signatures":[]}', "signatures is not a list"),
        (b'{"signatures":%s}' % json.dumps([{"sig": ""}] * 17).encode(), "signatures is not a li"),
        (b'{"signatures":[1],"payload":"","payloadType":"t"}', "sig is not"),
        (b'{"signatures":[{"sig":"!"}],"payload":"","payloadType":"t"}', "sig is not base64"),
        (b'{"signatures":[{"sig":""}],"payload":1,"payloadType":"t"}', "payload is not"),
        (b'{"signatures":[{"sig":""}],"payload":"YQ","payloadType":"t"}', "payload is not base64"),
        (b'{"signatures":[{"sig":""}],"payload":"","payloadType":"\\ud800"}', "payloadType is not"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":%s}' % (b"9" * 5000), "a number that cannot be used"),
        (b" " * (MAX_ENVELOPE_BYTES + 1), "more than"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_envelope_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(EnvelopeRefused, match=reason):
        read_envelope(data)


@given(st.binary(max_size=300))
def test_reading_refuses_and_never_breaks(data: bytes) -> None:
    with pytest.raises(EnvelopeRefused):
        read_envelope(data)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_read_from_pem(kind: str) -> None:
    key = new_key(kind)
    private, public = read_private_key(private_pem(key)), read_public_key(public_pem(key))
    assert is_signed(public, sign(private, b"m"), b"m")
    assert not is_signed(public, sign(private, b"m"), b"n")


def test_the_key_id_is_what_openssl_says(tmp_path: Path) -> None:
    key = new_key("ecdsa-p256")
    (tmp_path / "key.pub").write_bytes(public_pem(key))
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", tmp_path / "key.pub", "-outform", "DER"],
        capture_output=True,
        check=True,
    ).stdout
    said = subprocess.run(["sha256sum"], input=der, capture_output=True, check=True).stdout
    assert key_id(key.public_key()) == said.decode().split()[0]


def test_keys_that_cannot_be_used_are_refused_with_the_remedy() -> None:
    good = new_key()
    rsa_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    p384 = ec.generate_private_key(ec.SECP384R1())
    for pem, reason in (
        (private_pem(good, b"secret"), "it is encrypted.*openssl pkey -in"),
        (b"-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n", "it is encrypted.*Cosign"),
        (public_pem(good), "only the private one signs"),
        (private_pem(rsa_key), "only Ed25519 and ECDSA P-256.*openssl genpkey"),
        (private_pem(p384), "only Ed25519 and ECDSA P-256"),
        (b"", "no private key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key"),
    ):
        with pytest.raises(KeyUnusable, match=reason):
            read_private_key(pem)
    for pem, reason in (
        (private_pem(good), "it is a private key; keep it secret"),
        (public_pem(rsa_key), "only Ed25519 and ECDSA P-256"),
        (public_pem(p384), "only Ed25519 and ECDSA P-256"),
        (b"junk", "no public key in PEM"),
    ):
        with pytest.raises(KeyUnusable, match=reason):
            read_public_key(pem)
