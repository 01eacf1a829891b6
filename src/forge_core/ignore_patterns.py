"""Patterns of a ``.dockerignore``, and one automaton for all of them.

``*`` and ``?`` stop at a slash, ``**`` does not, ``[a-z]`` is one character of a set, a backslash
makes the next character plain.  BuildKit makes a regular expression of each; what only that
expression would understand (``\\d``, a star in brackets) is refused, for no reader would guess it.

Source: moby/patternmatcher, Pattern.compile; Go, path/filepath (Clean, Match).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

_SET: Final = re.compile(r"\[(\^?)((?:[^][\\*?^-](?:-[^][\\*?^-])?)+)\]")
_RANGE: Final = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_SPECIAL: Final = "*?[\\"
_MAX_KEPT_CHARACTERS: Final = 4_096


class PatternError(ValueError):
    """The pattern is not one; the text is the end of a sentence."""


class Gap(Enum):
    """What may be of any length."""

    STAR = "any characters but the slash"
    DIRECTORIES = "nothing, or anything up to a slash"
    ANYTHING = "any characters"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One character: of *members* (first and last of each range), or of all others."""

    members: tuple[tuple[str, str], ...]
    is_negated: bool = False

    @property
    def is_single(self) -> bool:
        """Whether there is only one character that it takes."""
        return not self.is_negated and len(self.members) == 1 and len(set(self.members[0])) == 1

    def takes(self, character: str) -> bool:
        return any(low <= character <= high for low, high in self.members) != self.is_negated


Token = OneOf | Gap
_NO_SLASH: Final = OneOf((("/", "/"),), is_negated=True)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One line.

    :param is_exception: it began with ``!``.
    :param is_plain: it is compared as text, so that even a line break may be in what ``**`` is.
    """

    tokens: tuple[Token, ...]
    is_exception: bool
    is_plain: bool


def clean(path: str) -> str:
    """The shortest path that means the same, as Go's ``filepath.Clean`` gives it."""
    rooted = path.startswith("/")
    kept: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if part == ".." and kept and kept[-1] != "..":
            kept.pop()
        elif part != ".." or not rooted:
            kept.append(part)
    return "/" * rooted + "/".join(kept) or "."


def parse_pattern(text: str, *, is_exception: bool) -> Pattern:
    """The pattern *text*, cleaned and relative.

    :raises PatternError: it is none.
    """
    if not text or "\0" in text or "\ufeff" in text:
        raise PatternError("is empty, or has a character that no path has")
    tokens = tuple(_without_repeats(_tokens(text)))
    if text.startswith("**"):
        plain = not any(special in text[2:] for special in _SPECIAL + "]")
        if plain and not text.startswith("**/"):  # compared from its end: **.log is *.log anywhere
            tokens = (Gap.ANYTHING, *tokens[1:])
    else:
        plain = not any(special in text.removesuffix("**") for special in _SPECIAL + "]")
    if not plain and "^" in _SET.sub("", text):
        raise PatternError("has a caret beside wildcards, where builders do not take it as it is")
    return Pattern(tokens, is_exception, plain)


def _without_repeats(tokens: Iterable[Token]) -> Iterator[Token]:
    """Two equal gaps in a row are one; a thousand would be passed one by one at every step."""
    before: Token | None = None
    for token in tokens:
        if not (isinstance(token, Gap) and token is before):
            yield token
        before = token


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        character = text[at]
        if text.startswith("**", at):
            at += 3 if text.startswith("**/", at) else 2
            yield Gap.DIRECTORIES if at < len(text) else Gap.ANYTHING
            continue
        if character == "[":
            found = _SET.match(text, at)
            if found is None:
                raise PatternError("has brackets that are not a simple set such as [a-z]")
            yield _set(found)
            at = found.end()
            continue
        at += 1
        if character == "*":
            yield Gap.STAR
        elif character == "?":
            yield _NO_SLASH
        elif character == "\\":
            character = text[at : at + 1]
            if not character or character.isalnum() or ord(character) > 0x7F:
                raise PatternError("has a backslash in front of nothing that needs it")
            at += 1
            yield OneOf(((character, character),))
        else:
            yield OneOf(((character, character),))


def _set(found: re.Match[str]) -> OneOf:
    members = tuple(
        (range_[1] or range_[3], range_[2] or range_[3]) for range_ in _RANGE.finditer(found[2])
    )
    if any(low > high for low, high in members):
        raise PatternError("has a range in brackets that runs backwards")
    return OneOf(members, is_negated=bool(found[1]))


@dataclass(slots=True)
class _Masks:
    """The states (bits) in which a token waits, by what it waits for."""

    single: dict[str, int] = field(default_factory=dict)
    sets: dict[OneOf, int] = field(default_factory=dict)
    stars: int = 0
    anything: int = 0
    directories: int = 0
    inside: int = 0
    plain: int = 0


class Automaton:
    """Reads a path from left to right for all patterns together.

    State n of a pattern: its first n tokens match what was read so far.  ``Gap.DIRECTORIES`` has
    two states, the second one for what lies inside of a directory that it has begun.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._masks = _Masks()
        self._ends: dict[int, int] = {}
        start = at = 0
        for number, pattern in enumerate(patterns):
            start |= 1 << at
            for token in pattern.tokens:
                at = self._place(token, at, is_plain=pattern.is_plain)
            self._ends[1 << at] = 1 << number
            at += 1
        self._all_ends = sum(self._ends)
        self._kept: dict[str, int] = {}
        self.start = self._skip(start)

    def read(self, text: str, states: int) -> int:
        """The states after *text*."""
        masks = self._masks
        for character in text:
            stay = states & (masks.anything | masks.inside)
            enter = states & masks.directories
            if character == "\n":
                stay, enter = stay & masks.plain, enter & masks.plain
            leave = 0
            if character == "/":
                leave = (states & (masks.inside)) << 1 | enter << 2
            else:
                stay |= states & masks.stars
            step = (states & self._taking(character)) << 1
            states = self._skip(step | stay | enter << 1 | leave)
        return states

    def accepted(self, states: int) -> int:
        """Bit n: pattern n matches all that was read."""
        ends, accepted = states & self._all_ends, 0
        while ends:
            lowest = ends & -ends
            accepted |= self._ends[lowest]
            ends ^= lowest
        return accepted

    def _place(self, token: Token, at: int, *, is_plain: bool) -> int:
        masks, bit = self._masks, 1 << at
        if is_plain:
            masks.plain |= bit | bit << 1
        match token:
            case Gap.STAR:
                masks.stars |= bit
            case Gap.ANYTHING:
                masks.anything |= bit
            case Gap.DIRECTORIES:
                masks.directories |= bit
                masks.inside |= bit << 1
                return at + 2
            case OneOf(members=((single, _), *_), is_single=True):
                masks.single[single] = masks.single.get(single, 0) | bit
            case OneOf():
                masks.sets[token] = masks.sets.get(token, 0) | bit
        return at + 1

    def _skip(self, states: int) -> int:
        """With the states that are reached because a gap may be empty."""
        masks = self._masks
        before = -1
        while states != before:
            before = states
            states |= (states & (masks.stars | masks.anything)) << 1
            states |= (states & masks.directories) << 2
        return states

    def _taking(self, character: str) -> int:
        """The states that go on with *character*."""
        known = self._kept.get(character)
        if known is None:
            known = self._masks.single.get(character, 0)
            for members, bits in self._masks.sets.items():
                known |= bits * members.takes(character)
            if len(self._kept) < _MAX_KEPT_CHARACTERS:
                self._kept[character] = known
        return known
