"""What is kept of images on disk, as the pipeline sees it (storage.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from forge_core.errors import ForgeError
from forge_core.image_ports import Evidence
from forge_core.image_retention import (
    CachedImage,
    KeptEvidence,
    Retention,
    expendable_evidence,
)

logger = structlog.get_logger(__name__)


class ImageIndex(Protocol):
    """Which images are promoted; see :class:`forge_bridge.state_root.images.ImageIndex`."""

    @property
    def images(self) -> Mapping[str, CachedImage]: ...
    async def load(self) -> None: ...
    async def put(self, image: CachedImage) -> None: ...
    async def remove(self, image_key: str) -> None: ...


class EvidenceStore(Protocol):
    """Files by image key; see :class:`forge_bridge.state_root.evidence.EvidenceStore`."""

    async def put(self, image_key: str, document: Evidence) -> None: ...
    async def put_set(self, image_key: str, documents: Sequence[Evidence]) -> None: ...
    async def read(self, image_key: str) -> Sequence[Evidence]: ...
    async def kept(self) -> Sequence[KeptEvidence]: ...
    async def remove(self, image_key: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ImageRecords:
    """The three of them.

    :param retention: of logs and attestations, by key (B-28).
    """

    index: ImageIndex
    build_logs: EvidenceStore
    attestations: EvidenceStore
    retention: Retention
    _in_work: set[str] = field(default_factory=set)

    @contextmanager
    def in_work(self, image_key: str) -> Iterator[None]:
        """For the block, nothing is let go of this key: its evidence is there before its record."""
        self._in_work.add(image_key)
        try:
            yield
        finally:
            self._in_work.discard(image_key)

    async def keep_refused(self, image_key: str, evidence: Sequence[Evidence]) -> None:
        """Keep what gates found about an image that they refused.

        The attestations of the key stay where an earlier image of it can still run (B-28).

        :raises DiskUnusable: it cannot be written.
        """
        if image_key not in self.index.images:
            await self.attestations.put_set(image_key, evidence)
            return
        for document in evidence:
            await self.build_logs.put(image_key, document)

    async def prune(self, now_ms: int) -> None:
        """Let go of what is too old or too much; never of what an image rests on, or will soon.

        What cannot be looked at or does not go ends nothing: the next call tries again.

        :param now_ms: wall clock.
        """
        try:
            doomed = expendable_evidence(
                await self._kept(),
                protected=self._protected(),
                retention=self.retention,
                now_ms=now_ms,
            )
        except ForgeError as error:
            logger.error("cannot list the evidence of images", error=str(error))
            return
        for evidence in doomed:
            # A build may have begun while the others went.
            if evidence.image_key not in self._protected():
                await self._let_go(evidence.image_key)

    def _protected(self) -> frozenset[str]:
        return frozenset(self.index.images.keys() | self._in_work)

    async def _kept(self) -> tuple[KeptEvidence, ...]:
        """What both stores have of each key, as one."""
        by_key: dict[str, KeptEvidence] = {}
        for store in (self.build_logs, self.attestations):
            for kept in await store.kept():
                other = by_key.get(kept.image_key, KeptEvidence(kept.image_key, 0, 0))
                by_key[kept.image_key] = KeptEvidence(
                    kept.image_key,
                    max(kept.written_at_ms, other.written_at_ms),
                    kept.size_bytes + other.size_bytes,
                )
        return tuple(by_key.values())

    async def _let_go(self, image_key: str) -> None:
        for store in (self.build_logs, self.attestations):
            try:
                await store.remove(image_key)
            except ForgeError as error:
                logger.error("cannot let go of the evidence of an image", error=str(error))
