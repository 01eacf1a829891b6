"""Keys and signatures of documents: Ed25519 (RFC 8032) and ECDSA on P-256 (FIPS 186-5).

ECDSA signs SHA-256 and its signatures are ASN.1 DER, as Cosign and securesystemslib have them.
Other kinds of keys are refused: one strong curve of each family is enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, TypeVar

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from forge_core.errors import RefusedError

PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey
PublicKey = Ed25519PublicKey | EllipticCurvePublicKey
T = TypeVar("T")

MAKE_A_KEY: Final = "openssl genpkey -algorithm ed25519 -out KEY && chmod 600 KEY"
SHOW_PUBLIC: Final = "openssl pkey -in KEY -pubout"

_KINDS: Final = "Ed25519 and ECDSA P-256"
_ECDSA: Final = ECDSA(hashes.SHA256())


class KeyUnusable(RefusedError):  # noqa: N818 - says what is the case
    """What should be a key is none that can be used; the message never repeats it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="key_unusable")


def read_private_key(pem: bytes) -> PrivateKey:
    """An unencrypted private key, PKCS #8 in PEM (RFC 5208, RFC 7468).

    :raises KeyUnusable: encrypted, of another kind, or no private key at all; with the remedy.
    """
    if b"ENCRYPTED" in pem:
        raise KeyUnusable(
            "it is encrypted, and nobody is there to type the passphrase at every start: "
            "decrypt it (openssl pkey -in ENCRYPTED -out KEY && chmod 600 KEY), or make one "
            f"({MAKE_A_KEY}); a key of Cosign's own format cannot be used"
        )
    if b"-----BEGIN PUBLIC KEY-----" in pem:
        raise KeyUnusable("it is a public key, and only the private one signs")
    key = _load(lambda: serialization.load_pem_private_key(pem, None), "private")
    if isinstance(key, Ed25519PrivateKey):
        return key
    if isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1):
        return key
    raise KeyUnusable(f"only {_KINDS} keys can sign; make one: {MAKE_A_KEY}")


def load_public(pem: bytes) -> PublicKeyTypes:
    """A public key of any kind, SubjectPublicKeyInfo in PEM (RFC 5280, RFC 7468).

    :raises KeyUnusable: no public key at all.
    """
    if b"PRIVATE KEY-----" in pem:
        raise KeyUnusable(
            f"it is a private key; keep it secret and give its public half: {SHOW_PUBLIC}"
        )
    return _load(lambda: serialization.load_pem_public_key(pem), "public")


def read_public_key(pem: bytes) -> PublicKey:
    """A public key with which documents are verified.

    :raises KeyUnusable: of another kind, or no public key at all.
    """
    key = load_public(pem)
    if isinstance(key, Ed25519PublicKey):
        return key
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return key
    raise KeyUnusable(f"only {_KINDS} keys verify here")


def key_id(key: PublicKeyTypes) -> str:
    """SHA-256 of the key's SubjectPublicKeyInfo in DER, in hex: what OpenSSL shows too."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


def sign(key: PrivateKey, message: bytes) -> bytes:
    """The signature of ``message``."""
    return key.sign(message) if isinstance(key, Ed25519PrivateKey) else key.sign(message, _ECDSA)


def is_signed(key: PublicKey, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` is one of ``message`` by the private half of ``key``."""
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, _ECDSA)
    except InvalidSignature:
        return False
    return True


def _load(load: Callable[[], T], kind: str) -> T:
    try:
        return load()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise KeyUnusable(f"it holds no {kind} key in PEM") from None
