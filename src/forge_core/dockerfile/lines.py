"""A Dockerfile as instructions: directives, continuations, here-documents, flags, JSON arrays.

Read as BuildKit reads it.  What its versions read differently, and what people cannot see on a
screen (control characters, odd spaces, marks that turn the direction of text), is a fault: a file
must build as it reads.

Source: BuildKit 0.13 and later, frontend/dockerfile/parser: parser.go, directives.go,
split_command.go, line_parsers.go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from forge_core.dockerfile.lexer import BLANKS, WordError, WordTooComplex
from forge_core.dockerfile.words import Heredoc, heredocs

MAX_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 65_535
"""Longer lines BuildKit refuses as well (bufio.MaxScanTokenSize)."""
MAX_INSTRUCTIONS: Final = 10_000
MAX_FLAGS: Final = 64

_BOM: Final = b"\xef\xbb\xbf"
_DIRECTIVE: Final = re.compile(r"#[ \t]*([A-Za-z][A-Za-z0-9]*)[ \t]*=(.+)")
_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u061c\u1680\u180e\u2000-\u200b\u200e\u200f\u2028-\u202f"
    "\u205f-\u206f\u3000\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_INSTRUCTIONS: Final = frozenset(
    {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"}
    | {"MAINTAINER", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
)
_WITH_HEREDOCS: Final = frozenset({"ADD", "COPY", "RUN", "ONBUILD"})


class Fault(Exception):  # noqa: N818 - says what is the case
    """The file cannot be read on from here.

    :param line: the first line of the instruction, counted from 1.
    :param instruction: in upper case; empty outside of any.
    """

    def __init__(self, line: int, instruction: str, why: str) -> None:
        super().__init__(why)
        self.line = line
        self.instruction = instruction


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    :param name: in upper case.
    :param flags: ``--name=value`` in front of the arguments, without their quotes.
    :param arguments: the rest, continuation lines joined.
    :param text: all of it, continuation lines joined.
    :param documents: its here-documents, with what they hold.
    """

    line: int
    name: str
    flags: tuple[str, ...] = ()
    arguments: str = ""
    text: str = ""
    documents: tuple[tuple[Heredoc, str], ...] = ()

    def options(self) -> Iterator[tuple[str, str]]:
        """Name and value of each flag."""
        for flag in self.flags:
            name, _, value = flag[2:].partition("=")
            yield name, value


@dataclass(frozen=True, slots=True)
class Directives:
    """What the comments at the very top say to the parser.

    :param syntax: the frontend that is to read the file, with its line; None: the builder's own.
    :param escape: the escape and continuation character.
    """

    syntax: tuple[int, str] | None = None
    escape: str = "\\"


def read_lines(data: bytes) -> list[str]:
    """The lines of the file, without their ends.

    :raises Fault: too large, not UTF-8, or with a character that no one sees.
    """
    if len(data) > MAX_BYTES:
        raise Fault(1, "", f"the file has {len(data)} bytes; {MAX_BYTES} are allowed")
    lines = []
    for number, raw in enumerate(data.removeprefix(_BOM).split(b"\n"), 1):
        if len(raw) > MAX_LINE_BYTES:
            raise Fault(number, "", f"the line has over {MAX_LINE_BYTES} bytes")
        try:
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise Fault(number, "", "the line is not UTF-8") from None
        if unseen := _UNSEEN.search(line):
            raise Fault(
                number,
                "",
                f"the line has the character U+{ord(unseen[0]):04X}, which is not seen on a "
                "screen; write it as an escape of the shell, or leave it out",
            )
        lines.append(line)
    if not lines[-1]:
        lines.pop()
    return lines


def read_directives(lines: list[str]) -> Directives:
    """The parser directives, which end at the first line that is none.

    Some versions know ``check``, look behind a ``#!`` line or accept blanks in front of the ``#``,
    others do not: a ``syntax`` there counts, an ``escape`` there is a fault.

    :raises Fault: a directive twice, an impossible or a doubtful escape character.
    """
    syntax: tuple[int, str] | None = None
    escape: str | None = None
    doubtful = bool(lines) and lines[0].startswith("#!")
    for number, line in enumerate(lines, 1):
        if number == 1 and doubtful:
            continue
        match = _DIRECTIVE.fullmatch(line.lstrip(BLANKS))
        if match is None or match[1].lower() not in ("syntax", "escape", "check"):
            break
        key, value = match[1].lower(), match[2].strip(BLANKS)
        doubtful = doubtful or key == "check" or line[0] in BLANKS
        if key == "syntax":
            if syntax is not None:
                raise Fault(number, "", "there is a second syntax directive")
            syntax = number, value
        elif key == "escape":
            if escape is not None or doubtful or value not in ("\\", "`"):
                raise Fault(
                    number,
                    "",
                    "builders read this escape directive differently, or not at all; write "
                    "'# escape=`' or '# escape=\\' once, in the first line or below syntax",
                )
            escape = value
    return Directives(syntax, escape or "\\")


