"""What the commands of the bridge have in common: the settings file, and the way to JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forge_bridge.settings import LoadedSettings

SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="Settings file, in the form of systemd's EnvironmentFile. Variables in the "
        "environment win over it. [FORGE_BRIDGE_SETTINGS_FILE]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def load(
    context: typer.Context, settings_file: Path | None, *, to_run: bool = False
) -> LoadedSettings:
    """The settings, from the file that the command or the program was given."""
    from forge_bridge.settings import load_settings

    return load_settings(settings_file or context.obj, to_run=to_run)


def writable_state_root(context: typer.Context, settings_file: Path | None) -> Path:
    """The state root, made when it is missing; raises RefusedError when it is unfit."""
    from forge_bridge.settings import make_default_parents
    from forge_bridge.state_root.directory import prepare_root

    loaded = load(context, settings_file)
    make_default_parents(loaded)
    prepare_root(loaded.settings.sandbox_state_root)
    return loaded.settings.sandbox_state_root
