"""Transcripts that a person can read, and that a test can run and write again.

A line that begins with ``>`` is a command: a time in milliseconds and words.  The lines with
``<`` below it are the answer and belong to the test; everything else is prose and stays.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator

Play = Callable[[int, str, "Words"], Iterable[str]]
"""Takes the time, the command and its words; answers in lines."""


class Words:
    """What follows the name of a command: bare words in order, and ``name=value`` pairs."""

    def __init__(self, words: Iterable[str]) -> None:
        words = list(words)
        self.bare = [word for word in words if "=" not in word]
        self.named = dict(word.split("=", 1) for word in words if "=" in word)

    def text(self, position: int, default: str | None = None) -> str | None:
        return self.bare[position] if position < len(self.bare) else default

    def number(self, name: str, default: int | None = None) -> int:
        if name in self.named:
            return int(self.named[name])
        assert default is not None, f"{name}=… is missing"
        return default


def played(transcript: str, play: Play) -> str:
    """The transcript with every answer made afresh."""
    return "".join(f"{line}\n" for line in _lines(transcript, play))


def _lines(transcript: str, play: Play) -> Iterator[str]:
    for line in transcript.splitlines():
        if line.startswith("<"):
            continue
        yield line
        if line.startswith(">"):
            at_ms, command, *words = shlex.split(line[1:])
            yield from (f"<        {answer}" for answer in play(int(at_ms), command, Words(words)))
