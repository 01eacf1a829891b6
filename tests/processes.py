"""The processes of this machine by their command lines, as proc_pid_cmdline(5) has them.

The engines of the test bed run their containers here, so that these are seen from outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def with_argument(word: str) -> list[int]:
    """The ids of those with this word as one of their arguments."""
    wanted = word.encode()
    return [process_id for process_id, line in _command_lines() if wanted in line.split(b"\0")]


def saying(text: str) -> list[int]:
    """The ids of those with this text anywhere in their command line; zombies have none."""
    return [process_id for process_id, line in _command_lines() if text.encode() in line]


def _command_lines() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        process_id = int(path.parent.name)
        if process_id == os.getpid():
            continue
        try:
            yield process_id, path.read_bytes()
        except OSError:  # it has ended
            continue
