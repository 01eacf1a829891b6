"""The MAC that binds a lease renewal to one attempt and one fence (B-70; protocol.md, Lease)."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.hmac import HMAC

KEY_BYTES: Final = 32


def lease_message(attempt_id: str, fence: int, sequence: int, ttl_ms: int, issued_at: str) -> bytes:
    """The bytes under the MAC; integers in decimal, ``issued_at`` exactly as sent."""
    parts = ("forge-lease-v1", attempt_id, str(fence), str(sequence), str(ttl_ms), issued_at)
    return "\n".join(parts).encode()


def sign_lease(key: bytes, message: bytes) -> str:
    """Base64 of HMAC-SHA256 over ``message`` under the 32-byte ``key``."""
    mac = HMAC(key, hashes.SHA256())
    mac.update(message)
    return base64.b64encode(mac.finalize()).decode()


def verify_lease(key: bytes, message: bytes, mac: str) -> bool:
    """Whether ``mac`` is exactly what :func:`sign_lease` gives; constant time in the MAC."""
    try:
        claimed = base64.b64decode(mac, validate=True)
    except (binascii.Error, ValueError):
        return False
    if base64.b64encode(claimed).decode() != mac:
        return False
    verifier = HMAC(key, hashes.SHA256())
    verifier.update(message)
    try:
        verifier.verify(claimed)
    except InvalidSignature:
        return False
    return True
