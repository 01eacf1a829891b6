"""Stage ``image``: which image runs, and that nothing in it changes what a container may do.

Without a contract, or with one that names no image, it is the tooling image.  Otherwise it is the
project's, exactly as the gates have proven it, and PID 1 runs from a tree of the tooling image
that is mounted into it (:mod:`forge_bridge.images.tooling`).
"""

from __future__ import annotations

import anyio

from forge_bridge.groups import first_error
from forge_bridge.images.build import ImageFailed
from forge_bridge.images.recipe import Recipe, recipe_of
from forge_bridge.sandbox.contract import adopt_contract
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.errors import EngineNotFound
from forge_core.sandbox_spec import image_faults
from forge_core.wire.codes import EventType, FailureCode
from forge_core.wire.events import ImageResolved


async def resolve_image(context: StageContext) -> None:
    """Find or build the image, and say which one it is.

    :raises StageFailed: ``image_policy_denied``, ``signature_invalid``, ``image_build_failed``.
    :raises RefusedError: ``contract_invalid``, ``image_policy_denied``.
    """
    approved = await adopt_contract(context)
    recipe = None if approved is None else await recipe_of(context.runner.git, approved)
    resolved = await (_tooling(context) if recipe is None else _project(context, recipe))
    await context.tell(EventType.IMAGE_RESOLVED, resolved)
    context.runner.admission.release_builds(context.run.state.key)
    context.runner.notify()


async def _tooling(context: StageContext) -> ImageResolved:
    """The tooling image is the agent's image; it is never pulled, so it must be there.

    What its files could do to PID 1 (``/etc/ld.so.preload``) the doctor has looked for in this
    very digest: without that, no docker runtime is advertised.
    """
    reference = context.settings.tooling_image
    try:
        inspected = await context.engine.inspect_image(reference)
    except EngineNotFound as error:
        raise StageFailed(
            FailureCode.IMAGE_POLICY_DENIED,
            f"cannot use image {reference}: the engine does not have it, and nothing is ever "
            "pulled for an attempt; pull it on the runner host",
        ) from error
    faults = image_faults(inspected)
    if faults:
        raise StageFailed(
            FailureCode.IMAGE_POLICY_DENIED,
            f"cannot use image {reference}: {'; '.join(faults)}",
        )
    context.image = reference
    digest = str(inspected.get("Id", reference))
    return ImageResolved(image_key=reference[-64:], digest=digest, cache="hit")


async def _project(context: StageContext, recipe: Recipe) -> ImageResolved:
    images = context.runner.images
    assert images is not None
    try:
        with first_error():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_take_tooling, context)
                image = await images.provide(context, recipe)
    except ImageFailed as failed:
        await context.tell(EventType.BUILD_FAILED, failed.told)
        raise
    context.image, context.blanked = image.image_id, image.variables
    return ImageResolved(
        image_key=image.image_key,
        digest=image.image_id,
        cache="hit" if image.is_cached else "miss",
    )


async def _take_tooling(context: StageContext) -> None:
    assert context.runner.tooling is not None
    context.tooling = await context.runner.tooling.provide()
