"""Sizes and numbers as people write them in settings, read strictly.

Two families of units are told apart, because they differ by seven percent at a gigabyte:

======================  =======================================  =================
written                 means                                    example
======================  =======================================  =================
``k`` ``m`` ``g`` ``t`` powers of 1024, as ``docker run -m``     ``4g``   = 4·2^30
``KiB`` … ``TiB``       powers of 1024 (IEC 80000-13)            ``4GiB`` = 4·2^30
``kB`` … ``TB``         powers of 1000 (SI)                      ``4GB``  = 4·10^9
``B``                   bytes                                    ``512B`` = 512
======================  =======================================  =================

Upper and lower case mean the same.  A number without a unit is refused: some programs read it
as bytes, some as megabytes.
"""

from __future__ import annotations

import re
from typing import Final

from forge_core.errors import RefusedError

MAX_BYTES: Final = 2**63 - 1
MAX_DIGITS: Final = 19
"""No number up to 2^63-1 has more; longer ones are refused before they are converted."""

_SIZE = re.compile(r"([0-9]+) ?([A-Za-z]*)")
_MULTIPLIERS: Final[dict[str, int]] = {
    "b": 1,
    **{letter: 1024**n for n, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", 1)},
}
_UNITS: Final = "k, m, g, t or KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (powers of 1000)"


def parse_size_bytes(text: str) -> int:
    """The number of bytes that ``text`` names, unit included.

    :raises RefusedError: code ``malformed``; no unit, an unknown one, not a whole number, or
        more than 2^63-1 bytes.
    """
    match = _SIZE.fullmatch(text)
    if match is None or len(match[1]) > MAX_DIGITS:
        raise _refused("it is not a whole number with a unit, such as 4GiB")
    digits, unit = match.groups()
    if not unit:
        raise _refused(
            f"it has no unit; write {digits}MiB for {digits}·2^20 bytes or {digits}MB for "
            f"{digits}·10^6 bytes"
        )
    multiplier = _MULTIPLIERS.get(unit.lower())
    if multiplier is None:
        raise _refused(f"{unit[:16]} is not one of the units {_UNITS}")
    size_bytes = int(digits) * multiplier
    if size_bytes > MAX_BYTES:
        raise _refused("it is more than 2^63-1 bytes")
    return size_bytes


def parse_whole_number(text: str) -> int:
    """A number in ASCII digits alone: no sign, no fraction, no exponent, no separator.

    :raises RefusedError: code ``malformed``.
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > MAX_DIGITS:
        raise _refused("it is not a whole number in plain digits")
    return int(text)


def format_size(size_bytes: int) -> str:
    """``size_bytes`` for people, in the largest binary unit that fits it.

    Exact forms are read back by :func:`parse_size_bytes`; rounded ones begin with ``≈``.
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            exact = size_bytes % size == 0
            return f"{size_bytes // size} {unit}" if exact else f"≈{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} B"


def _refused(why: str) -> RefusedError:
    return RefusedError(why, code="malformed")
