"""Files that settings come from: the settings file and the token file.

A settings file has the form of systemd's ``EnvironmentFile`` (systemd.exec(5)): one
``NAME=value`` a line, comments after ``#`` or ``;`` at the start of a line, the value bare or in
single or double quotes, no expansion.  What systemd and a person might read differently (escapes
and continuations outside quotes, quotes in the middle, a name twice) is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from forge_bridge.settings_rules import ConfigurationError, Problem
from forge_edges.trusted_file import UntrustedFile, read_with_mode, require_private

MAX_FILE_BYTES: Final = 65_536
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\$`])*)"')
_SINGLE_QUOTED = re.compile(r"'([^'\\]*)'")


def read_settings_file(path: Path, variable: str) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """The assignments of the settings file that ``variable`` names, and what is wrong with others.

    :raises ConfigurationError: unreadable, too large, changeable by others, or readable by others
        though it holds the token.
    """
    text, mode = _read(path, variable)
    values, problems = parse_environment_file(text, str(path), variable)
    if values.get("FORGE_API_TOKEN"):
        _require_private(path, mode, variable)
    return values, problems


def read_token_file(path: Path, variable: str) -> str:
    """The content of a file that holds nothing but a secret, without surrounding white space.

    :raises ConfigurationError: unreadable, too large, or open to anybody but its owner.
    """
    text, mode = _read(path, variable)
    _require_private(path, mode, variable)
    return text.strip()


def parse_environment_file(
    text: str, where: str, variable: str
) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """Name → value of every plain assignment in ``text``; the other lines, never their values.

    :param where: the file's name, for the problems.
    """
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        match = _ASSIGNMENT.fullmatch(line)
        value = None if match is None else _unquote(match[2].strip())
        if match is None or value is None:
            wrong = "is not NAME=value, with the value bare or in quotes as a whole"
        elif match[1] in values:
            wrong = f"sets {match[1]} a second time"
        else:
            values[match[1]] = value
            continue
        problems.append(Problem((variable,), f"line {number} of {where} {wrong}", "mend the line"))
    return values, tuple(problems)


def _unquote(value: str) -> str | None:
    if double := _DOUBLE_QUOTED.fullmatch(value):
        return re.sub(r"\\(.)", r"\1", double[1])
    if single := _SINGLE_QUOTED.fullmatch(value):
        return single[1]
    return None if set(value) & set("\"'\\\0") else value


def _read(path: Path, variable: str) -> tuple[str, int]:
    try:
        content, mode = read_with_mode(path, max_bytes=MAX_FILE_BYTES)
        return content.decode(), mode
    except UntrustedFile as error:
        raise _refused(variable, error.wrong, error.right) from None
    except UnicodeDecodeError:
        raise _refused(variable, f"{path} is not UTF-8 text", "save it as UTF-8") from None


def _require_private(path: Path, mode: int, variable: str) -> None:
    try:
        require_private(path, mode)
    except UntrustedFile as error:
        raise _refused(variable, error.wrong, error.right) from None


def _refused(variable: str, wrong: str, right: str) -> ConfigurationError:
    return ConfigurationError((Problem((variable,), wrong, right),))
