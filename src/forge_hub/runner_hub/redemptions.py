"""A handle comes back: what it stands for is given out once, to whom it was made for (B-60, B-61).

The grant is consumed, and that is on the disk, before anything is read from a source: whatever goes
wrong after that costs the attempt and never gives anything out twice.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import structlog
from sqlalchemy import Connection, RowMapping

from forge_core.errors import RefusedError
from forge_core.wire.codes import EventType
from forge_core.wire.from_bridge import (
    PublishGrantAck,
    RedeemPublishGrant,
    RedeemSecretGrant,
    SecretGrantAck,
)
from forge_hub.attempt_input import AttemptInput
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.grants import GrantKind
from forge_hub.reasons import Reason
from forge_hub.store import dispatches, evidence, grants, sessions

_log = structlog.get_logger(__name__)

Redemption = RedeemSecretGrant | RedeemPublishGrant
Redeemed = tuple[RowMapping, AttemptInput]


async def redeem_secrets(
    board: Board, runner: LiveRunner, message: RedeemSecretGrant
) -> SecretGrantAck:
    """The secrets of a dispatch, once."""
    redeemed = await _consume(board, runner, message)
    if isinstance(redeemed, Reason):
        return SecretGrantAck(accepted=False, reason=redeemed)
    grant, given = redeemed
    try:
        if board.secrets is None:
            raise RefusedError("no source of secrets is set up", code="secret_unavailable")
        values = await board.secrets.secrets(given.project_id, grant["names"])
    except RefusedError as error:
        _log.error("grants.secret_unavailable", error=str(error))
        return SecretGrantAck(accepted=False, reason=Reason.SECRET_UNAVAILABLE)
    return SecretGrantAck(accepted=True, secrets=values)


async def redeem_publication(
    board: Board, runner: LiveRunner, message: RedeemPublishGrant
) -> PublishGrantAck:
    """The credential for exactly one repository, for one result commit and a short while."""
    redeemed = await _consume(board, runner, message)
    if isinstance(redeemed, Reason):
        return PublishGrantAck(accepted=False, reason=redeemed)
    given, now = redeemed[1], board.clock.utc()
    try:
        if board.credentials is None:
            raise RefusedError("no source of them is set up", code="credential_unavailable")
        found = await board.credentials.credential(given.project_id, given.repository)
        expires_at = _earlier(now, board.timing.publish_ttl_ms, found.expires_at)
    except RefusedError as error:
        _log.error("grants.credential_unavailable", error=str(error))
        return PublishGrantAck(accepted=False, reason=Reason.CREDENTIAL_UNAVAILABLE)
    return PublishGrantAck(
        accepted=True,
        repository_url=found.repository_url,
        username=found.username,
        credential=found.password,
        expires_at=expires_at,
    )


async def _consume(board: Board, runner: LiveRunner, message: Redemption) -> Redeemed | Reason:
    if message.runner_instance_id != runner.instance_id:
        return Reason.INSTANCE_MISMATCH
    lease = board.leases.get((message.attempt_id, message.fence))
    now_ms, now = board.clock.now_ms(), board.clock.utc()
    is_leased = lease is not None and not lease.cancelled and now_ms < lease.ends_at_ms
    return await board.database.write(
        lambda connection: _redeem(connection, runner, message, now, is_leased=is_leased)
    )


def _redeem(
    connection: Connection, runner: LiveRunner, message: Redemption, now: str, *, is_leased: bool
) -> Redeemed | Reason:
    kind = GrantKind.SECRETS
    if isinstance(message, RedeemPublishGrant):
        kind = GrantKind.PUBLICATION
        if not _is_its_result(connection, message):
            return Reason.PUBLICATION_MISMATCH
    if is_leased and grants.redeem(connection, runner, message, now=now):
        grant = grants.find(connection, kind, message.handle)
        assert grant is not None
        return grant, sessions.input_of(connection, message.attempt_id)
    return _why_not(connection, runner, message, kind)


def _is_its_result(connection: Connection, message: RedeemPublishGrant) -> bool:
    """Whether the commit can be the result: as the runner told of its import, where it has.

    The event may still be on its way; then this redemption is the first word of the commit, and
    nothing else of the dispatch may name another one.
    """
    imported = evidence.payloads_of(
        connection, message.attempt_id, message.fence, EventType.OUTPUT_IMPORTED
    )
    return all(payload.get("resultCommit") == message.result_commit for payload in imported)


def _why_not(
    connection: Connection, runner: LiveRunner, message: Redemption, kind: GrantKind
) -> Reason:
    grant = grants.find(connection, kind, message.handle)
    row = dispatches.find(connection, message.attempt_id, message.fence)
    key = (message.attempt_id, message.fence)
    if grant is None or row is None or (grant["attempt_id"], grant["fence"]) != key:
        return Reason.GRANT_UNKNOWN
    if (row["runner_id"], row["instance_id"]) != (runner.runner_id, runner.instance_id):
        return Reason.INSTANCE_MISMATCH
    if grant["redeemed_at"] is not None:
        return Reason.GRANT_SPENT
    if dispatches.is_stale(row):
        return Reason.STALE_FENCE
    if isinstance(message, RedeemPublishGrant) and message.branch != grant["branch"]:
        return Reason.PUBLICATION_MISMATCH
    return Reason.NOT_RUNNING


def _earlier(now: str, ttl_ms: int, expires_at: str | None) -> str:
    """When the credential is not to be used any more.

    :raises RefusedError: that has passed.
    """
    at = datetime.fromisoformat(now)
    ends = at + timedelta(milliseconds=ttl_ms)
    if expires_at is not None:
        ends = min(ends, datetime.fromisoformat(expires_at))
    if ends <= at:
        raise RefusedError(f"it has expired at {expires_at}", code="credential_unavailable")
    return ends.isoformat(timespec="milliseconds").replace("+00:00", "Z")
