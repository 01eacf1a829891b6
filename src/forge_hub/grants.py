"""Grants: opaque handles that work once (B-60, B-61).

A handle is 256 random bits.  It travels in the start packet and stays in memory; what is kept of
it is its digest, so that neither the database nor a backup of it can redeem anything.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

HANDLE_BYTES: Final = 32


class GrantKind(StrEnum):
    """What a grant is good for."""

    SECRETS = "secrets"
    PUBLICATION = "publication"


@dataclass(frozen=True, slots=True)
class Handles:
    """What one start packet carries; None: nothing of that kind was granted."""

    secrets: str | None = field(default=None, repr=False)
    publication: str | None = field(default=None, repr=False)


def new_handle() -> str:
    """A fresh handle, as text that goes into JSON as it is."""
    return secrets.token_urlsafe(HANDLE_BYTES)


def digest_of(handle: str) -> str:
    """What is kept of a handle: so many random bits need no salt."""
    return hashlib.sha256(handle.encode()).hexdigest()
