"""Which files of a commit a build does not get to see: ``.dockerignore``, as BuildKit reads it.

All patterns run at once over each path, one character after another, as one automaton whose
states are the bits of a number: the work grows with the length of the paths, whatever a pattern
looks like.  The states behind each directory are kept for what lies in it.

Source: moby/patternmatcher (ignorefile.ReadAll, Pattern.compile, MatchesUsingParentResults), as
BuildKit's file sync walks with it; :mod:`forge_core.ignore_patterns` has the patterns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from forge_core.errors import RefusedError
from forge_core.ignore_patterns import (
    Automaton,
    OneOf,
    Pattern,
    PatternError,
    clean,
    parse_pattern,
)
from forge_core.tree_rules import printable

IGNORE_PATHS: Final = (".forge/Dockerfile.dockerignore", ".dockerignore")
"""Where it may be; the first that is there counts alone."""

MAX_BYTES: Final = 64 << 10
MAX_PATTERNS: Final = 1_000
MAX_STATES: Final = 16_384
"""Characters of all patterns together."""
MAX_MEMBERS: Final = 1_024
"""Of all different sets in brackets: each is asked about every character that is new."""
_MAX_DIRECTORIES_KEPT: Final = 4_096

_BOM: Final = "\ufeff"
_BLANKS: Final = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


@dataclass(frozen=True, slots=True)
class _Directory:
    """What is known once a directory's path is read.

    :param states: of the automaton, behind the slash.
    :param matched: bit n: pattern n matches it, or one above it.
    """

    states: int
    matched: int


@dataclass(slots=True)
class Ignore:
    """The rules of one file; an empty one lets everything through."""

    _exceptions: int
    _automaton: Automaton
    _directories: dict[str, _Directory] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes, *, name: str = IGNORE_PATHS[1]) -> Self:
        """The rules in *data*.

        :param name: the file's, for messages.
        :raises RefusedError: code ``contract_invalid``: too large, not UTF-8, or with a pattern
            that BuildKit would not take, or would take for a regular expression; with its line.
        """
        patterns = list(_read(data, name))
        if len(patterns) > MAX_PATTERNS or sum(len(p.tokens) for p in patterns) > MAX_STATES:
            raise _refused(name, f"has over {MAX_PATTERNS} patterns or {MAX_STATES} characters")
        sets = {token for p in patterns for token in p.tokens if isinstance(token, OneOf)}
        if sum(len(one.members) for one in sets if not one.is_single) > MAX_MEMBERS:
            raise _refused(name, f"has over {MAX_MEMBERS} characters in sets such as [a-z]")
        exceptions = sum(1 << number for number, p in enumerate(patterns) if p.is_exception)
        return cls(exceptions, Automaton(patterns))

    def excludes(self, path: str) -> bool:
        """Whether what lies at *path* is left out; a directory's answer does not bind its files.

        :param path: relative, with single slashes, without ``.`` and ``..``; bytes that are no
            UTF-8 as ``surrogateescape`` has them.
        """
        return self._judge(path)[0]

    def _judge(self, path: str) -> tuple[bool, int, int]:
        """Whether it is left out, which patterns count for what lies in it, and the states."""
        parent, _, name = path.rpartition("/")
        above = self._above(parent) if parent else _Directory(self._automaton.start, 0)
        states = self._automaton.read(name, above.states)
        here = self._automaton.accepted(states)
        excluded, counted = False, 0
        for number in _bits(here | above.matched):
            bit = 1 << number
            is_exception = bool(self._exceptions & bit)
            # A pattern that could not change the verdict is not asked, unless it matched above.
            if above.matched & bit or is_exception == excluded:
                counted |= bit
                excluded = not is_exception
        return excluded, counted, states

    def _above(self, directory: str) -> _Directory:
        known = self._directories.get(directory)
        if known is None:
            _, matched, states = self._judge(directory)
            known = _Directory(self._automaton.read("/", states), matched)
            if len(self._directories) >= _MAX_DIRECTORIES_KEPT:
                self._directories.clear()
            self._directories[directory] = known
        return known


def first_ignore(files: Mapping[str, bytes | None]) -> Ignore | None:
    """The rules that count; None: there is no such file, and everything is sent.

    :param files: by path; of these only :data:`IGNORE_PATHS` matter.
    :raises RefusedError: as :meth:`Ignore.parse`.
    """
    for path in IGNORE_PATHS:
        if (rules := files.get(path)) is not None:
            return Ignore.parse(rules, name=path)
    return None


def _read(data: bytes, name: str) -> Iterator[Pattern]:
    if len(data) > MAX_BYTES:
        raise _refused(name, f"has {len(data)} bytes; {MAX_BYTES} are allowed")
    try:
        text = data.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError:
        raise _refused(name, "is not UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):
        pattern = "" if line.startswith("#") else _effective(line.strip(_BLANKS))
        is_exception = pattern.startswith("!")
        if not pattern:
            continue
        try:
            yield parse_pattern(pattern[is_exception:], is_exception=is_exception)
        except PatternError as error:
            shown = printable(pattern.encode())
            raise _refused(name, f"has in line {number} {shown}, a pattern that {error}") from None


def _effective(line: str) -> str:
    """What becomes of a line before it is a pattern: cleaned twice, ``/!x`` ends as ``!x``."""
    mark = "!" if line.startswith("!") else ""
    path = line.removeprefix("!").strip(_BLANKS)
    if path:
        path = clean(path)
        path = path[1:] if len(path) > 1 and path.startswith("/") else path
    pattern = f"{mark}{path}".strip(_BLANKS)
    return pattern and clean(pattern)


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _refused(name: str, why: str) -> RefusedError:
    return RefusedError(f"cannot use {name}: it {why}", code="contract_invalid", field=name)
