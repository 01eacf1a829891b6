"""From a recipe to an image that may run: found, or built once for all who want it (B-27).

Same key, same image, no build.  What the index says is not believed blindly: the engine must
have that very image, with our labels and nothing that would change a container, and its evidence
must still satisfy the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final

import anyio
import structlog

from forge_bridge.images.build import Build
from forge_bridge.images.once import OncePerKey
from forge_bridge.images.recipe import Recipe
from forge_bridge.images.records import ImageRecords
from forge_bridge.sandbox.stage import StageContext
from forge_core.admission import Key
from forge_core.errors import DiskUnusable, EngineNotFound, RefusedError
from forge_core.image_key import ImageInputs, image_key
from forge_core.image_names import ImageIdentity
from forge_core.image_ports import (
    DEDICATED_BUILDER,
    BuilderFacts,
    BuildLimits,
    ImageBuilder,
    ImageGates,
)
from forge_core.image_retention import CachedImage
from forge_core.sandbox_spec import image_faults, image_variables
from forge_core.wire.codes import FailureCode

LOOK_EVERY_MS: Final = 60_000
"""How long the builder counts as what it was."""

USED_EVERY_MS: Final = 3_600_000
"""How exactly is recorded when an image was last used."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image that may run.

    :param variables: the environment variables that it sets, which PID 1 must not get.
    :param is_cached: whether nothing was built for it here.
    """

    image_key: str
    image_id: str
    variables: tuple[str, ...]
    is_cached: bool


@dataclass(slots=True)
class ImagePipeline:
    """All images of one bridge.

    :param slots: how many builds run at once (B-22).
    :param network: whether build steps have one (B-32).
    """

    builder: ImageBuilder
    gates: ImageGates
    records: ImageRecords
    limits: BuildLimits
    slots: anyio.CapacityLimiter
    network: bool
    once: OncePerKey[ReadyImage] = field(default_factory=OncePerKey)
    _facts: BuilderFacts | None = None
    _looked_ms: int = 0
    _held: dict[Key, str] = field(default_factory=dict)

    async def provide(self, context: StageContext, recipe: Recipe) -> ReadyImage:
        """The image of this recipe; it stays until the attempt has ended.

        :raises ImageFailed: it was built and not promoted.
        :raises RefusedError: ``image_build_failed``: there is no builder.
        """
        facts = await self._builder(context.runner.clock.now_ms())
        key = self._key(context, recipe, facts)
        self._held[context.run.state.key] = key
        work = partial(self._find_or_build, context, recipe, facts, key)
        image, is_mine = await self.once.run(key, work)
        return image if is_mine else replace(image, is_cached=True)

    def held(self, dispatches: Collection[Key]) -> set[str]:
        """The keys of the images that these dispatches have, or are waiting for.

        :param dispatches: all that have not ended; of the others nothing is remembered.
        """
        for ended in self._held.keys() - set(dispatches):
            del self._held[ended]
        return set(self._held.values())

    async def _builder(self, now_ms: int) -> BuilderFacts:
        """The builder as it was a moment ago; to look at it takes longer than all the rest."""
        if self._facts is None or now_ms - self._looked_ms >= LOOK_EVERY_MS:
            try:
                self._facts, self._looked_ms = await self.builder.facts(), now_ms
            except RefusedError as error:
                # Without a builder there is no key either, so not even an old image is found.
                raise RefusedError(str(error), code=FailureCode.IMAGE_BUILD_FAILED) from error
        return self._facts

    def _key(self, context: StageContext, recipe: Recipe, facts: BuilderFacts) -> str:
        owner = context.run.state.owner
        return image_key(
            ImageInputs(
                trust_domain_id=owner.trust_domain_id,
                project_id=owner.project_id,
                contract=recipe.approved.content,
                dockerfile=recipe.dockerfile,
                context_id=recipe.context_id,
                sources=recipe.sources,
                tooling_image=context.settings.tooling_image,
                limits=self.limits,
                builder=facts.identity,
                network=self.network,
            )
        )

    async def _find_or_build(
        self, context: StageContext, recipe: Recipe, facts: BuilderFacts, key: str
    ) -> ReadyImage:
        owner = context.run.state.owner
        identity = ImageIdentity(owner.runner_id, owner.trust_domain_id, owner.project_id, key)
        inspected = await self._cached(context, identity)
        is_cached = inspected is not None
        if inspected is None:
            built = await self._build(context, recipe, facts, identity)
            inspected = await context.engine.inspect_image(built.image_id)
        return ReadyImage(key, str(inspected["Id"]), image_variables(inspected), is_cached)

    async def _cached(
        self, context: StageContext, identity: ImageIdentity
    ) -> Mapping[str, Any] | None:
        """The engine's own view of the promoted image; None: there is none that may be used."""
        image = self.records.index.images.get(identity.image_key)
        if image is None:
            return None
        try:
            inspected = await context.engine.inspect_image(image.image_id)
            faults = image_faults(inspected, ours=identity.labels)
            if faults or not identity.is_on(inspected):
                logger.error("an image is not what it was", image=image.image_id, faults=faults)
                return None
            read = partial(self.records.attestations.read, identity.image_key)
            await self.gates.before_use(image.image_id, read)
        except EngineNotFound:
            return None
        except RefusedError as refused:
            # A gate said no, or the evidence cannot be read: either costs a build and no more.
            logger.warning("an image does not pass any more; building it anew", why=str(refused))
            return None
        await self._note_use(context, image)
        return inspected

    async def _note_use(self, context: StageContext, image: CachedImage) -> None:
        now_ms = context.runner.clock.unix_seconds() * 1000
        if now_ms - image.used_at_ms < USED_EVERY_MS:
            return
        try:
            await self.records.index.put(replace(image, used_at_ms=now_ms))
        except DiskUnusable as error:
            # It costs the image some of its age, and nobody their attempt.
            logger.warning("cannot record the use of an image", error=str(error))

    async def _build(
        self, context: StageContext, recipe: Recipe, facts: BuilderFacts, identity: ImageIdentity
    ) -> CachedImage:
        build = Build(
            context,
            recipe,
            identity,
            parameters={
                "builder": facts.identity,
                DEDICATED_BUILDER: facts.dedicated,
                "limits": asdict(self.limits),
                "network": self.network,
                "toolingImage": context.settings.tooling_image,
            },
            builder=self.builder,
            gates=self.gates,
            records=self.records,
            slots=self.slots,
            network=self.network,
        )
        return await build.run()
