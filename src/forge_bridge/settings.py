"""Settings from the environment and a settings file: read once, all errors at once.

The environment wins over the file, the file over the defaults.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr, ValidationError

from forge_bridge.settings_file import read_settings_file, read_token_file
from forge_bridge.settings_rules import (
    ConfigurationError,
    Problem,
    SettingsConflictError,
    find_warnings,
)
from forge_bridge.settings_table import BridgeSettings, LogFormat, LogLevel
from forge_bridge.settings_types import NotAcceptedError, parse_token
from forge_edges.durable_file import disk_errors

__all__ = [
    "BridgeSettings",
    "ConfigurationError",
    "LoadedSettings",
    "LogFormat",
    "LogLevel",
    "Origin",
    "Problem",
    "default_bridge_service_config",
    "hindrances",
    "load_settings",
    "make_default_parents",
    "read_api_token",
    "require_to_run",
]

SETTINGS_FILE_VARIABLE: Final = "FORGE_BRIDGE_SETTINGS_FILE"
MAX_SHOWN_CHARACTERS: Final = 80

VARIABLES: Final[Mapping[str, str]] = {
    str(field.validation_alias): name for name, field in BridgeSettings.model_fields.items()
}
"""Environment name → field name, in the order of the table."""

NEVER_SHOWN: Final = frozenset(
    {"FORGE_API_TOKEN", "FORGE_SERVER_URL", "FORGE_SANDBOX_UPSTREAM_PROXY"}
)
"""A refused value of these is not repeated: a mistyped URL may hold a password."""

_NEEDED_TO_RUN: Final = {
    "FORGE_SERVER_URL": "the hub's base URL",
    "FORGE_TRUST_DOMAIN_ID": "the trust domain of the projects",
}
_OF_OTHERS: Final = (
    "FORGE_HUB_",
    "FORGE_TESTBED_",
    "FORGE_RUNNER_WORKER_CONFIGURATION",
    "FORGE_SANDBOX_TRANSFER_IMAGE",
)


class Origin(StrEnum):
    """Where an effective value came from."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings, the origin of each by variable, and what is probably not meant."""

    settings: BridgeSettings
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...]


def default_bridge_service_config(**overrides: Any) -> BridgeSettings:
    """The settings with their defaults, and ``overrides`` by field name (B-09).

    Neither the environment nor a file has a say.

    :raises ConfigurationError: a value is not accepted, or values contradict one another.
    """
    return _build(overrides)


def load_settings(
    settings_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    to_run: bool = False,
) -> LoadedSettings:
    """What the environment and the settings file say; an empty value counts as unset.

    :param settings_file: else the file that FORGE_BRIDGE_SETTINGS_FILE names, if any.
    :param environment: else the process's own.
    :param to_run: where they cannot be used, say too what only a running bridge needs.
    :raises ConfigurationError: with every problem that was found.
    """
    from_environment = _ours(os.environ if environment is None else environment)
    named = from_environment.pop(SETTINGS_FILE_VARIABLE, None)
    path = settings_file or (Path(named) if named else None)
    in_file, unread = read_settings_file(path, SETTINGS_FILE_VARIABLE) if path else ({}, ())
    from_file = _ours(in_file)
    merged = from_file | from_environment
    try:
        settings = _build({name: value for name, value in merged.items() if name in VARIABLES})
    except ConfigurationError as error:
        missing = _unset(merged) if to_run and not unread else ()
        raise ConfigurationError((*unread, *error.problems, *missing)) from None
    if unread:
        raise ConfigurationError(unread)
    origins = dict.fromkeys(VARIABLES, Origin.DEFAULT)
    for origin, values in ((Origin.FILE, from_file), (Origin.ENVIRONMENT, from_environment)):
        origins.update((name, origin) for name in values if name in VARIABLES)
    warnings = (*_unknown(merged), *_capped(merged, settings), *find_warnings(settings))
    return LoadedSettings(settings, origins, warnings)


def require_to_run(settings: BridgeSettings) -> None:
    """What only a running bridge needs.

    :raises ConfigurationError: no hub, no trust domain, or no readable token.
    """
    problems = hindrances(settings)
    if problems:
        raise ConfigurationError(problems)


def hindrances(settings: BridgeSettings) -> tuple[Problem, ...]:
    """What keeps a bridge with these settings from starting; blocks on the token's file."""
    problems = _unset(name for name, field in VARIABLES.items() if getattr(settings, field))
    try:
        read_api_token(settings)
    except ConfigurationError as error:
        problems += error.problems
    return problems


