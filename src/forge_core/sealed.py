"""A JSON object in one line that carries a checksum of its own bytes.

Whatever is durable has this form (storage.md): a line that a crash or a disk has damaged is
told from a whole one without trusting the file system, the length or the clock.  The line is
pure ASCII, so a NUL byte (which is what blocks that were never written read as) never belongs
to one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

_SEAL: Final = b',"checksum":"'
_DIGEST_CHARACTERS: Final = 16
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_TAIL_BYTES: Final = len(_SEAL) + _DIGEST_CHARACTERS + len(b'"}')


class BrokenSeal(ValueError):  # noqa: N818 - says what is the case
    """The line is not what was written."""


def encode(value: Mapping[str, Any]) -> bytes:
    """``value`` as compact ASCII JSON.

    :raises ValueError: a float that JSON does not know, or an object that contains itself.
    :raises TypeError: something that JSON does not know.
    """
    return _ENCODER.encode(value).encode("ascii")


def seal(body: bytes) -> bytes:
    """The line, newline included, for a non-empty JSON object without a ``checksum`` of its own."""
    assert body.startswith(b"{")
    assert body.endswith(b"}")
    assert len(body) > len(b"{}")
    return body[:-1] + _SEAL + _digest(body) + b'"}\n'


def unseal(line: bytes) -> dict[str, Any]:
    """The object in ``line``, with or without its newline, and without the checksum.

    :raises BrokenSeal: any byte differs from what :func:`seal` gave.
    """
    line = line.removesuffix(b"\n")
    body = line[:-_TAIL_BYTES] + b"}"
    if line[-_TAIL_BYTES:] != _SEAL + _digest(body) + b'"}':
        raise BrokenSeal("its checksum does not match")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise BrokenSeal("it is not JSON") from None
    if not isinstance(value, dict):
        raise BrokenSeal("it is not an object")
    return value


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:_DIGEST_CHARACTERS].encode("ascii")