def read_instructions(lines: list[str], escape: str) -> Iterator[Instruction]:
    """The instructions, in order.

    :raises Fault: there is none, or one that cannot be read; those before it were yielded.
    """
    at = count = 0
    while at < len(lines):
        number = at + 1
        text, is_continued = _continued(_uncommented(lines[at].lstrip(BLANKS)), escape)
        at += 1
        if not text and not is_continued:
            continue
        parts = [text]
        while is_continued and at < len(lines):
            begin = lines[at].lstrip(BLANKS)
            if begin and not begin.startswith("#"):
                text, is_continued = _continued(lines[at], escape)
                parts.append(text)
            at += 1
        instruction = _parse(number, "".join(parts))
        documents = []
        for document in _documents(instruction):
            end = _end(document, lines, at, instruction)
            documents.append((document, "\n".join(lines[at:end])))
            at = end + 1
        count += 1
        if count > MAX_INSTRUCTIONS:
            raise Fault(number, "", f"there are over {MAX_INSTRUCTIONS} instructions")
        yield replace(instruction, documents=tuple(documents))
    if not count:
        raise Fault(1, "", "the file has no instruction")


def json_array(instruction: Instruction) -> list[str] | None:
    """The arguments when they are a JSON array of strings, else None: they are for a shell.

    :raises Fault: an array of something else; one with text behind it, which builders read
        differently.
    """
    if not instruction.arguments.startswith("["):
        return None
    number: type = float  # an int may have too many digits for Python alone
    try:
        decoder = json.JSONDecoder(parse_int=number, parse_float=number)
        array, end = decoder.raw_decode(instruction.arguments)
    except RecursionError:
        array, end = [None], len(instruction.arguments)
    except ValueError:
        return None
    if not all(isinstance(item, str) and not _has_surrogate(item) for item in array):
        raise _fault(instruction, "its JSON array holds something else than strings")
    if instruction.arguments[end:].strip(BLANKS):
        raise _fault(instruction, "it has text behind its JSON array; builders differ there")
    return [str(item) for item in array]


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _uncommented(line: str) -> str:
    return "" if line.startswith("#") else line


def _continued(line: str, escape: str) -> tuple[str, bool]:
    """*line* without the escape that continues it, and whether it had one."""
    text = line.rstrip(BLANKS)
    if text.endswith(escape) and text[-2:] != escape * 2:
        return text[:-1], True
    return line, False


def _parse(number: int, text: str) -> Instruction:
    name, *others = re.split(r"[ \t]+", text.strip(BLANKS), maxsplit=1)
    upper = name.upper() if name.isascii() else ""
    if upper not in _INSTRUCTIONS:
        raise Fault(number, "", f"there is no instruction {name[:40]!r}")
    flags, arguments = _flags(number, upper, "".join(others))
    return Instruction(number, upper, flags, arguments.strip(BLANKS), text)


def _documents(instruction: Instruction) -> list[Heredoc]:
    if instruction.name not in _WITH_HEREDOCS or json_array(instruction) is not None:
        return []
    try:
        return heredocs(instruction.text)
    except (WordError, WordTooComplex) as error:
        raise _fault(instruction, f"it {error}") from error


def _end(document: Heredoc, lines: list[str], at: int, instruction: Instruction) -> int:
    """The index of the line that ends a here-document which begins at index *at*."""
    for index in range(at, len(lines)):
        line = lines[index].lstrip("\t") if document.chomp else lines[index]
        if line == document.terminator:
            return index
    raise _fault(instruction, f"its here-document has no end {document.terminator[:40]!r}")


def _flags(number: int, name: str, rest: str) -> tuple[tuple[str, ...], str]:
    """Leading words that begin with two hyphens, and what follows them."""
    flags: list[str] = []
    while len(flags) <= MAX_FLAGS:
        rest = rest.lstrip(BLANKS)
        if not rest.startswith("--"):
            return tuple(flags), rest
        word, rest = _flag(rest)
        if not word.isascii():
            raise Fault(number, name, "it has a flag with letters outside ASCII; builders differ")
        if word == "--":
            return tuple(flags), rest
        flags.append(word)
    raise Fault(number, name, f"it has over {MAX_FLAGS} flags")


def _flag(rest: str) -> tuple[str, str]:
    """The first word without quotes and backslashes (whatever the escape is), and the rest."""
    word: list[str] = []
    quote = ""
    characters = iter(enumerate(rest))
    for position, character in characters:
        if character == "\\":
            word.append(next(characters, (0, ""))[1])
        elif quote:
            if character == quote:
                quote = ""
            else:
                word.append(character)
        elif character in BLANKS:
            return "".join(word), rest[position:]
        elif character in "'\"":
            quote = character
        else:
            word.append(character)
    return "".join(word), ""


def _fault(instruction: Instruction, why: str) -> Fault:
    return Fault(instruction.line, instruction.name, why)
