"""Known secrets are masked in everything that leaves the runner, however the text is cut.

Every secret is looked for in the forms in which programs print it: as it is, with its line ends
turned into something else, each longer line alone, in JSON, in URLs, in hexadecimal and in base64
(also inside a larger base64 text, where it can stand in three alignments and be wrapped anywhere).
All that any form covers becomes ``***``, overlapping and adjoining finds together once.

Long forms are looked for in pieces of :data:`PIECE` characters, so that a part of a secret is
found too, and so that a stream holds back little: only a tail that could be the beginning of a
piece waits for what follows.  Time is linear in the text.
"""

from __future__ import annotations

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge
from typing import Final
from urllib.parse import quote, quote_plus

from forge_core.errors import RefusedError

MASK: Final = "***"
MIN_SECRET: Final = 4
"""Masking shorter values would mask everything."""

MIN_LINE: Final = 8
MIN_CUT_OFF: Final = 8
"""At the end of a text, this much of the beginning of a secret is masked as well."""

PIECE: Final = 32
MAX_SECRETS: Final = 2**20
"""All secrets of one masker together, in characters."""

MIN_BEFORE_LINE_END: Final = 4
"""Fewer characters of a wrapped base64 text can stay, so that no line waits for the next one."""

_MAX_ANCHOR: Final = 8
_LINE_END: Final = re.compile(r"\r?\n")
_ENCODE_URI_COMPONENT_SAFE: Final = "!'()*"


class Masker:
    """Masks a fixed set of secrets; immutable.

    :param secrets: their values; the empty one is ignored.
    :ivar refused: the values that are too short to be masked, which the operator should know.
    :raises RefusedError: code ``secrets_too_large``.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        values = frozenset(secrets) - {""}
        self.refused = frozenset(value for value in values if len(value.strip()) < MIN_SECRET)
        maskable = values - self.refused
        size = sum(map(len, maskable))
        if size > MAX_SECRETS:
            raise RefusedError(
                f"cannot mask secrets of {size} characters: {MAX_SECRETS} is the most",
                code="secrets_too_large",
            )
        forms = {form for value in maskable for form in _forms(value) if len(form) >= MIN_SECRET}
        pieces = {piece for form in forms for piece in _pieces(form)}
        encoded = {form for value in maskable for form in _base64_forms(value)}
        wrapped = {piece for form in encoded for piece in _pieces(form)}
        self._finder = _Finder(pieces | set(_ends_of(wrapped)), wrapped)

    def mask(self, text: str) -> str:
        """The whole text, masked."""
        stream = self.stream()
        return stream.feed(text) + stream.end()

    def stream(self) -> MaskStream:
        """For a text that comes in chunks: the same result wherever they are cut."""
        return MaskStream(self._finder)


class MaskStream:
    """One text on its way.

    What is held back is the possible beginning of a secret and nothing else, so there is no need
    to let it go when the stream pauses: that would let through a secret printed in two halves.
    """

    def __init__(self, finder: _Finder) -> None:
        self._finder = finder
        self._held = ""
        self._covered = 0
        self._is_masking = False

    def feed(self, chunk: str) -> str:
        """Take the next chunk; returns what is certain by now."""
        text = self._held + chunk
        end = self._finder.undecided_from(text)
        return self._emit(text, end, self._finder.find(text, end))

    def end(self) -> str:
        """Nothing more comes: the rest."""
        text = self._held
        found = list(self._finder.find(text, len(text)))
        cut_off = self._finder.undecided_from(text)
        if len(text) - cut_off >= MIN_CUT_OFF:
            found.append((cut_off, len(text)))
        return self._emit(text, len(text), sorted(found))

    def _emit(self, text: str, end: int, found: Iterable[tuple[int, int]]) -> str:
        """Mask what was found in ``text[:end]`` and hold back the rest.

        :param found: where secrets start, which is before ``end``, and where they end; in order.
        """
        pieces = []
        done, is_masking = self._covered, self._is_masking
        for start, stop in found:
            if stop <= done:
                continue
            if start > done:
                pieces.append(text[done:start])
                is_masking = False
            if not is_masking:
                pieces.append(MASK)
                is_masking = True
            done = stop
        if done < end:
            pieces.append(text[done:end])
            done, is_masking = end, False
        self._held, self._covered, self._is_masking = text[end:], done - end, is_masking
        return "".join(pieces)


class _Finder:
    """Finds pieces in a text.

    A regular expression of one character class a position skips what no piece begins like;
    what it leaves is looked up by its first characters.

    :param wrapped: the pieces that are found although a line ends in them.
    """

    def __init__(self, pieces: set[str], wrapped: set[str]) -> None:
        self._pieces = frozenset(pieces)
        self._wrapped = frozenset(wrapped)
        self._sorted = sorted(pieces)
        self._sorted_wrapped = sorted(wrapped)
        self._longest = max(map(len, pieces), default=0)
        self._firsts = frozenset(piece[0] for piece in pieces)
        self._anchor = min(_MAX_ANCHOR, min(map(len, pieces), default=0))
        lengths: dict[str, set[int]] = {}
        for piece in pieces:
            lengths.setdefault(piece[: self._anchor], set()).add(len(piece))
        self._lengths = {key: tuple(sorted(each, reverse=True)) for key, each in lengths.items()}
        self._candidates = _candidates(lengths)
        self._wrapped_candidates = _candidates({piece[: self._anchor] for piece in wrapped})

    def find(self, text: str, end: int) -> Iterator[tuple[int, int]]:
        """Start and stop of the longest piece at every position before ``end``, in order."""
        return merge(self._find_whole(text, end), self._find_wrapped(text, end))

    def undecided_from(self, text: str) -> int:
        """Where the longest tail begins that could be the beginning of a piece."""
        longest = self._longest + len("\r\n")
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if text[start] in self._firsts and self._begins_a_piece(text[start:]):
                return start
        return len(text)

    def _find_whole(self, text: str, end: int) -> Iterator[tuple[int, int]]:
        for candidate in self._candidates.finditer(text):
            start = candidate.start()
            if start >= end:
                return
            piece = self._longest_at(text, start, self._pieces)
            if piece:
                yield start, start + len(piece)

    def _find_wrapped(self, text: str, end: int) -> Iterator[tuple[int, int]]:
        """Pieces in which a line ends; a line that is wrapped is longer than a piece."""
        for line_end in _LINE_END.finditer(text) if self._wrapped else ():
            first, last = line_end.span()
            begin = max(0, first - self._longest + 1)
            joined = text[begin:first] + text[last : last + self._longest]
            for candidate in self._wrapped_candidates.finditer(joined):
                start = begin + candidate.start()
                if start >= end or start > first - MIN_BEFORE_LINE_END:
                    break
                piece = self._longest_at(joined, candidate.start(), self._wrapped)
                if start + len(piece) > first:
                    yield start, start + len(piece) + last - first

    def _longest_at(self, text: str, start: int, pieces: frozenset[str]) -> str:
        for length in self._lengths.get(text[start : start + self._anchor], ()):
            piece = text[start : start + length]  # shorter at the end of the text
            if piece in pieces:
                return piece
        return ""

    def _begins_a_piece(self, tail: str) -> bool:
        """Whether a piece is longer than ``tail`` and starts with it, across a line's end too."""
        if _begins_one_of(self._sorted, tail):
            return True
        if "\n" not in tail and not tail.endswith("\r"):
            return False
        head, _, rest = tail.replace("\r\n", "\n").removesuffix("\r").partition("\n")
        return len(head) >= MIN_BEFORE_LINE_END and _begins_one_of(
            self._sorted_wrapped, head + rest
        )


