"""JSON that two readers cannot understand differently (RFC 8259).

A name that stands twice in an object, numbers that JSON does not know and bytes that are not
UTF-8 are refused; what was signed or is to be judged has exactly one meaning.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn


class BrokenJson(ValueError):  # noqa: N818 - says what is the case
    """It is not one JSON object; the message is the end of a sentence that names the thing."""


def read_object(data: bytes, *, max_bytes: int) -> dict[str, Any]:
    """The one object in ``data``.

    :raises BrokenJson: larger than ``max_bytes``, malformed, ambiguous, or no object.
    """
    if len(data) > max_bytes:
        raise BrokenJson(f"it has more than {max_bytes} bytes")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError:
        raise BrokenJson("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BrokenJson(f"it is not JSON: line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise BrokenJson("it is nested too deeply") from None
    except BrokenJson:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise BrokenJson(f"it holds a number that cannot be used: {error}") from None
    if not isinstance(value, dict):
        raise BrokenJson("it is not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BrokenJson(f"{name[:80]!r} stands twice in one object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise BrokenJson(f"{name} is not a number of JSON")
