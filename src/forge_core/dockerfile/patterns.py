"""Shell patterns inside ``${name#pattern}``, ``%`` and ``/`` of a Dockerfile, in linear steps.

``*`` is any characters, ``?`` is one, a backslash makes ``*``, ``?``, ``}``, ``/`` or itself plain;
there are no brackets.  No regular expression with a ``*`` is ever run: a pattern is cut at its
stars, and its parts are looked for from left to right.

Source: BuildKit 0.13 and later, frontend/dockerfile/shell/lex.go (convertShellPatternToRegex).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

MAX_VALUE_CHARACTERS: Final = 4_096
MAX_PATTERN_CHARACTERS: Final = 256
_STAR: Final = "*"
_ANY: Final = "."


class PatternError(ValueError):
    """BuildKit would not accept the pattern either."""


class PatternTooComplex(ValueError):  # noqa: N818 - says what is the case
    """The pattern, or what it is used on, is not one that is looked at here."""


def cut_prefix(value: str, pattern: str, longest: bool) -> str:
    """*value* without the shortest or longest beginning that *pattern* matches."""
    end = _Pattern(list(_tokens(value, pattern)), longest=longest).match(value, 0)
    return value if end is None else value[end:]


def cut_suffix(value: str, pattern: str, longest: bool) -> str:
    """*value* without the shortest or longest end that *pattern* matches."""
    tokens = list(_tokens(value, pattern))[::-1]
    end = _Pattern(tokens, longest=longest).match(value[::-1], 0)
    return value if end is None else value[: len(value) - end]


def replace(value: str, pattern: str, replacement: str, everywhere: bool) -> str:
    """*value* with the first, or every, longest match of *pattern* replaced.

    :raises PatternTooComplex: a pattern that matches nothing at all, a replacement
        with ``$`` or a backslash, which builders expand once more.
    """
    tokens = list(_tokens(value, pattern))
    if all(token == _STAR for token in tokens):
        raise PatternTooComplex("has a pattern that matches the empty text")
    if "$" in replacement or "\\" in replacement:
        raise PatternTooComplex("has a replacement with a dollar sign or a backslash")
    searched = _Pattern(tokens, longest=True)
    parts, done = [], 0
    while (found := searched.search(value, done)) is not None:
        start, end = found
        parts += [value[done:start], replacement]
        done = end
        if not everywhere:
            break
    return "".join([*parts, value[done:]])


def _tokens(value: str, pattern: str) -> Iterator[str]:
    """Regular expressions of one character each, and stars."""
    if len(value) > MAX_VALUE_CHARACTERS or len(pattern) > MAX_PATTERN_CHARACTERS:
        raise PatternTooComplex("has a pattern or a value that is too long")
    characters = iter(pattern)
    for character in characters:
        if character == "*":
            yield _STAR
        elif character == "?":
            yield _ANY
        elif character == "\\":
            escaped = next(characters, "")
            if not escaped or escaped not in "*?\\}/":
                raise PatternError(f"has a pattern with the unknown escape \\{escaped}")
            yield re.escape(escaped)
        else:
            yield re.escape(character)


class _Pattern:
    """Parts of fixed length that may have anything between them."""

    def __init__(self, tokens: list[str], *, longest: bool) -> None:
        parts: list[list[str]] = [[]]
        for token in tokens:
            if token == _STAR:
                parts.append([])
            else:
                parts[-1].append(token)
        self._lengths = [len(part) for part in parts]
        self._parts = [re.compile("".join(part)) for part in parts]
        self._longest = longest

    def match(self, value: str, start: int) -> int | None:
        """Where a match that begins at *start* ends."""
        if self._parts[0].match(value, start) is None:
            return None
        return self._rest(value, start)

    def search(self, value: str, start: int) -> tuple[int, int] | None:
        """The leftmost match from *start* on.

        When the later parts are not found after one place, they are not after a later one.
        """
        first = self._parts[0].search(value, start)
        if first is None:
            return None
        end = self._rest(value, first.start())
        return None if end is None else (first.start(), end)

    def _rest(self, value: str, start: int) -> int | None:
        end = start + self._lengths[0]
        for part in self._parts[1:]:
            found = part.search(value, end)
            if found is None:
                return None
            end = found.end()
        if self._longest and len(self._parts) > 1:
            end = self._last(value, end)
        return end

    def _last(self, value: str, end: int) -> int:
        """The end of the last part's last match; its first one ends at *end*."""
        part, length = self._parts[-1], self._lengths[-1]
        start = len(value) - length
        while part.match(value, start) is None:
            start -= 1
        return max(end, start + length)
