"""Grants by the digest of their handle; one conditional update consumes one (B-60, B-61)."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, and_, exists, insert, select, tuple_, update

from forge_core.wire.from_bridge import RedeemPublishGrant, RedeemSecretGrant
from forge_hub.attempt_input import Addressee, AttemptInput
from forge_hub.connections import LiveRunner
from forge_hub.grants import GrantKind, Handles, digest_of
from forge_hub.states import DispatchState
from forge_hub.store.tables import attempts, dispatches, grants


def add(
    connection: Connection, to: Addressee, given: AttemptInput, handles: Handles, *, now: str
) -> None:
    """Keep what a start packet is about to carry, in the transaction that starts the dispatch."""
    common = {"attempt_id": to.attempt_id, "fence": to.fence, "created_at": now}
    rows: list[dict[str, object]] = []
    if handles.secrets is not None:
        digest = digest_of(handles.secrets)
        names = list(given.secrets)
        rows.append({"kind": GrantKind.SECRETS, "digest": digest, "names": names, "branch": None})
    if handles.publication is not None:
        digest, branch = digest_of(handles.publication), given.branch
        rows.append(
            {"kind": GrantKind.PUBLICATION, "digest": digest, "names": [], "branch": branch}
        )
    if rows:
        connection.execute(insert(grants), [{**common, **row} for row in rows])


def find(connection: Connection, kind: GrantKind, handle: str) -> RowMapping | None:
    """The grant of a handle, redeemed or not."""
    rows = connection.execute(
        select(grants).where(grants.c.digest == digest_of(handle), grants.c.kind == kind)
    )
    return rows.mappings().first()


def redeem(
    connection: Connection,
    runner: LiveRunner,
    message: RedeemSecretGrant | RedeemPublishGrant,
    *,
    now: str,
) -> bool:
    """Consume a grant if all of it holds at this moment; False: it does not, nothing changed.

    The handle is fresh, of this very dispatch, and for this branch; the dispatch runs on the
    instance that asks, under the highest fence, and nobody has cancelled it.
    """
    runs = (
        select(dispatches.c.fence)
        .join(attempts, attempts.c.attempt_id == dispatches.c.attempt_id)
        .where(
            dispatches.c.attempt_id == message.attempt_id,
            dispatches.c.fence == message.fence,
            dispatches.c.runner_id == runner.runner_id,
            dispatches.c.instance_id == runner.instance_id,
            dispatches.c.state == DispatchState.RUNNING,
            attempts.c.fence == message.fence,
        )
    )
    kind, branch, commit = GrantKind.SECRETS, None, None
    if isinstance(message, RedeemPublishGrant):
        kind, branch, commit = GrantKind.PUBLICATION, message.branch, message.result_commit
    consumed = connection.execute(
        update(grants)
        .where(
            grants.c.digest == digest_of(message.handle),
            grants.c.kind == kind,
            grants.c.attempt_id == message.attempt_id,
            grants.c.fence == message.fence,
            grants.c.redeemed_at.is_(None),
            grants.c.branch.is_not_distinct_from(branch),
            exists(runs),
        )
        .values(redeemed_at=now, result_commit=commit)
    )
    return consumed.rowcount == 1


def publication_of(connection: Connection, attempt_id: str, fence: int) -> RowMapping | None:
    """The publish grant of a dispatch, redeemed or not; there is at most one."""
    rows = connection.execute(
        select(grants).where(
            and_(grants.c.attempt_id == attempt_id, grants.c.fence == fence),
            grants.c.kind == GrantKind.PUBLICATION,
        )
    )
    return rows.mappings().first()


def of_dispatches(connection: Connection, keys: Sequence[tuple[str, int]]) -> Sequence[RowMapping]:
    """The grants of these (attempt, fence), in the order of creation."""
    key = tuple_(grants.c.attempt_id, grants.c.fence)
    rows = connection.execute(
        select(grants).where(key.in_(keys)).order_by(grants.c.created_at, grants.c.kind)
    )
    return rows.mappings().all()
