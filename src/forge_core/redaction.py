"""Known secrets are masked in everything that leaves the runner, however the text is cut.

Every secret is looked for in the forms in which programs print it: as it is, with its line ends
turned into something else, each longer line alone, in JSON, in URLs, in hexadecimal and in base64
(also inside a larger base64 text, where it can stand in three alignments, and wrapped).  All that
any form covers becomes ``***``, overlapping and adjoining finds together once.

Long forms are looked for in pieces of :data:`PIECE` characters, so that a part of a secret is
found too, and so that a stream holds back little: only a tail that could be the beginning of a
piece waits for what follows.  Time is linear in the text.
"""

from __future__ import annotations

import base64
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
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

_MAX_ANCHOR: Final = 8
_BASE64_WIDTHS: Final = (64, 76)
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
        self._finder = _Finder({piece for form in forms for piece in _pieces(form)})

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
    """

    def __init__(self, pieces: set[str]) -> None:
        self._pieces = frozenset(pieces)
        self._sorted = sorted(pieces)
        self._longest = max(map(len, pieces), default=0)
        self._firsts = frozenset(piece[0] for piece in pieces)
        self._anchor = min(_MAX_ANCHOR, min(map(len, pieces), default=0))
        lengths: dict[str, set[int]] = {}
        for piece in pieces:
            lengths.setdefault(piece[: self._anchor], set()).add(len(piece))
        self._lengths = {key: tuple(sorted(each, reverse=True)) for key, each in lengths.items()}
        classes = [_class_of({key[n] for key in lengths}) for n in range(self._anchor)]
        self._candidates = re.compile(
            f"{classes[0]}(?={''.join(classes[1:])})" if classes else r"\Z."
        )

    def find(self, text: str, end: int) -> Iterator[tuple[int, int]]:
        """Start and stop of the longest piece at every position before ``end``, in order."""
        for candidate in self._candidates.finditer(text):
            start = candidate.start()
            if start >= end:
                return
            for length in self._lengths.get(text[start : start + self._anchor], ()):
                piece = text[start : start + length]  # shorter at the end of the text
                if piece in self._pieces:
                    yield start, start + len(piece)
                    break

    def undecided_from(self, text: str) -> int:
        """Where the longest tail begins that could be the beginning of a piece."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts and self._begins_a_piece(text[start:]):
                return start
        return len(text)

    def _begins_a_piece(self, tail: str) -> bool:
        """Whether a piece is longer than ``tail`` and starts with it."""
        after = bisect_right(self._sorted, tail)
        return after < len(self._sorted) and self._sorted[after].startswith(tail)


def _class_of(characters: set[str]) -> str:
    return f"[{''.join(re.escape(character) for character in sorted(characters))}]"


def _pieces(form: str) -> Iterator[str]:
    """The whole form in pieces, the last of which is as long as the others."""
    for start in range(0, max(1, len(form) - PIECE), PIECE):
        yield form[start : start + PIECE]
    yield form[-PIECE:]


def _forms(secret: str) -> Iterator[str]:
    """Everything that prints as the secret."""
    yield from _as_text(secret)
    for value in {secret, secret.strip()}:
        raw = value.encode("utf-8", "surrogatepass")
        yield json.dumps(value)[1:-1]
        yield json.dumps(value, ensure_ascii=False)[1:-1]
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
            encoded = encode(b"\0" * offset + raw).decode("ascii")[undecided:decided]
            yield encoded
            if offset == 0:
                for width in _BASE64_WIDTHS:
                    yield from _wrapped(encoded, width)


def _wrapped(encoded: str, width: int) -> Iterator[str]:
    """The lines of a base64 text that is wrapped (RFC 2045, RFC 7468)."""
    if len(encoded) > width:
        lines = (encoded[start : start + width] for start in range(0, len(encoded), width))
        yield from (line for line in lines if len(line) >= MIN_LINE)
