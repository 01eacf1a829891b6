"""What every message has in common: naming, strictness and the scalar types of the wire."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from forge_core.errors import RefusedError

PROTOCOL_VERSION: Final = 2
MAX_INT: Final = 2**63 - 1

ID_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}\Z"
COMMIT_PATTERN: Final = r"^(?:[0-9a-f]{40}|[0-9a-f]{64})\Z"
TIME_PATTERN: Final = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d{1,9})?(?:Z|[+-]\d{2}:\d{2})\Z"

Id = Annotated[str, Field(pattern=ID_PATTERN)]
"""An id is also a file name and a label value, so nothing else is let in (protocol.md, Ids)."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=16_384)]
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
        fault.  The value itself is never part of the text: it may be a secret.
    """
    if not isinstance(payload, dict):
        raise RefusedError(
            f"cannot read {what}: the payload is not an object", code="malformed", field=""
        )
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise RefusedError(
            f"cannot read {what}: {field or 'it'}: {first['msg']}", code="malformed", field=field
        ) from None
    except RecursionError:
        raise RefusedError(
            f"cannot read {what}: nested too deeply", code="malformed", field=""
        ) from None
