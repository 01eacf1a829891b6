"""Stage ``image``: which image runs, and that nothing in it changes what a container may do."""

from __future__ import annotations

from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.errors import EngineNotFound
from forge_core.sandbox_spec import image_faults
from forge_core.wire.codes import EventType, FailureCode
from forge_core.wire.events import ImageResolved


async def resolve_image(context: StageContext) -> None:
    """The tooling image is the agent's image; it is never pulled, so it must be there.

    What its files could do to PID 1 (``/etc/ld.so.preload``) the doctor has looked for in this
    very digest: without that, no docker runtime is advertised.

    :raises StageFailed: ``image_policy_denied``.
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
    resolved = ImageResolved(image_key=reference[-64:], digest=digest, cache="hit")
    await context.tell(EventType.IMAGE_RESOLVED, resolved)
