"""One pass over one word of a Dockerfile: quotes, escapes, variables; BuildKit's shell/lex.go.

Without a lookup, every variable stays as it is written: that is how here-documents are found.

A pattern that comes out empty is an error of its own: up to BuildKit 0.13, ``${name%}`` ends the
builder, and with it the engine that it is built into (Docker Engine 26.1).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from forge_core.dockerfile.patterns import (
    PatternError,
    PatternTooComplex,
    cut_prefix,
    cut_suffix,
    replace,
)

BLANKS: Final = " \t"
"""All whitespace that is left inside a line; :mod:`forge_core.dockerfile.lines` refuses other."""

MAX_EXPANDED_CHARACTERS: Final = 8_192
_MAX_DEPTH: Final = 16
_MAX_SHOWN: Final = 40
_SPECIAL: Final = "@*#?-$!0"


class WordError(ValueError):
    """BuildKit would not accept the word either; the text is the end of a sentence."""


class WordTooComplex(ValueError):  # noqa: N818 - says what is the case
    """More than is looked at here; BuildKit might accept it."""


class EmptyPattern(WordTooComplex):
    """A ``#`` or ``%`` substitution whose pattern is empty."""


class Unset(Enum):
    """What a variable has instead of a value that the file gives."""

    BLANK = "unset for some builders, empty for others"
    UNKNOWN = "known to the builder only"
    KEPT = "none here: what names it stays as it is written"


Lookup = Callable[[str], str | Unset]


def _keep(_: str) -> Unset:
    return Unset.KEPT


class _Words:
    """Collects words; only what is not protected can end one."""

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._open: list[str] = []

    def add_protected(self, text: str) -> None:
        if text:
            self._open.append(text)

    def add(self, text: str) -> None:
        for character in text:
            if character in BLANKS:
                self._close()
            else:
                self._open.append(character)

    def close(self) -> list[str]:
        self._close()
        return self._closed

    def _close(self) -> None:
        if self._open:
            self._closed.append("".join(self._open))
            self._open = []


