"""A look through a hostile pack before Git sees it: gitformat-pack(5).

Sizes in a pack are claims, and the deltas and streams in it can be a thousand times larger than
the pack.  Here every entry is inflated into nothing, with hard ceilings on the number of
objects, on each object and on all of them together, deltas counted by what they produce.  What
passes costs Git a bounded amount of memory, disk and time; whether it is *right* is for
``git index-pack --strict`` to say.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from forge_core.errors import RefusedError

_CHUNK_BYTES = 1 << 14
_COMMIT, _TAG, _OFS_DELTA, _REF_DELTA = 1, 4, 6, 7
_TYPES = frozenset({_COMMIT, 2, 3, _OFS_DELTA, _REF_DELTA})
_MAX_SIZE_BITS = 60
_DELTA_SIZES_BYTES = 20


@dataclass(frozen=True, slots=True)
class PackLimits:
    """Ceilings of one pack.

    :param objects: number of entries.
    :param object_bytes: of any one object, inflated.
    :param inflated_bytes: of all objects together, inflated, results of deltas included.
    """

    objects: int
    object_bytes: int
    inflated_bytes: int


def scan_pack(file: IO[bytes], *, hash_name: str, limits: PackLimits, deadline: float) -> None:
    """Read the pack in *file* from its position to its end, which must be the pack's end.

    :param hash_name: ``sha1`` or ``sha256``.
    :param deadline: ``time.monotonic()`` at which to give up, seconds.
    :raises RefusedError: ``code="output_invalid"`` with field ``format`` (no well-formed pack),
        ``objects`` (too many, a tag, or several commits), ``size`` or ``time``.
    """
    source = _Source(file, hash_name)
    if source.take(8) != b"PACK\x00\x00\x00\x02":
        raise _refused("format", "it does not hold a pack of version 2")
    count = int.from_bytes(source.take(4), "big")
    if count > limits.objects:
        raise _refused("objects", f"it has {count} objects, {limits.objects} are allowed")
    commits = total = 0
    for _ in range(count):
        if time.monotonic() > deadline:
            raise _refused("time", "its pack takes too long to read")
        kind, size = _entry_head(source)
        commits += kind == _COMMIT
        if commits > 1:
            raise _refused("objects", "it holds more than one commit")
        allowed = min(limits.object_bytes, limits.inflated_bytes - total)
        total += _entry_body(source, kind, size, allowed, deadline)
    checksum = source.digest()
    if source.take(len(checksum)) != checksum:
        raise _refused("format", "the checksum of its pack is wrong")
    if source.left():
        raise _refused("format", "something follows its pack")


class _Source:
    """Buffered reading that hashes what is consumed."""

    def __init__(self, file: IO[bytes], hash_name: str) -> None:
        self._file = file
        self._hash = hashlib.new(hash_name, usedforsecurity=False)
        self.hash_bytes = self._hash.digest_size
        self._buffer = b""

    def take(self, size: int) -> bytes:
        """Exactly *size* bytes."""
        while len(self._buffer) < size:
            self._buffer += self._more()
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._hash.update(taken)
        return taken

    def byte(self) -> int:
        """One byte."""
        return self.take(1)[0]

    def inflate(self, ceiling: int, deadline: float) -> Iterator[bytes]:
        """The pieces of one zlib stream; ends after *ceiling* bytes and one piece."""
        stream = zlib.decompressobj()
        data, self._buffer = self._buffer, b""
        done = 0
        while not stream.eof and done <= ceiling:
            if time.monotonic() > deadline:
                raise _refused("time", "its pack takes too long to inflate")
            data = data or self._more()
            try:
                piece = stream.decompress(data, _CHUNK_BYTES)
            except zlib.error:
                raise _refused("format", "an object in its pack cannot be inflated") from None
            rest = stream.unused_data if stream.eof else stream.unconsumed_tail
            self._hash.update(data[: len(data) - len(rest)])
            data = rest
            done += len(piece)
            yield piece
        self._buffer = data

    def digest(self) -> bytes:
        """Hash of all that was consumed."""
        return self._hash.digest()

    def left(self) -> bool:
        """Whether anything follows."""
        return bool(self._buffer or self._file.read(1))

    def _more(self) -> bytes:
        data = self._file.read(_CHUNK_BYTES)
        if not data:
            raise _refused("format", "its pack is cut short")
        return data


def _entry_head(source: _Source) -> tuple[int, int]:
    byte = source.byte()
    kind, size, shift = (byte >> 4) & 7, byte & 15, 4
    while byte & 0x80:
        byte = source.byte()
        size |= (byte & 0x7F) << shift
        shift += 7
        if shift > _MAX_SIZE_BITS:
            raise _refused("format", "an object in its pack claims an impossible size")
    if kind == _TAG:
        raise _refused("objects", "it holds a tag")
    if kind not in _TYPES:
        raise _refused("format", f"its pack has an object of unknown type {kind}")
    if kind == _REF_DELTA:
        source.take(source.hash_bytes)
    elif kind == _OFS_DELTA:
        for _ in range(_MAX_SIZE_BITS // 7 + 1):
            if not source.byte() & 0x80:
                return kind, size
        raise _refused("format", "a delta in its pack has an impossible base")
    return kind, size


def _entry_body(source: _Source, kind: int, size: int, allowed: int, deadline: float) -> int:
    """Inflated bytes of one entry; of a delta, with what it produces."""
    if size > allowed:
        raise _refused("size", f"it inflates to more than allowed ({size} bytes in one object)")
    inflated, start = 0, b""
    for piece in source.inflate(size, deadline):
        inflated += len(piece)
        if len(start) < _DELTA_SIZES_BYTES:
            start += piece[:_DELTA_SIZES_BYTES]
    if inflated != size:
        raise _refused("format", "an object in its pack is not as long as it claims")
    if kind in (_OFS_DELTA, _REF_DELTA):
        produced = _delta_result_size(start)
        if size + produced > allowed:
            raise _refused("size", f"a delta in it produces more than allowed ({produced} bytes)")
        return size + produced
    return size


def _delta_result_size(start: bytes) -> int:
    sizes = []
    value = shift = 0
    for byte in start:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            sizes.append(value)
            value = shift = 0
        if len(sizes) == 2:
            return sizes[1]
    raise _refused("format", "a delta in its pack has no sizes")


def _refused(field: str, why: str) -> RefusedError:
    return RefusedError(
        f"cannot import the output bundle: {why}", code="output_invalid", field=field
    )
