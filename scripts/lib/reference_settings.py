"""docs/reference/settings.md, from the settings table."""

from __future__ import annotations

from forge_bridge.settings import default_bridge_service_config
from forge_bridge.settings_show import setting_rows, shown_value
from forge_bridge.settings_table import BridgeSettings

from .reference_markdown import code, page, table

_INTRODUCTION = """\
Every setting is an environment variable. It may also stand in a settings file, which
`forge-bridge --settings FILE` or `FORGE_BRIDGE_SETTINGS_FILE` names and which has the form of
systemd's `EnvironmentFile`, so that one file serves the service and the command line
([example](../../examples/bridge.env)). The environment wins over the file, the file over the
default; an empty value counts as unset. `forge-bridge config` shows every effective value with
its origin.

All problems are reported at once, each with the variable, what is wrong and what would be right.
A `FORGE_…` variable that is no setting is a warning with the nearest name that is one."""

_FILES = """\
## The settings file and the token

One `NAME=value` a line, the value bare or as a whole in single or double quotes; lines that begin
with `#` or `;` are comments; nothing is expanded. Escapes and line continuations outside double
quotes, quotes in the middle and a name given twice are refused, because another reader of the
same file might understand them differently.

The file must belong to the account that reads it or to root, and nobody else may change it. With
`FORGE_API_TOKEN` in it, nobody else may read it either (`chmod 600`). The same holds for the file
that `FORGE_API_TOKEN_FILE` names, which is read again for every connection to the hub: replace
its content to rotate the token."""

_SIZES = """\
## Sizes

A size has a unit, because a bare number means bytes to one program and megabytes to the next:
`4` is refused. Only `FORGE_MINIMUM_WORKSPACE_BYTES` says its unit in its name and takes both.

| written | means |
| --- | --- |
| `4g`, `4GiB` | 4·2^30 bytes = 4294967296 (so do `k`, `m`, `t`, `KiB`, `MiB`, `TiB`) |
| `4GB` | 4·10^9 bytes = 4000000000 (so do `kB`, `MB`, `TB`) |
| `512B` | 512 bytes |

Whole numbers only, upper or lower case, at most one space before the unit."""

_AGREEMENT = """\
## What must agree

Settings that contradict one another are refused at the start, under all their names: a low
watermark that is not below the high one, an idle deadline beyond the hard wall, a stop deadline
that the kill grace would outlast, a cache that reserves more than it may hold, both token
variables, enforcement without the tool that enforces, a signature program without its key.

Memory and CPU have a ceiling at admission only where it is set: the engine may run on another
machine than the bridge, and its totals do not say what else that machine must carry."""


def settings_page() -> str:
    """The page."""
    return page("Settings", _INTRODUCTION, _table(), _FILES, _SIZES, _AGREEMENT)


def _table() -> str:
    defaults = default_bridge_service_config(sandbox_state_root="/")
    rows = []
    for row in setting_rows():
        default = shown_value(getattr(defaults, row.field), is_size=row.is_size)
        if row.field == "sandbox_state_root":
            default = "$XDG_STATE_HOME/forge-bridge"
        rows.append((code(row.variable), row.meaning, row.accepts, _default(default)))
    assert len(rows) == len(BridgeSettings.model_fields)
    return table(("variable", "meaning", "accepts", "default"), rows)


def _default(shown: str) -> str:
    return "none" if shown == "not set" else code(shown)