def make_default_parents(loaded: LoadedSettings) -> None:
    """Make the directories above a state root that nobody chose (XDG basedir spec 0.8, mode 0700).

    Above one that somebody chose nothing is made: a mistyped path must not become a directory.

    :raises RefusedError: code ``path_refused``; they cannot be made.
    """
    state_root = loaded.settings.sandbox_state_root
    if loaded.origins["FORGE_SANDBOX_STATE_ROOT"] is Origin.DEFAULT:
        with disk_errors("make", state_root.parent):
            for directory in reversed(state_root.parents):
                if not directory.exists():
                    directory.mkdir(mode=0o700, exist_ok=True)


def read_api_token(settings: BridgeSettings) -> SecretStr | None:
    """The bearer token as it is now, None where none is configured; blocks on the file.

    :raises ConfigurationError: the token file is unreadable, unsafe or holds no token.
    """
    if settings.api_token_file is None:
        return settings.api_token
    variable = "FORGE_API_TOKEN_FILE"
    try:
        return parse_token(read_token_file(settings.api_token_file, variable))
    except ValueError as error:
        wrong = f"{settings.api_token_file} holds no token: {error}"
        right = "write the token alone into it"
        raise ConfigurationError((Problem((variable,), wrong, right),)) from None


def _unset(variables: Iterable[str]) -> tuple[Problem, ...]:
    """What only a running bridge needs and is not among ``variables``."""
    known = frozenset(variables)
    return tuple(
        Problem((variable,), "it is not set", f"set it to {right}")
        for variable, right in _NEEDED_TO_RUN.items()
        if variable not in known
    )


def _ours(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name.startswith("FORGE_") and value}


def _build(values: Mapping[str, Any]) -> BridgeSettings:
    """Validate; where single values are refused, look for conflicts among the others too."""
    try:
        return BridgeSettings(**values)
    except ValidationError as error:
        problems = tuple(_problems(error, values))
    refused = {variable for problem in problems for variable in problem.variables}
    rest = {name: value for name, value in values.items() if _variable(name) not in refused}
    if len(rest) < len(values):
        try:
            BridgeSettings(**rest)
        except ValidationError as error:
            problems += tuple(
                problem
                for problem in _problems(error, rest)
                if refused.isdisjoint(problem.variables)
            )
    raise ConfigurationError(problems)


def _variable(name: str) -> str:
    field = BridgeSettings.model_fields.get(name)
    return name if field is None else str(field.validation_alias)


def _problems(error: ValidationError, values: Mapping[str, Any]) -> Iterator[Problem]:
    for fault in error.errors(include_url=False, include_input=False):
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, SettingsConflictError):
            yield from cause.problems
        elif isinstance(cause, NotAcceptedError):
            name = str(fault["loc"][0])
            yield Problem((_variable(name),), _refusal(name, values, cause), f"give {cause.right}")
        elif fault["type"] == "extra_forbidden":
            name = str(fault["loc"][0])
            yield Problem((name,), "there is no such setting", _nearest(name))
        else:
            # A default worked out from a refused value: that value's own problem is enough.
            assert fault["type"] == "default_factory_not_called", fault["type"]


def _refusal(name: str, values: Mapping[str, Any], cause: NotAcceptedError) -> str:
    if _variable(name) in NEVER_SHOWN:
        return cause.wrong
    shown = str(values.get(name))
    if len(shown) > MAX_SHOWN_CHARACTERS:
        shown = f"{shown[:MAX_SHOWN_CHARACTERS]}…"
    return f"{shown!r} cannot be used: {cause.wrong}"


def _nearest(name: str) -> str:
    known = [*VARIABLES, SETTINGS_FILE_VARIABLE] if name.isupper() else [*VARIABLES.values()]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else "remove it"


def _unknown(values: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(values):
        if name not in VARIABLES and not name.startswith(_OF_OTHERS):
            yield f"{name[:MAX_SHOWN_CHARACTERS]} is not a setting: {_nearest(name)}"


def _capped(values: Mapping[str, str], settings: BridgeSettings) -> Iterator[str]:
    for variable in ("FORGE_SANDBOX_HARD_WALL_SECONDS", "FORGE_SANDBOX_IDLE_SECONDS"):
        effective = getattr(settings, VARIABLES[variable])
        if variable in values and int(values[variable]) > effective:
            yield f"{variable}={values[variable]} counts as {effective}, the eight-hour maximum"
