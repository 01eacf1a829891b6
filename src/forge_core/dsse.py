"""Signed envelopes: DSSE 1.0 (github.com/secure-systems-lab/dsse, protocol and envelope).

What is signed is the payload with its type, so a document cannot be taken for one of another
kind.  The key id of a signature is a hint that nobody vouches for: it decides nothing here.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Final

from forge_core.errors import RefusedError
from forge_core.signing import PrivateKey, PublicKey, is_signed, key_id, sign
from forge_core.strict_json import BrokenJson, read_object

MAX_ENVELOPE_BYTES: Final = 4 << 20
MAX_SIGNATURES: Final = 16
_URL_SAFE: Final = str.maketrans("-_", "+/")


class EnvelopeRefused(RefusedError):  # noqa: N818 - says what is the case
    """No envelope, or none that the key has signed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="envelope_refused")


@dataclass(frozen=True, slots=True)
class Envelope:
    """An envelope that was read; nothing in it is proven before :meth:`verified_payload`.

    :param signatures: the raw signatures; whose they are is found out by trying.
    """

    payload_type: str
    payload: bytes
    signatures: tuple[bytes, ...]

    def verified_payload(self, key: PublicKey, payload_type: str) -> bytes:
        """The payload, once one of the signatures is by ``key`` and the type is the wanted one.

        :raises EnvelopeRefused: it is not.
        """
        message = pre_authentication_encoding(self.payload_type, self.payload)
        if not any(is_signed(key, signature, message) for signature in self.signatures):
            raise EnvelopeRefused(f"it carries no valid signature of the key {key_id(key)}")
        if self.payload_type != payload_type:
            raise EnvelopeRefused(
                f"its payload is of the type {self.payload_type[:80]!r}, not {payload_type!r}"
            )
        return self.payload


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """PAE, the bytes under the signature: both parts with their lengths in front."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload_type: str, payload: bytes, key: PrivateKey) -> bytes:
    """The envelope in JSON, with one signature."""
    signature = sign(key, pre_authentication_encoding(payload_type, payload))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [
            {"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}
        ],
    }
    return json.dumps(envelope, separators=(",", ":")).encode()


def read_envelope(data: bytes) -> Envelope:
    """Read an envelope; fields that the specification does not name are ignored, as it asks.

    :raises EnvelopeRefused: it is none, or larger than :data:`MAX_ENVELOPE_BYTES`.
    """
    try:
        found = read_object(data, max_bytes=MAX_ENVELOPE_BYTES)
    except BrokenJson as error:
        raise EnvelopeRefused(str(error)) from None
    signatures = found.get("signatures")
    if not isinstance(signatures, list) or not 0 < len(signatures) <= MAX_SIGNATURES:
        raise EnvelopeRefused(f"signatures is not a list of 1 to {MAX_SIGNATURES}")
    return Envelope(
        _text(found, "payloadType"),
        _bytes(found, "payload"),
        tuple(_bytes(signature, "sig") for signature in signatures),
    )


def _text(container: object, name: str) -> str:
    value: Any = container.get(name) if isinstance(container, dict) else None
    # JSON can spell half a surrogate pair, which is no character and has no UTF-8.
    if not isinstance(value, str) or not value.isprintable():
        raise EnvelopeRefused(f"{name} is not a printable text")
    return value


def _bytes(container: object, name: str) -> bytes:
    """Base64, standard or URL-safe: verifiers must accept either (DSSE, Protocol)."""
    text = _text(container, name)
    try:
        return base64.b64decode(text.translate(_URL_SAFE), validate=True)
    except (binascii.Error, ValueError):
        raise EnvelopeRefused(f"{name} is not base64") from None
