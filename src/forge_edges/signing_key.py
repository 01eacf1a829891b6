"""Keys that the operator gives by file: the one that signs, and the one that verifies images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from forge_core.errors import RefusedError
from forge_core.signing import (
    KeyUnusable,
    PrivateKey,
    PublicKey,
    key_id,
    load_public,
    read_private_key,
    read_public_key,
)
from forge_edges.trusted_file import UntrustedFile, read_trusted_file

MAX_KEY_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """The public key that a signature verifier is given, exactly as it was read.

    :param digest: ``sha256:…`` of its SubjectPublicKeyInfo; says which key it is.
    """

    pem: bytes
    digest: str


def load_signing_key(path: Path) -> PrivateKey:
    """The private key that signs provenance (B-30); blocks.

    :raises RefusedError: code ``configuration``: not owned by this account or root, open to
        others, encrypted, or no key that can sign.
    """
    try:
        return read_private_key(read_trusted_file(path, max_bytes=MAX_KEY_BYTES, private=True))
    except (UntrustedFile, KeyUnusable) as error:
        raise RefusedError(
            f"cannot sign provenance with the key {path}: {error}",
            code="configuration",
            field="FORGE_SANDBOX_PROVENANCE_SIGNING_KEY",
        ) from None


def load_public_key(path: Path) -> PublicKey:
    """A public key with which provenance is verified; blocks.

    :raises RefusedError: code ``configuration``.
    """
    try:
        return read_public_key(read_trusted_file(path, max_bytes=MAX_KEY_BYTES))
    except (UntrustedFile, KeyUnusable) as error:
        raise RefusedError(
            f"cannot verify with the key {path}: {error}", code="configuration"
        ) from None


def load_verifier_key(path: Path) -> VerifierKey:
    """The public key of image signatures (B-31), of any kind that the verifier may know; blocks.

    It is read once: what the tool gets each time are these bytes, whatever becomes of the file.

    :raises RefusedError: code ``configuration``.
    """
    try:
        return _verifier_key(read_trusted_file(path, max_bytes=MAX_KEY_BYTES))
    except (UntrustedFile, KeyUnusable) as error:
        raise RefusedError(
            f"cannot verify image signatures with the key {path}: {error}",
            code="configuration",
            field="FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY",
        ) from None


def new_verifier_key() -> VerifierKey:
    """A key that nothing was ever signed with."""
    key = generate_private_key(SECP256R1()).public_key()
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return _verifier_key(pem)


def _verifier_key(pem: bytes) -> VerifierKey:
    return VerifierKey(pem, f"sha256:{key_id(load_public(pem))}")
