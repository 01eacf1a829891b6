"""A document as a tree that knows its lines, and what is wrong in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""Where a value is: keys and, in lists, positions from 0."""

NULL: Final = "nothing (null)"
MAX_SHOWN: Final = 60


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong, and where.

    :param line: from 1.
    :param path: of the value; empty for the file as a whole.
    """

    line: int
    path: Path
    what: str

    @property
    def where(self) -> str:
        """``services[0].version``; bounded and printable, whatever the keys are."""
        parts = (f"[{step}]" if isinstance(step, int) else f".{shown(step)}" for step in self.path)
        return "".join(parts).removeprefix(".")

    def __str__(self) -> str:
        return ": ".join(part for part in (f"line {self.line}", self.where, self.what) if part)


@dataclass(frozen=True, slots=True)
class Unclear:
    """Stands for a value that readers disagree about, or that was refused already."""

    kind: str


@dataclass(frozen=True, slots=True)
class Node:
    """A value and the line of its key, or of itself where it has none.

    :param text: a scalar as it is written.
    """

    line: int
    value: str | int | bool | Unclear | tuple[Node, ...] | Mapping[str, Node]
    text: str = ""

    @property
    def kind(self) -> str:
        """What it is, in a word for people."""
        match self.value:
            case Unclear(kind):
                return kind
            case bool():
                return "true or false"
            case int():
                return "a number"
            case str():
                return "text"
            case tuple():
                return "a list"
            case _:
                return "a group of fields"

    def plain(self) -> Any:
        """The value with all that is in it; lists are tuples, unclear values stay as they are."""
        match self.value:
            case tuple(items):
                return tuple(item.plain() for item in items)
            case Mapping() as entries:
                return {key: node.plain() for key, node in entries.items()}
            case scalar:
                return scalar


@dataclass(frozen=True, slots=True)
class Document:
    """What was read.

    :param root: None where nothing could be read.
    :param faults: empty, or the document must not be used.
    """

    root: Node | None
    faults: tuple[Fault, ...]


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """Text of the document for a message: short, and nothing that moves a cursor."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
