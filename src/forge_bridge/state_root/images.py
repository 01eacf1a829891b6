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

from forge_bridge.state_root.bounds import SUSPECTS, prune, set_aside
from forge_core.errors import DiskUnusable, ForgeError, RefusedError
from forge_core.image_retention import CachedImage
from forge_core.sealed import BrokenSeal, encode, seal, unseal
from forge_core.wire.base import Count, Id, WireModel, parse
from forge_edges.durable_file import (
    disk_errors,
    on_disk,
    read_file,
    remove_file,
    replace_file,
)

IMAGE_KEY: Final = re.compile(r"[0-9a-f]{64}")
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
        """Read all records.  A damaged one is set aside; one the disk does not give is left."""
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
                _suspect(path, error)
            except DiskUnusable as error:
                logger.error("leaving a record of an image to the next start", error=str(error))
            else:
                found[image.image_key] = image
        return found


def _suspect(path: Path, error: Exception) -> None:
    logger.error("setting a damaged record of an image aside", path=str(path), error=str(error))
    try:
        set_aside(path)
    except ForgeError as failure:
        logger.warning("cannot set a damaged record of an image aside", error=str(failure))


def _image_in(path: Path) -> CachedImage:
    stored = parse(_Stored, unseal(read_file(path, MAX_RECORD_BYTES)), what=path.name)
    if path.name != f"{stored.image_key}.json":
        raise BrokenSeal("it is the record of another image")
    return CachedImage(**stored.model_dump())
