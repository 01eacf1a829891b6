"""What the command lines print: tables on a terminal, plain lines elsewhere, JSON on request.

Shared by ``forge-bridge`` and ``forge``.  Results go to standard output, everything else to
standard error; colour follows the terminal and ``NO_COLOR``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn, ParamSpec, TypeVar

import typer

from forge_core.errors import ForgeError, RefusedError

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_RUNNING: Final = 3
EXIT_TEMPORARY: Final = 75
"""EX_TEMPFAIL of sysexits.h: somebody else holds the lock; try again later."""

_EXIT_CODES: Final = {"configuration": EXIT_USAGE, "malformed": EXIT_USAGE}
P = ParamSpec("P")
T = TypeVar("T")


def reported(command: Callable[P, T]) -> Callable[P, T]:
    """Turn an expected error of a command into one sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RefusedError as error:
            fail(str(error), _EXIT_CODES.get(error.code, EXIT_FAILURE))
        except ForgeError as error:
            from forge_bridge.state_root.locks import EngineLockHeld

            held = isinstance(error, EngineLockHeld)
            fail(str(error), EXIT_TEMPORARY if held else EXIT_FAILURE)

    return run


def run_application(application: typer.Typer, name: str) -> NoReturn:
    """Run a command line to its exit; a bug ends in one sentence too.

    With ``FORGE_LOG_LEVEL=debug`` the sentence is preceded by the traceback.
    """
    try:
        application(prog_name=name)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the outermost frame: there is nobody to raise to
        if os.environ.get("FORGE_LOG_LEVEL", "").lower() == "debug":
            traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        complain(f"{name}: this is a bug: {type(error).__name__} at {where}: {error}")
        sys.exit(EXIT_FAILURE)
    sys.exit(0)


def fail(message: str, code: int) -> NoReturn:
    """Say why on standard error, and end."""
    complain(f"error: {message}")
    raise typer.Exit(code)


def complain(message: str) -> None:
    """One line beside the result, on standard error."""
    typer.echo(message, err=True)


def say(message: str) -> None:
    """One line of the result."""
    typer.echo(message)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that something takes a while, where somebody looks on."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


def print_json(payload: object) -> None:
    """The result for a program."""
    typer.echo(json.dumps(payload, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere one line a row, columns aligned, nothing cut."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        Console().print(table)
        return
    for row in _aligned([tuple(columns), *rows]):
        typer.echo(row)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
