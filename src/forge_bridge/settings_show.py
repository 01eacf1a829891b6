"""Settings as people and programs see them: bytes as bytes, secrets masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pydantic import SecretStr

from forge_bridge.settings import LoadedSettings
from forge_bridge.settings_table import BridgeSettings
from forge_bridge.settings_types import Accepts
from forge_core.units import format_size

MASKED: Final = "********"


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One row of the settings table; ``is_size``: the value is a number of bytes."""

    variable: str
    field: str
    requirement: str
    meaning: str
    accepts: str
    is_size: bool


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting's value as JSON has it, as people read it, and where it came from."""

    row: SettingRow
    value: str | int | bool | None
    text: str
    origin: str


def setting_rows() -> Iterator[SettingRow]:
    """The table, in its own order."""
    for name, field in BridgeSettings.model_fields.items():
        accepts = next(item for item in field.metadata if isinstance(item, Accepts))
        about = field.json_schema_extra
        assert isinstance(about, dict)
        yield SettingRow(
            variable=str(field.validation_alias),
            field=name,
            requirement=str(about["row"]),
            meaning=field.description or "",
            accepts=accepts.phrase,
            is_size=accepts.is_size,
        )


def effective_settings(loaded: LoadedSettings) -> tuple[EffectiveSetting, ...]:
    """Every setting with its effective value and origin."""
    return tuple(
        EffectiveSetting(
            row=row,
            value=plain_value(value),
            text=shown_value(value, is_size=row.is_size),
            origin=loaded.origins[row.variable].value,
        )
        for row in setting_rows()
        for value in (getattr(loaded.settings, row.field),)
    )


def settings_json(loaded: LoadedSettings) -> Mapping[str, object]:
    """The same for programs."""
    return {
        "settings": {
            setting.row.variable: {"value": setting.value, "origin": setting.origin}
            for setting in effective_settings(loaded)
        },
        "warnings": list(loaded.warnings),
    }


def plain_value(value: object) -> str | int | bool | None:
    """The value as JSON has it; a secret as :data:`MASKED`."""
    if isinstance(value, SecretStr):
        return MASKED
    if isinstance(value, StrEnum):
        return value.value
    return value if value is None or isinstance(value, bool | int) else str(value)


def shown_value(value: object, *, is_size: bool) -> str:
    """The value as people read it; a size also in bytes, so that no unit is in doubt."""
    plain = plain_value(value)
    if plain is None:
        return "not set"
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if is_size and isinstance(plain, int):
        return f"{plain} ({format_size(plain)})"
    return str(plain)
