"""What a build leaves in the engine besides the image that is used (B-89)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from forge_core.errors import EngineNotFound, ForgeError
from forge_core.image_names import ImageIdentity
from forge_core.ports import Engine

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class Leftovers:
    """Names and an image that go when the build is over, however it ends.

    A name of ours that somebody gave to an image of theirs is not touched.

    :ivar names: to be taken away.
    :ivar built: the id of what was built; it goes if it has no name any more.
    """

    engine: Engine
    identity: ImageIdentity
    names: list[str] = field(default_factory=list)
    built: str | None = None

    async def supersede(self, reference: str) -> None:
        """Let an image that had the key until now be found when it has lost its name."""
        with suppress(EngineNotFound):
            inspected = await self.engine.inspect_image(reference)
            image_id = str(inspected["Id"])
            if image_id != self.built and self.identity.is_on(inspected):
                name = self.identity.superseded(image_id)
                await self.engine.tag_image(image_id, name)
                self.names.append(name)

    async def take_away(self) -> None:
        """What resists, a later pass finds by its labels and names."""
        for name in self.names:
            await self._remove(name)
        if self.built is not None:
            await self._remove(self.built, only_if_nameless=True)

    async def _remove(self, reference: str, *, only_if_nameless: bool = False) -> None:
        try:
            inspected = await self.engine.inspect_image(reference)
            if only_if_nameless and inspected.get("RepoTags"):
                return
            if inspected.get("Id") != self.built and not self.identity.is_on(inspected):
                logger.warning("a name of ours is that of another image", name=reference)
                return
            await self.engine.remove_image(reference)
        except EngineNotFound:
            return
        except ForgeError as error:
            logger.warning("cannot remove an image", name=reference, error=str(error))
