"""The command line of the bridge (B-40).

Commands import what they need when they run: ``forge-bridge version`` and shell completion must
answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from forge_bridge import __version__
from forge_bridge.command_options import Json, SettingsFile, load, writable_state_root
from forge_bridge.drain_command import drain, undrain
from forge_bridge.reap_command import reap
from forge_bridge.terminal import (
    EXIT_FAILURE,
    EXIT_NOT_RUNNING,
    complain,
    print_json,
    print_table,
    reported,
    run_application,
    say,
)

if TYPE_CHECKING:
    from forge_bridge.status import BridgeStatus

PROGRAM = "forge-bridge"

app = typer.Typer(
    name=PROGRAM,
    help="Run sandboxed attempts for a hub on this machine. Without a command: run the bridge.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
sandbox = typer.Typer(
    help="What sandboxes have left on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(sandbox, name="sandbox")


def main() -> NoReturn:
    """Entry point of ``forge-bridge``."""
    run_application(app, PROGRAM)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"{PROGRAM} {__version__}")
        raise typer.Exit


@sandbox.callback()
def _group() -> None:
    """Keep ``reap`` a command of its own, though it is the only one."""


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    settings_file: SettingsFile = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.obj = settings_file
    if context.invoked_subcommand is None:
        run(context, settings_file)


def _state_root(context: typer.Context, settings_file: Path | None) -> Path:
    return load(context, settings_file).settings.sandbox_state_root


@app.command()
@reported
def run(context: typer.Context, settings_file: SettingsFile = None) -> None:
    """Run the bridge.

    SIGTERM or SIGINT stops it in order; a second one at once.

    Exit status: 0 stopped in order, 1 failed or stopped at once, 2 settings cannot be used, 75
    another bridge holds the lock.
    """
    from forge_bridge.settings import make_default_parents, require_to_run

    loaded = load(context, settings_file, to_run=True)
    require_to_run(loaded.settings)
    make_default_parents(loaded)
    for warning in loaded.warnings:
        complain(f"warning: {warning}")
    from forge_bridge.app import run_bridge

    raise typer.Exit(run_bridge(loaded.settings))


@app.command()
@reported
def config(context: typer.Context, settings_file: SettingsFile = None, json: Json = False) -> None:
    """Show every setting and its origin.

    The origin is default, file or environment. Sizes are shown in bytes, secrets masked.

    Exit status: 0 a bridge can start with them, 1 something keeps it from starting, 2 they cannot
    be used. Whatever is wrong is said at once.
    """
    from forge_bridge.settings import hindrances
    from forge_bridge.settings_show import effective_settings, settings_json

    loaded = load(context, settings_file, to_run=True)
    problems = [str(problem) for problem in hindrances(loaded.settings)]
    if json:
        print_json({**settings_json(loaded), "problems": problems})
    else:
        rows = [(s.row.variable, s.text, s.origin) for s in effective_settings(loaded)]
        print_table(("setting", "value", "origin"), rows)
        for warning in loaded.warnings:
            complain(f"warning: {warning}")
        for problem in problems:
            complain(f"error: {problem}")
    raise typer.Exit(EXIT_FAILURE if problems else 0)


@app.command()
@reported
def status(context: typer.Context, settings_file: SettingsFile = None, json: Json = False) -> None:
    """Show what the bridge is doing.

    Exit status: 0 it runs, 1 it is there and has told nothing for a while, 3 it does not run, or
    has only just started.
    """
    from forge_bridge.status import Liveness, liveness, read_status

    state_root = _state_root(context, settings_file)
    found = read_status(state_root)
    alive, age_ms = (Liveness.NOT_RUNNING, None) if found is None else liveness(found)
    if json:
        seen = None if found is None else found.to_wire()
        print_json({"liveness": alive.value, "ageMs": age_ms, "status": seen})
    elif found is None:
        nobody = f"no bridge has told anything in {state_root}"
        say(f"not running: {_who_holds(state_root) or nobody}")
    else:
        _print_status(found, alive, age_ms or 0)
        holder = _who_holds(state_root) if alive is Liveness.NOT_RUNNING else None
        if holder is not None:
            say(f"\n{holder}")
    codes = {Liveness.RUNNING: 0, Liveness.STALE: EXIT_FAILURE}
    raise typer.Exit(codes.get(alive, EXIT_NOT_RUNNING))


def _who_holds(state_root: Path) -> str | None:
    """Whoever works there without having told anything: a start takes some seconds."""
    from forge_bridge.state_root.locks import EngineLockHeld, probe_locks

    try:
        probe_locks(state_root)
    except EngineLockHeld as error:
        who = "another process" if error.holder_pid is None else f"process {error.holder_pid}"
        return f"{who} holds {state_root}: a bridge that starts, or a cleanup"
    return None


def _print_status(found: BridgeStatus, alive: str, age_ms: int) -> None:
    from forge_bridge.status_show import attempt_rows, headline, status_rows

    say(headline(found, alive, age_ms))
    print_table(("what", "value"), status_rows(found))
    if found.attempts:
        say("")
        print_table(("attempt", "fence", "state"), attempt_rows(found))


@app.command()
@reported
def version(json: Json = False) -> None:
    """Show the version of the bridge."""
    if json:
        print_json({"name": PROGRAM, "version": __version__})
    else:
        say(f"{PROGRAM} {__version__}")


@app.command("add-repo")
@reported
def add_repo(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the hub calls it.")],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A clone, a work tree or a bare repository.")
    ],
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where results may be pushed to; else the clone's origin."
        ),
    ] = None,
    settings_file: SettingsFile = None,
) -> None:
    """Serve the Git repository at PATH as NAME.

    The clone is only ever read. A running bridge serves it from its next connection on. Its
    results are pushed to the remote that is recorded here and to no other: an https URL.
    """
    import anyio

    from forge_bridge.repositories import (
        add_repository,
        list_repositories,
        pushable_origin,
        require_repository,
    )

    state_root = writable_state_root(context, settings_file)
    require_repository(path)
    origin = anyio.run(pushable_origin, path)
    changed = add_repository(state_root, name, path, remote=remote, origin=origin)
    found = list_repositories(state_root)[name]
    say(f"{'added' if changed else 'already there:'} {name} {found.path}")
    if found.remote is not None:
        say(f"its results can be pushed to {found.remote}")


def _known_names(context: typer.Context) -> list[str]:
    """Names for the shell's completion; silence is better than an error there."""
    from forge_bridge.repositories import list_repositories
    from forge_core.errors import ForgeError

    try:
        return list(list_repositories(_state_root(context, None)))
    except ForgeError:
        return []


@app.command("remove-repo")
@reported
def remove_repo(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="As list-repos shows it.", autocompletion=_known_names),
    ],
    settings_file: SettingsFile = None,
) -> None:
    """Stop serving NAME.

    The clone itself stays as it is. A running bridge stops from its next connection on.
    """
    from forge_bridge.repositories import remove_repository

    changed = remove_repository(writable_state_root(context, settings_file), name)
    say(f"{'removed' if changed else 'was not there:'} {name}")


@app.command("list-repos")
@reported
def list_repos(
    context: typer.Context, settings_file: SettingsFile = None, json: Json = False
) -> None:
    """List the repositories that this runner serves."""
    from forge_bridge.repositories import list_repositories

    found = list_repositories(_state_root(context, settings_file))
    if json:
        print_json({n: {"path": str(e.path), "remote": e.remote} for n, e in found.items()})
    elif found:
        rows = [(name, str(entry.path), entry.remote or "-") for name, entry in found.items()]
        print_table(("name", "path", "remote"), rows)
    else:
        say("no repositories; add one with: forge-bridge add-repo NAME PATH")


app.command()(reported(drain))
app.command()(reported(undrain))
sandbox.command()(reported(reap))
