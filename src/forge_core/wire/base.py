"""What every message has in common: naming, strictness and the scalar types of the wire."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from forge_core.errors import RefusedError

PROTOCOL_VERSION: Final = 2
MAX_INT: Final = 2**63 - 1

ID_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}\Z"
COMMIT_PATTERN: Final = r"^(?:[0-9a-f]{40}|[0-9a-f]{64})\Z"
TIME_PATTERN: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?"
    r"(?:Z|[+-][0-9]{2}:[0-9]{2})\Z"
)
MAX_FIELD_PATH: Final = 200


def well_formed(text: str) -> str:
    """``text`` with lone surrogates, which no UTF-8 encoder accepts, as U+FFFD.

    They are valid in JSON (RFC 8259, 8.2) and in file names as Python decodes them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _well_formed_if_text(value: object) -> object:
    return well_formed(value) if isinstance(value, str) else value


Id = Annotated[str, Field(pattern=ID_PATTERN)]
"""An id is also a file name and a label value, so nothing else is let in (protocol.md, Ids)."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, BeforeValidator(_well_formed_if_text), Field(max_length=16_384)]
"""For people, and often an error's own words, so it may hold anything."""

Commit = Annotated[str, Field(pattern=COMMIT_PATTERN)]
Timestamp = Annotated[str, Field(pattern=TIME_PATTERN)]
"""RFC 3339 with an offset; what we send is UTC with milliseconds and ``Z``."""

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_INT)]
Fence = Positive
"""Grows with each dispatch of an attempt; older ones have no say any more."""

Integer = Annotated[int, Field(strict=True, ge=-MAX_INT, le=MAX_INT)]
Flag = Annotated[bool, Field(strict=True)]

WIRE_CONFIG: Final = ConfigDict(
    frozen=True,
    alias_generator=to_camel,
    populate_by_name=True,
    extra="ignore",
    hide_input_in_errors=True,
    regex_engine="python-re",
)


class WireModel(BaseModel):
    """A message or a part of one: camelCase on the wire, unknown properties ignored."""

    model_config = WIRE_CONFIG

    def to_wire(self) -> dict[str, Any]:
        """The JSON object that goes over the wire; absent instead of null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


Model = TypeVar("Model", bound=WireModel)


def parse(model: type[Model], payload: object, *, what: str) -> Model:
    """Validate what came over the wire.

    :param what: the name of the message, for the error text.
    :raises RefusedError: code ``malformed``; ``field`` is the dotted path of the first field at
        fault.  The value itself is never part of the text, nor a key that should not be there:
        they may be secrets.
    """
    if not isinstance(payload, dict):
        raise RefusedError(
            f"cannot read {what}: the payload is not an object", code="malformed", field=""
        )
    try:
        return model.model_validate(payload, by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = _path(first["loc"])
        raise RefusedError(
            f"cannot read {what}: {field or 'it'}: {first['msg']}", code="malformed", field=field
        ) from None
    except RecursionError:
        raise RefusedError(
            f"cannot read {what}: nested too deeply", code="malformed", field=""
        ) from None


def _path(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    if parts[-1:] == ["[key]"]:
        del parts[-2]
    return well_formed(".".join(parts))[:MAX_FIELD_PATH]
