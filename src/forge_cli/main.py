"""``forge``: what spans the applications; it holds no logic of its own."""

from __future__ import annotations

from typing import NoReturn

import typer

from forge_bridge.terminal import run_application
from forge_cli import sandbox

PROGRAM = "forge"

app = typer.Typer(
    name=PROGRAM,
    help="Check and try this machine's sandboxes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(sandbox.app, name="sandbox")


def main() -> NoReturn:
    """Entry point of ``forge``."""
    run_application(app, PROGRAM)


@app.callback()
def _program() -> None:
    """Keep ``sandbox`` a command of its own, though it is the only one."""
