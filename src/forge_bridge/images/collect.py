"""What goes of images: leftovers of crashes at once, cached ones under disk pressure (B-34, B-89).

Nothing is removed that is not ours by its labels *and* its name, that an attempt holds, or that
somebody builds at this moment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import structlog

from forge_bridge.images.pipeline import ImagePipeline
from forge_bridge.runner import Runner
from forge_core.errors import EngineConflict, EngineNotFound, ForgeError
from forge_core.image_names import ImageIdentity, images_of
from forge_core.image_retention import CachedImage, Retention, expendable_images
from forge_core.ports import EngineImage

UPKEEP_MS: Final = 3_600_000

StillPressed = Callable[[], Awaitable[bool]]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """What disk pressure leaves of the build cache (B-34); sizes in bytes.

    :param most: what it may hold in any case.
    :param reserved: what it keeps whatever happens.
    :param minimum_free: what should be free on the disk.
    """

    most: int
    reserved: int
    minimum_free: int


@dataclass(slots=True)
class ImageCollector:
    """Keeps engine, index and disk in step.

    :param retention: of images, for each project (B-27).
    """

    runner: Runner
    pipeline: ImagePipeline
    retention: Retention
    cache: CacheBounds

    async def recover(self) -> None:
        """Before any attempt: read the index, and remove what an earlier life left unfinished.

        :raises DiskUnusable: the state root cannot be read.
        """
        await self.pipeline.records.index.load()
        await self._tidy()

    async def keep_up(self) -> None:
        """For as long as the bridge runs."""
        clock = self.runner.clock
        while True:
            await clock.sleep_until_ms(clock.now_ms() + UPKEEP_MS)
            await self._tidy()

    async def relieve(self, is_still_pressed: StillPressed) -> None:
        """Give space back until there is enough: build cache first, then images, oldest first.

        :param is_still_pressed: looks at the disk again; False from the low watermark on.
        """
        try:
            for keep_bytes in (self.cache.most, self.cache.reserved):
                await self.pipeline.builder.prune_cache(
                    keep_bytes=keep_bytes, free_bytes=self.cache.minimum_free
                )
                if not await is_still_pressed():
                    return
        except ForgeError as error:
            logger.warning("cannot prune the build cache", error=str(error))
        for image in self._expendable():
            if not await is_still_pressed():
                return
            await self._remove(image)

    def _expendable(self) -> tuple[CachedImage, ...]:
        images = self.pipeline.records.index.images
        keys = self._held_keys()
        return expendable_images(
            images.values(),
            active=keys | {images[key].image_id for key in keys if key in images},
            retention=self.retention,
            now_ms=self._now_ms(),
        )

    async def _remove(self, image: CachedImage) -> None:
        identity = self._identity(image.project_id, image.image_key)
        with self.pipeline.once.claimed(image.image_key) as is_free:
            if not is_free or image.image_key in self._held_keys():
                return
            try:
                if not await self._take_name_away(identity.promoted, image.image_id):
                    return
                await self.pipeline.records.index.remove(image.image_key)
            except ForgeError as error:
                logger.warning("cannot remove an image", image=image.image_id, error=str(error))
                return
        logger.info("removed a cached image", image=image.image_id, project_id=image.project_id)

    async def _take_name_away(self, name: str, image_id: str) -> bool:
        """Whether the image is without this name now; one that names another image stays."""
        engine = self.runner.engine
        try:
            named = (await engine.inspect_image(name)).get("Id")
            if named != image_id:
                logger.warning("a name of ours stands for another image; not touched", name=name)
                return False
            await engine.remove_image(name)
        except EngineNotFound:
            return True
        except EngineConflict:
            logger.info("an image is in use by a container", name=name)
            return False
        return True

    async def _tidy(self) -> None:
        """Bring index and engine in step; what cannot be done now is done the next time."""
        # Before the list: what is promoted from here on need not be in it.
        recorded = tuple(self.pipeline.records.index.images.values())
        try:
            listed = await self.runner.engine.list_images(images_of(self.runner.identity.runner_id))
            for found in listed:
                await self._tidy_image(found)
            there = {found.id for found in listed}
            for image in recorded:
                if image.image_id not in there:
                    await self._forget(image)
        except ForgeError as error:
            logger.warning("cannot tidy up the images of this runner", error=str(error))
        await self.pipeline.records.prune(self._now_ms())

    async def _forget(self, lost: CachedImage) -> None:
        """Remove the record of an image that the engine has lost, unless it is another's now."""
        index = self.pipeline.records.index
        with self.pipeline.once.claimed(lost.image_key) as is_free:
            now = index.images.get(lost.image_key)
            if is_free and now is not None and now.image_id == lost.image_id:
                await index.remove(lost.image_key)

    async def _tidy_image(self, image: EngineImage) -> None:
        """Names without a promotion go, and with the last one the image."""
        identity = ImageIdentity.from_labels(image.labels)
        if identity is None or identity.image_key in self._held_keys():
            return
        with self.pipeline.once.claimed(identity.image_key) as is_free:
            promoted = self.pipeline.records.index.images.get(identity.image_key)
            if not is_free:
                return
            is_promoted = promoted is not None and promoted.image_id == image.id
            for name in image.names:
                if identity.is_passing(name) or (name == identity.promoted and not is_promoted):
                    await self._take_name_away(name, image.id)

    def _held_keys(self) -> set[str]:
        return self.pipeline.held(self.runner.attempts.keys())

    def _identity(self, project_id: str, image_key: str) -> ImageIdentity:
        identity = self.runner.identity
        return ImageIdentity(identity.runner_id, identity.trust_domain_id, project_id, image_key)

    def _now_ms(self) -> int:
        return self.runner.clock.unix_seconds() * 1000
