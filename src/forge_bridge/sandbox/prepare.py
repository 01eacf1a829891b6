"""Stage ``prepare``: redeem the secrets (B-60) and have the input commit."""

from __future__ import annotations

from typing import Final

from forge_bridge.sandbox.grants import redeem
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.errors import ForgeError
from forge_core.wire.codes import EventType, FailureCode, WarningCode
from forge_core.wire.events import SecretsRedeemed, Warning_
from forge_core.wire.from_bridge import RedeemSecretGrant, SecretGrantAck

MAX_SECRETS: Final = 1_024


async def prepare(context: StageContext) -> None:
    """Secrets first: from here on they are masked in everything that leaves."""
    await _redeem_secrets(context)
    await context.runner.git.ensure_commit(context.start.repository, context.start.input_commit)


async def _redeem_secrets(context: StageContext) -> None:
    secrets: dict[str, str] = {}
    for handle in context.start.secret_grants:
        secrets.update(await _redeem(context, handle))
    if len(secrets) > MAX_SECRETS:
        raise _denied(f"there are {len(secrets)}, {MAX_SECRETS} is the most")
    await context.mask(secrets.values())
    context.secrets = secrets
    if not secrets:
        return
    await context.tell(EventType.SECRETS_REDEEMED, SecretsRedeemed(names=tuple(sorted(secrets))))
    for name in sorted(n for n, value in secrets.items() if value in context.run.masker.refused):
        detail = f"the secret {name} is too short to be masked in the output"
        warning = Warning_(code=WarningCode.SECRET_NOT_MASKABLE, detail=detail)
        await context.tell(EventType.WARNING, warning)


async def _redeem(context: StageContext, handle: str) -> dict[str, str]:
    start = context.start
    request = RedeemSecretGrant(
        attempt_id=start.attempt_id,
        fence=start.fence,
        runner_instance_id=context.runner.identity.runner_instance_id,
        handle=handle,
    )
    try:
        return (await redeem(context, request, SecretGrantAck)).secrets
    except ForgeError as error:
        raise _denied(str(error)) from error


def _denied(why: str) -> StageFailed:
    return StageFailed(FailureCode.SECRET_GRANT_DENIED, f"cannot redeem the secrets: {why}")
