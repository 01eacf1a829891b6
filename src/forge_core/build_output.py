"""What a build prints, as far as it is kept: masked, and no more than so much (B-90).

The beginning says what was built and the end why it failed, so both are kept; what lies between
is counted.  Memory is bounded by what is kept.
"""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from typing import Final

from forge_core.redaction import Masker

KEPT_BYTES: Final = 1 << 20
"""Of one log, without the line that says how much is left out."""


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """A finished log.

    :param content: UTF-8, secrets masked.
    :param truncated: whether something was left out.
    """

    content: bytes
    truncated: bool

    @property
    def digest(self) -> str:
        """``sha256:…`` of the content."""
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"


class BuildOutput:
    """Takes output as it comes; never waits, never grows beyond twice what is kept."""

    def __init__(self, masker: Masker, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._masked = masker.stream()
        self._half = kept_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> None:
        """The next piece, however it is cut."""
        self._keep(self._masked.feed(self._decoder.decode(data)))

    def end(self, last_words: str = "") -> KeptOutput:
        """All of it.

        :param last_words: a line of ours after it.
        """
        self._keep(self._masked.feed(self._decoder.decode(b"", final=True)))
        if last_words:
            self._keep(self._masked.feed(f"\n{last_words}\n"))
        self._keep(self._masked.end())
        self._cut_tail()
        if not self._left_out:
            return KeptOutput(bytes(self._head + self._tail), truncated=False)
        gap = f"\n[{self._left_out} bytes left out]\n"
        return KeptOutput((_whole(self._head) + gap + _whole(self._tail)).encode(), truncated=True)

    def _keep(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:
            self._cut_tail()

    def _cut_tail(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self._left_out += surplus


def _whole(cut: bytearray) -> str:
    """Without the halves of characters at either end."""
    return cut.decode("utf-8", "ignore")