class Lexer:
    """Reads *source* once.

    :ivar unresolved: the variables that decide the result and whose value is not known.
    """

    def __init__(
        self,
        source: str,
        *,
        escape: str,
        lookup: Lookup = _keep,
        quotes: str = "'\"",
        raw_quotes: bool = False,
        raw_escapes: bool = False,
        max_characters: int = MAX_EXPANDED_CHARACTERS,
    ) -> None:
        self.unresolved: list[str] = []
        self._source = source
        self._at = 0
        self._escape = escape
        self._lookup = lookup
        self._quotes = quotes
        self._raw_quotes = raw_quotes
        self._raw_escapes = raw_escapes
        self._depth = 0
        self._room = max_characters

    def read(self) -> tuple[str, list[str]]:
        """All of it, as one text and as words."""
        return self._until("")

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _next(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _until(self, stop: str) -> tuple[str, list[str]]:
        text: list[str] = []
        words = _Words()
        while character := self._peek():
            if character == stop:
                self._at += 1
                return "".join(text), words.close()
            if character == "$":
                part = self._variable()
                words.add(part)
            elif character in self._quotes:
                part = self._single_quoted() if character == "'" else self._double_quoted()
                words.add_protected(part)
            elif character == self._escape:
                part = self._escaped()
                words.add_protected(part)
            else:
                part = self._next()
                words.add(part)
            text.append(part)
        if stop:
            raise WordError(f"has a substitution without its {stop}")
        return "".join(text), words.close()

    def _escaped(self) -> str:
        mark = self._next()
        return (mark if self._raw_escapes else "") + self._next()

    def _single_quoted(self) -> str:
        end = self._source.find("'", self._at + 1)
        if end < 0:
            raise WordError("has a single quote without its end")
        content = self._source[self._at + 1 : end]
        self._at = end + 1
        return f"'{content}'" if self._raw_quotes else content

    def _double_quoted(self) -> str:
        self._at += 1
        text = ['"'] if self._raw_quotes else []
        while (character := self._peek()) != '"':
            if not character:
                raise WordError("has a double quote without its end")
            if character == "$":
                text.append(self._variable())
                continue
            self._at += 1
            if character == self._escape:
                if self._raw_escapes:
                    text.append(character)
                if self._peek() in ('"', "$", self._escape):
                    character = self._next()
            text.append(character)
        self._at += 1
        return "".join([*text, '"'] if self._raw_quotes else text)

    def _variable(self) -> str:
        self._at += 1
        if self._peek() != "{":
            name = self._name()
            return self._value(name, f"${name}") if name else "$"
        self._at += 1
        if self._peek() in ("", "{", "}", ":"):
            raise WordError("has a bad substitution")
        name = self._name()
        modifier = self._next()
        if modifier == "}":
            return self._value(name, f"${{{name}}}")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise WordTooComplex("has too many substitutions within one another")
        text = self._replaced(name) if modifier == "/" else self._modified(name, modifier)
        self._depth -= 1
        return text

    def _name(self) -> str:
        first = self._peek()
        start = self._at
        if first.isdecimal():
            while self._peek().isdecimal():
                self._at += 1
        elif first and first in _SPECIAL:
            self._at += 1
        else:
            while (character := self._peek()) and (
                character.isalpha() or character.isdecimal() or character == "_"
            ):
                self._at += 1
        return self._source[start : self._at]

    def _value(self, name: str, as_written: str) -> str:
        value = self._lookup(name)
        if isinstance(value, Unset):
            return self._unset(name, value, as_written)
        return self._put_in(value)

    def _put_in(self, value: str) -> str:
        self._room -= len(value)
        if self._room < 0:
            raise WordTooComplex("has too many characters when expanded")
        return value

    def _unset(self, name: str, value: Unset, as_written: str) -> str:
        if value is Unset.KEPT:
            return as_written
        self.unresolved.append(name)
        return ""

    def _operand(self, stop: str, *, raw_escapes: bool) -> str:
        before = self._raw_escapes
        self._raw_escapes = raw_escapes
        text, _ = self._until(stop)
        self._raw_escapes = before
        return text

    def _modified(self, name: str, modifier: str) -> str:
        colon = ":" if modifier == ":" else ""
        if colon:
            modifier = self._next()
        elif modifier not in ("+", "-", "?", "#", "%"):
            raise WordError(f"has a substitution with the unknown modifier {modifier!r}")
        known = len(self.unresolved)
        operand = self._operand("}", raw_escapes=modifier in ("#", "%"))
        as_written = f"${{{name}{colon}{modifier}{operand}}}"
        if modifier in ("#", "%") and not operand:
            raise EmptyPattern("has an empty pattern, on which some builders crash")
        value = self._lookup(name)
        if value is Unset.KEPT:
            return as_written
        if modifier in ("#", "%"):
            return self._cut(name, value, modifier, operand)
        if modifier not in ("+", "-", "?"):
            raise WordError(f"has a substitution with the unknown modifier {modifier!r}")
        if value is Unset.UNKNOWN or (value is Unset.BLANK and not colon):
            return self._unset(name, value, as_written)
        unset = isinstance(value, Unset) or (colon != "" and value == "")
        if unset and modifier == "?":
            raise WordError(f"needs a value for {name[:_MAX_SHOWN]}")
        if unset != (modifier == "+"):
            return operand
        del self.unresolved[known:]  # what is not used need not be known
        return "" if isinstance(value, Unset) or unset else self._put_in(value)

    def _cut(self, name: str, value: str | Unset, modifier: str, pattern: str) -> str:
        if isinstance(value, Unset):
            return self._unset(name, value, "")
        longest = pattern.startswith(modifier)
        cut = cut_prefix if modifier == "#" else cut_suffix
        return self._matched(cut, value, pattern[1:] if longest else pattern, longest)

    def _replaced(self, name: str) -> str:
        everywhere = self._peek() == "/"
        if everywhere:
            self._at += 1
        pattern = self._operand("/", raw_escapes=True)
        replacement = self._operand("}", raw_escapes=True)
        as_written = f"${{{name}/{pattern}/{replacement}}}"
        value = self._lookup(name)
        if isinstance(value, Unset):
            return self._unset(name, value, as_written)
        return self._matched(replace, value, pattern, replacement, everywhere)

    def _matched(self, change: Callable[..., str], *arguments: object) -> str:
        try:
            return self._put_in(change(*arguments))
        except PatternError as error:
            raise WordError(str(error)) from error
        except PatternTooComplex as error:
            raise WordTooComplex(str(error)) from error