def _begins_one_of(pieces: Sequence[str], tail: str) -> bool:
    after = bisect_right(pieces, tail)
    return after < len(pieces) and pieces[after].startswith(tail)


def _candidates(anchors: Collection[str]) -> re.Pattern[str]:
    """Matches where each character is one that some anchor has at its place."""
    classes = [_class_of(set(characters)) for characters in zip(*anchors, strict=True)]
    return re.compile(f"{classes[0]}(?={''.join(classes[1:])})" if classes else r"\Z.")


def _class_of(characters: set[str]) -> str:
    return f"[{''.join(re.escape(character) for character in sorted(characters))}]"


def _pieces(form: str) -> Iterator[str]:
    """The whole form in pieces, the last of which is as long as the others."""
    for start in range(0, max(1, len(form) - PIECE), PIECE):
        yield form[start : start + PIECE]
    yield form[-PIECE:]


def _ends_of(wrapped: Iterable[str]) -> Iterator[str]:
    """What stands in the next line when a line ends a few characters after a piece began."""
    for piece in wrapped:
        for cut in range(1, MIN_BEFORE_LINE_END):
            if len(piece) - cut >= MIN_LINE:
                yield piece[cut:]


def _base64_forms(secret: str) -> Iterator[str]:
    for value in {secret, secret.strip()}:
        for form in _in_base64(value.encode("utf-8", "surrogatepass")):
            if len(form) >= MIN_LINE:
                yield form


def _forms(secret: str) -> Iterator[str]:
    """Everything that prints as the secret."""
    yield from _as_text(secret)
    for value in {secret, secret.strip()}:
        raw = value.encode("utf-8", "surrogatepass")
        for encoded in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
            yield encoded[1:-1]
            yield encoded[1:-1].replace("/", "\\/")
        yield from _in_urls(raw)
        yield raw.hex()
        yield raw.hex().upper()
        yield from _in_base64(raw)


def _as_text(secret: str) -> Iterator[str]:
    yield secret
    yield secret.strip()
    lines = secret.strip().splitlines()
    if len(lines) > 1:
        yield from (joint.join(lines) for joint in ("\n", "\r\n", "\\n", " ", ""))
        yield from (line.strip() for line in lines if len(line.strip()) >= MIN_LINE)


def _in_urls(raw: bytes) -> Iterator[str]:
    """RFC 3986, form encoding and ECMAScript's encodeURIComponent, in both cases of hex digits."""
    for encoded in (
        quote(raw, safe=""),
        quote(raw, safe="/"),
        quote(raw, safe=_ENCODE_URI_COMPONENT_SAFE),
        quote_plus(raw),
    ):
        yield encoded
        yield re.sub("%..", lambda escape: escape[0].lower(), encoded)


def _in_base64(raw: bytes) -> Iterator[str]:
    """Base64 (RFC 4648, both alphabets), alone or behind one or two other bytes.

    Only the characters that nothing but the secret decides: six bits each.
    """
    for offset, undecided in enumerate((0, 2, 3)):
        decided = (offset + len(raw)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(b"\0" * offset + raw).decode("ascii")[undecided:decided]
