"""docs/reference/cli.md, from the command lines themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from forge_bridge.cli import app as bridge
from forge_cli.main import app as forge
from forge_hub.cli import app as hub

from .reference_markdown import code, page, prose, table

_INTRODUCTION = """\
Results go to standard output, everything else to standard error. On a terminal results are
tables; elsewhere they are plain lines, and with `--json` they are JSON. `NO_COLOR` is honoured.
`--install-completion` installs completion for the current shell.

Exit status, where a command does not say more: 0 done, 1 could not be done, 2 wrong usage or
settings, 75 somebody else holds the lock (try again later)."""


def cli_page() -> str:
    """The page."""
    parts = []
    for name, application in (("forge-bridge", bridge), ("forge", forge), ("forge-hub", hub)):
        parts += list(_command(name, typer.main.get_command(application), 2))
    return page("Command lines", _INTRODUCTION, *parts)


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, *(str(p.metavar or p.name).upper() for p in arguments)])
    yield f"{'#' * level} {usage}\n\n{prose(command.help)}"
    rows = [(code(_names(p)), p.help or "") for p in command.params if _is_shown(p)]
    if rows:
        yield table(("argument or option", "meaning"), rows)
    for child, below in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {child}", below, level + 1)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name).upper()
    names = ", ".join(parameter.opts)
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def _is_shown(parameter: Any) -> bool:
    hidden = getattr(parameter, "hidden", False)
    return not hidden and not parameter.name.endswith("_completion")
