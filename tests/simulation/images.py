"""What is kept of images, on the simulated disk: records, logs of builds, attestations.

All that is kept of one key is one file here: it is replaced whole, as the real stores have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from forge_core.image_ports import Evidence
from forge_core.image_retention import CachedImage, KeptEvidence
from forge_core.sealed import BrokenSeal, encode, seal, unseal

from .disk import SimulatedDisk

RECORDS: Final = "images/"
LOGS: Final = "build-logs/"
ATTESTATIONS: Final = "attestations/"
_TEXT: Final = "latin-1"


class SimulatedIndex:
    """What :class:`forge_bridge.state_root.images.ImageIndex` does, for one life."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._images: dict[str, CachedImage] = {}

    @property
    def images(self) -> Mapping[str, CachedImage]:
        """As it was last written or read."""
        return self._images

    async def load(self) -> None:
        """Every record; a damaged one costs a build."""
        self._images = {}
        for path in self._disk.names(RECORDS, ".json"):
            try:
                image = record_in(await self._disk.read(path))
            except BrokenSeal:
                await self._disk.remove(path, synced=True)
                continue
            self._images[image.image_key] = image

    async def put(self, image: CachedImage) -> None:
        """Durable when it returns."""
        path = f"{RECORDS}{image.image_key}.json"
        await self._disk.replace(path, seal(encode(asdict(image))))
        self._images[image.image_key] = image

    async def remove(self, image_key: str) -> None:
        """For good."""
        await self._disk.remove(f"{RECORDS}{image_key}.json", synced=True)
        self._images.pop(image_key, None)


class SimulatedEvidence:
    """What :class:`forge_bridge.state_root.evidence.EvidenceStore` does."""

    def __init__(self, disk: SimulatedDisk, directory: str, now_ms: Callable[[], int]) -> None:
        self._disk = disk
        self._directory = directory
        self._now_ms = now_ms

    async def put(self, image_key: str, document: Evidence) -> None:
        """Beside what there is of the key."""
        others = [one for one in await self.read(image_key) if one.name != document.name]
        await self._write(image_key, [*others, document])

    async def put_set(self, image_key: str, documents: Sequence[Evidence]) -> None:
        """In place of what there is; in the middle there is nothing."""
        await self.remove(image_key)
        await self._write(image_key, documents)

    async def read(self, image_key: str) -> Sequence[Evidence]:
        """Everything of a key."""
        path = self._path(image_key)
        if path not in self._disk.files:
            return ()
        documents = json.loads(await self._disk.read(path))["documents"]
        return tuple(Evidence(name, text.encode(_TEXT)) for name, text in documents.items())

    async def kept(self) -> Sequence[KeptEvidence]:
        """Of every key."""
        kept = []
        for path in self._disk.names(self._directory, ".json"):
            data = await self._disk.read(path)
            kept.append(KeptEvidence(key_in(path), written_at_ms(data), len(data)))
        return kept

    async def remove(self, image_key: str) -> None:
        """For good."""
        await self._disk.remove(self._path(image_key), synced=True)

    async def _write(self, image_key: str, documents: Sequence[Evidence]) -> None:
        content: dict[str, Any] = {
            "writtenAtMs": self._now_ms(),
            "documents": {one.name: one.content.decode(_TEXT) for one in documents},
        }
        await self._disk.replace(self._path(image_key), json.dumps(content).encode())

    def _path(self, image_key: str) -> str:
        return f"{self._directory}{image_key}.json"


def record_in(data: bytes) -> CachedImage:
    """Read a record; raises BrokenSeal."""
    return CachedImage(**unseal(data))


def written_at_ms(data: bytes) -> int:
    """When evidence was written, by the wall clock of then."""
    return int(json.loads(data)["writtenAtMs"])


def key_in(path: str) -> str:
    """Whose file it is."""
    return path.rpartition("/")[2].removesuffix(".json")
