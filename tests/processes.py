"""The processes of this machine by their command lines, as proc_pid_cmdline(5) has them.

The engines of the test bed run their containers here, so that these are seen from outside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def with_argument(word: str) -> list[int]:
    """The ids of those with this word as one of their arguments."""
    wanted = word.encode()
    return [process_id for process_id, line in of_all("cmdline") if wanted in line.split(b"\0")]


def saying(text: str) -> list[int]:
    """The ids of those with this text anywhere in their command line; zombies have none."""
    return [process_id for process_id, line in of_all("cmdline") if text.encode() in line]


def of_all(name: str) -> Iterator[tuple[int, bytes]]:
    """This file in the directory of every process, proc(5); what has ended or is ours is not there.

    Not ``Path.glob``: it looks for each file first, and fails where a process ends just then.
    """
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            yield int(entry), Path("/proc", entry, name).read_bytes()


def children(process_id: int) -> set[int]:
    """The processes that it has started and that are still there, proc_pid_task(5)."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process_id}/task"):
            with contextlib.suppress(OSError):
                listed = Path(f"/proc/{process_id}/task/{task}/children").read_text()
                found |= {int(child) for child in listed.split()}
    return found
