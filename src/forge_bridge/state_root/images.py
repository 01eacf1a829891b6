"""``images/``: which images have passed their gates, one sealed record each.

A record says which image in the engine is the one of a key, and nothing is promoted without it:
whatever else the engine holds under our labels was never finished, and the next start removes it.
A damaged record is set aside, which costs a build.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import structlog
from pydantic import Field

from forge_bridge.state_root.bounds import Bound, prune
from forge_core.errors import RefusedError
from forge_core.image_retention import CachedImage
from forge_core.sealed import BrokenSeal, encode, seal, unseal
from forge_core.wire.base import Count, Id, WireModel, parse
from forge_edges.durable_file import (
    disk_errors,
    on_disk,
    read_file,
    remove_file,
    replace_file,
    sync_directory,
)

IMAGE_KEY: Final = re.compile(r"[0-9a-f]{64}")
SUSPECTS: Final = Bound(max_files=200, max_age_days=30)
MAX_RECORD_BYTES: Final = 4_096

logger = structlog.get_logger(__name__)


class _Stored(WireModel):
    """A record as it is on disk."""

    image_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\Z")]
    image_id: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    project_id: Id
    built_at_ms: Count
    used_at_ms: Count


class ImageIndex:
    """The promoted images by their key; read once, then kept in step with the disk.

    Every method may raise DiskUnusable.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._images: dict[str, CachedImage] = {}

    @property
    def images(self) -> Mapping[str, CachedImage]:
        """As it was last written or read."""
        return self._images

    async def load(self) -> None:
        """Read all records; a damaged one is set aside as ``*.suspect``."""
        self._images = await on_disk(self._load)

    async def put(self, image: CachedImage) -> None:
        """Durable when it returns."""
        assert IMAGE_KEY.fullmatch(image.image_key), image.image_key
        stored = _Stored(**asdict(image))
        line = seal(encode(stored.to_wire()))
        await on_disk(replace_file, self._path(image.image_key), line)
        self._images[image.image_key] = image

    async def remove(self, image_key: str) -> None:
        """Forget an image; that nobody knew it is success."""
        await on_disk(remove_file, self._path(image_key))
        self._images.pop(image_key, None)

    def tidy(self) -> None:
        """Hold the bound on what was set aside; blocks."""
        prune(self._directory, "*.suspect", SUSPECTS)

    def _path(self, image_key: str) -> Path:
        return self._directory / f"{image_key}.json"

    def _load(self) -> dict[str, CachedImage]:
        with disk_errors("list", self._directory):
            paths = sorted(self._directory.glob("*.json"))
        found = {}
        for path in paths:
            try:
                image = _image_in(path)
            except (BrokenSeal, RefusedError) as error:
                logger.error("a record of an image is set aside", path=str(path), why=str(error))
                with disk_errors("set aside", path):
                    path.replace(path.with_suffix(".suspect"))
                    sync_directory(path.parent)
            else:
                found[image.image_key] = image
        return found


def _image_in(path: Path) -> CachedImage:
    stored = parse(_Stored, unseal(read_file(path, MAX_RECORD_BYTES)), what=path.name)
    if path.name != f"{stored.image_key}.json":
        raise BrokenSeal("it is the record of another image")
    return CachedImage(**stored.model_dump())
