"""Substitutions on which a builder crashes, wherever it expands one.

Up to BuildKit 0.13, a ``#`` or ``%`` substitution with an empty pattern, as in ``${name%}``, is an
index out of range, and the whole daemon ends: two lines of a repository would take the engine from
every other attempt.  A builder expands more than it needs: the text of a step is its title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from forge_core.dockerfile.lexer import EmptyPattern, Lexer, Lookup, WordError
from forge_core.dockerfile.lines import Instruction
from forge_core.dockerfile.words import split_words

_NEVER_EXPANDED: Final = frozenset({"CMD", "ENTRYPOINT", "HEALTHCHECK", "MAINTAINER", "SHELL"})
_QUOTES: Final = "'\""
_MAX_CHARACTERS: Final = 1 << 22


def may_crash(instruction: Instruction, lookup: Lookup, *, escape: str) -> bool:
    """Whether the builder may meet an empty pattern in *instruction*.

    :param lookup: the variables at its place, as this instruction sees them.
    :raises WordTooComplex: what it expands to cannot be followed.
    """
    if instruction.name in _NEVER_EXPANDED:
        return False
    words = {instruction.text, *re.split(r"[ \t]+", instruction.arguments)}
    words.update(split_words(instruction.arguments, escape=escape))
    return any(_meets_empty_pattern(word, lookup, escape, _QUOTES) for word in words) or any(
        _meets_empty_pattern(text, lookup, "\\", "") for text in _expanded_documents(instruction)
    )


def _expanded_documents(instruction: Instruction) -> Iterator[str]:
    """Of a ``RUN``, a shell gets them as they are, but for the first line in the title."""
    for document, content in instruction.documents:
        if instruction.name == "RUN":
            yield content.lstrip().partition("\n")[0]
        elif document.expands:
            yield content


def _meets_empty_pattern(text: str, lookup: Lookup, escape: str, quotes: str) -> bool:
    if "${" not in text or not ("#" in text or "%" in text):
        return False
    lexer = Lexer(text, escape=escape, lookup=lookup, quotes=quotes, max_characters=_MAX_CHARACTERS)
    try:
        lexer.read()
    except EmptyPattern:
        return True
    except WordError:
        return False
    return False
