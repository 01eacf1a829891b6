"""From a SignalR invocation to its handler and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from forge_core.errors import RefusedError, RetryableError
from forge_core.wire.base import parse
from forge_core.wire.codes import Disposition
from forge_core.wire.from_bridge import (
    HUB_METHODS,
    Ack,
    RegisterRunner,
    ReplayAck,
    SubmitOfferDecision,
)
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.decisions import decide
from forge_hub.dispatch.endings import take_result
from forge_hub.dispatch.publications import take_publication
from forge_hub.principals import RunnerPrincipal
from forge_hub.runner_hub import presence, redemptions, replayed
from forge_hub.signalr import Connection, HubException, SignalRHub

Handler = Callable[[Board, LiveRunner, Any], Awaitable[Ack]]
_log = structlog.get_logger(__name__)


async def _decide(board: Board, runner: LiveRunner, message: SubmitOfferDecision) -> Ack:
    refusal = presence.other_instance(runner, message.runner_id, message.runner_instance_id)
    return refusal or await decide(board, runner, message)


_HANDLERS: Final[dict[str, Handler]] = {
    "Heartbeat": presence.heartbeat,
    "ReadAttemptSnapshot": presence.read_snapshot,
    "SubmitOfferDecision": _decide,
    "SubmitDispatchEvent": replayed.take_event,
    "SubmitDispatchResult": take_result,
    "SubmitLegacyResult": replayed.take_legacy_result,
    "SubmitCleanupReport": replayed.take_cleanup_report,
    "SubmitPublication": take_publication,
    "SubmitReapOutcome": replayed.take_reap_outcome,
    "RedeemSecretGrant": redemptions.redeem_secrets,
    "RedeemPublishGrant": redemptions.redeem_publication,
}
assert _HANDLERS.keys() | {"RegisterRunner"} == HUB_METHODS.keys()


def attach(hub: SignalRHub[RunnerPrincipal], board: Board, *, heartbeat_interval_ms: int) -> None:
    """Give the endpoint every hub method of the protocol."""

    @hub.method("RegisterRunner")
    async def _register(channel: Connection[RunnerPrincipal], payload: object) -> object:
        async def handle(message: RegisterRunner) -> Ack:
            return await presence.register(
                board,
                channel,
                channel.principal,
                message,
                heartbeat_interval_ms=heartbeat_interval_ms,
            )

        return await _answer("RegisterRunner", payload, handle)

    for name, handler in _HANDLERS.items():
        hub.method(name)(_guarded(board, name, handler))

    @hub.on_disconnected
    async def _gone(channel: Connection[RunnerPrincipal]) -> None:
        await presence.depart(board, channel)


def _guarded(
    board: Board, name: str, handler: Handler
) -> Callable[[Connection[RunnerPrincipal], object], Awaitable[object]]:
    """Refuse what does not come over a runner's current connection.

    As an error and not as an answer: an answer would end the replay of the message.
    """

    async def method(channel: Connection[RunnerPrincipal], payload: object) -> object:
        runner = board.connections.on(channel)
        if runner is None:
            raise HubException(f"cannot take {name}: this connection is not a registered runner's")
        return await _answer(name, payload, lambda message: handler(board, runner, message))

    return method


async def _answer(
    name: str, payload: object, handle: Callable[[Any], Awaitable[Ack]]
) -> dict[str, Any]:
    kind = HUB_METHODS[name]
    try:
        answer = await handle(parse(kind.request, payload, what=name))
    except RefusedError as error:
        refusal: dict[str, Any] = {"accepted": False, "reason": error.code, "detail": str(error)}
        if issubclass(kind.acknowledgement, ReplayAck):
            refusal["disposition"] = Disposition.REJECTED
        answer = kind.acknowledgement.model_validate(refusal)
    except RetryableError as error:
        _log.warning("runner_hub.cannot_keep", method=name, error=str(error))
        raise HubException(f"cannot take {name} now; send it again later") from error
    if not answer.accepted:
        _log.info("runner_hub.refused", method=name, reason=answer.reason, detail=answer.detail)
    return answer.to_wire()
