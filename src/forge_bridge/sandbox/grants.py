"""A handle works once, so it is exchanged once for what it stands for (B-60, B-61)."""

from __future__ import annotations

from typing import Final, TypeVar

from forge_bridge.sandbox.stage import StageContext
from forge_core.errors import HubUnavailable, RefusedError
from forge_core.wire.base import WireModel
from forge_core.wire.from_bridge import Ack

AckModel = TypeVar("AckModel", bound=Ack)

RETRY_MS: Final = 200


async def redeem(context: StageContext, request: WireModel, answer: type[AckModel]) -> AckModel:
    """The hub's answer; only what was certainly not sent is tried again, until the lease ends.

    :raises HubConnectionLost: the answer got lost, and the handle with it.
    :raises RefusedError: the hub says no, or nothing that makes sense.
    """
    hub, clock = context.runner.hub, context.runner.clock
    while True:
        try:
            answered = await hub.call(request, answer)
        except HubUnavailable:
            await clock.sleep_until_ms(clock.now_ms() + RETRY_MS)
            await hub.wait_online()
            continue
        if not answered.accepted:
            reason = answered.reason or "no"
            raise RefusedError(f"the hub says {reason}", code="grant_refused")
        return answered
