"""Stage ``image``: which image runs, and that nothing in it changes what a container may do.

Without a contract, or with one that names no image, it is the tooling image.  Otherwise it is the
project's, exactly as the gates have proven it, and PID 1 runs from a tree of the tooling image
that is mounted into it (:mod:`forge_bridge.images.tooling`).
"""

from __future__ import annotations

import anyio

from forge_bridge.groups import first_error
from forge_bridge.images.build import ImageFailed
from forge_bridge.images.recipe import Approved, Recipe, approved_contract, recipe_of
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.contract import CONTRACT_PATH, MAX_CONTRACT_BYTES
from forge_core.contract_grants import require_granted
from forge_core.errors import EngineNotFound, RefusedError
from forge_core.sandbox_spec import image_faults
from forge_core.wire.codes import EventType, FailureCode, WarningCode
from forge_core.wire.events import ImageResolved, Warning_


async def resolve_image(context: StageContext) -> None:
    """Find or build the image, and say which one it is.

    :raises StageFailed: ``image_policy_denied``, ``signature_invalid``, ``image_build_failed``.
    :raises RefusedError: ``contract_invalid``, ``image_policy_denied``.
    """
    recipe = None
    approved = await _approved(context)
    if approved is not None:
        start = context.start
        require_granted(
            approved.contract,
            network=start.network,
            services=start.services,
            secrets=context.secrets,
        )
        context.contract = approved.contract
        recipe = await recipe_of(context.runner.git, approved)
    resolved = await (_tooling(context) if recipe is None else _project(context, recipe))
    await context.tell(EventType.IMAGE_RESOLVED, resolved)
    context.runner.admission.release_builds(context.run.state.key)
    context.runner.notify()


async def _approved(context: StageContext) -> Approved | None:
    """The contract that counts: that of the approved commit, and of no other (B-52)."""
    git, start = context.runner.git, context.start
    if start.approved_commit is None:
        await _warn_of_contract(context)
        return None
    if start.approved_commit != start.input_commit:
        await git.ensure_commit(start.repository, start.approved_commit)
    return await approved_contract(git, start.repository, start.approved_commit)


async def _warn_of_contract(context: StageContext) -> None:
    """Whoever wrote one will wonder why it has no effect."""
    git, start = context.runner.git, context.start
    try:
        found = await git.read_file(
            start.repository, start.input_commit, CONTRACT_PATH, MAX_CONTRACT_BYTES
        )
    except RefusedError:
        return
    if found is not None:
        detail = f"{CONTRACT_PATH} has no say: the hub names no approved commit"
        warning = Warning_(code=WarningCode.CONTRACT_NOT_APPROVED, detail=detail)
        await context.tell(EventType.WARNING, warning)


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
