"""Words of a Dockerfile: quotes, escapes and variables, by BuildKit's rules and no shell's.

BuildKit has two readers.  One cuts a line into ``NAME=value`` words and leaves the quotes in
(:func:`split_words`); the other takes quotes away and puts variables in (:func:`expand`), and
serves besides, without any variable, to find here-documents (:func:`heredocs`).

Where the value of a variable is not the file's to say, the result says so; nothing is guessed.

Source: BuildKit 0.13 and later, frontend/dockerfile: shell/lex.go, parser/line_parsers.go
(parseWords), parser/parser.go (heredocsFromLine).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from forge_core.dockerfile.lexer import BLANKS, Lexer, Lookup, WordError

_HEREDOC: Final = re.compile(r"[0-9]*<<(-?)([^<]*)")


@dataclass(frozen=True, slots=True)
class Expansion:
    """A word without quotes, and with its variables put in.

    :param unresolved: the variables that decide it and whose value is not known here.
    """

    text: str
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document, as its first line announces it.

    :param chomp: tabs in front of the terminator do not count (``<<-``).
    :param expands: variables in it are put in, where the builder and not a shell reads it.
    """

    terminator: str
    chomp: bool
    expands: bool


def expand(word: str, lookup: Lookup, *, escape: str) -> Expansion:
    """*word* as BuildKit's ``ProcessWord`` gives it.

    :raises WordError: an open quote, a bad substitution, a ``${name:?}`` without a value.
    :raises WordTooComplex: too deep, or too long when expanded.
    """
    lexer = Lexer(word, escape=escape, lookup=lookup)
    text, _ = lexer.read()
    return Expansion(text, tuple(dict.fromkeys(lexer.unresolved)))


def heredocs(line: str) -> list[Heredoc]:
    """The here-documents that begin on *line*, in order.

    A line whose quotes do not close has none: BuildKit hands it to the shell as it is.

    :raises WordError: a terminator whose own quotes do not close.
    :raises WordTooComplex: substitutions within substitutions without end.
    """
    if line.count("<") < 2:
        return []
    try:
        _, words = Lexer(line, escape="\\", raw_quotes=True, raw_escapes=True).read()
    except WordError:
        return []
    found = []
    for word in words:
        match = _HEREDOC.fullmatch(word)
        if match is not None:
            _, terminators = Lexer(match[2], escape="\\").read()
            if len(terminators) == 1:
                quoted = _quotes(match[2]) > _quotes(terminators[0])
                found.append(Heredoc(terminators[0], chomp=match[1] == "-", expands=not quoted))
    return found


def _quotes(text: str) -> int:
    return text.count("'") + text.count('"')


def split_words(text: str, *, escape: str) -> list[str]:
    """*text* cut at blanks that no quote or escape protects; both stay in the words."""
    words: list[str] = []
    word: list[str] = []
    quote = ""
    quoted = False
    characters = iter(enumerate(text, 1))
    for position, character in characters:
        if not quote and character in BLANKS:
            if quoted or word:
                words.append("".join(word))
            word, quoted = [], False
            continue
        if character == escape and quote != "'":
            if position == len(text):
                break
            word.append(character)
            _, character = next(characters)
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote, quoted = character, True
        word.append(character)
    if quoted or word:
        words.append("".join(word))
    return words
