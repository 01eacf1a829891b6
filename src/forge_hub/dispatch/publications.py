"""What came of pushes: as runners tell it, or as the remote shows it (B-63, B-64).

A dispatch has one publication.  The first word that is more than ``unknown`` counts; ``unknown``
(a push whose end nobody has seen, or a runner that fell silent with a credential in its hands)
makes the hub look at the remote itself, before the session goes on.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, RowMapping

from forge_core.wire.codes import Disposition, FailureCode, Outcome, PublicationOutcome
from forge_core.wire.from_bridge import ReplayAck, SubmitPublication
from forge_hub.connections import LiveRunner
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.leases import Key
from forge_hub.dispatch.signing_off import sign_off
from forge_hub.matching import current_dispatch_of, rejected
from forge_hub.reasons import Reason
from forge_hub.states import PublicationSource, SessionState
from forge_hub.store import dispatches, evidence, grants, sessions

UNKNOWN = PublicationOutcome.UNKNOWN


class Subject(NamedTuple):
    """A publication that is unknown: what to look for, and where."""

    session_id: str
    project_id: str
    repository: str
    branch: str
    input_commit: str
    result_commit: str


async def take_publication(
    board: Board, runner: LiveRunner, message: SubmitPublication
) -> ReplayAck:
    """Keep what came of a push; only of the branch and commit that a grant was redeemed for."""
    now = board.clock.utc()
    ack, session_id = await board.database.write(
        lambda connection: _keep(connection, runner, message, now)
    )
    if session_id is not None:
        if message.outcome is UNKNOWN:
            board.looks.add((message.attempt_id, message.fence))
        board.changed(session_id)
    return ack


def _keep(
    connection: Connection, runner: LiveRunner, message: SubmitPublication, now: str
) -> tuple[ReplayAck, str | None]:
    key = (message.attempt_id, message.fence)
    row = current_dispatch_of(connection, runner, message)
    if isinstance(row, ReplayAck):
        return row, None
    grant = grants.publication_of(connection, *key)
    named = (message.branch, message.result_commit)
    if grant is None or (grant["branch"], grant["result_commit"]) != named:
        return rejected(Reason.PUBLICATION_MISMATCH, "no publish grant was redeemed for it"), None
    if evidence.has_publication(connection, key, message.outcome):
        return ReplayAck(accepted=True, disposition=Disposition.DUPLICATE), None
    if not dispatches.set_publication(connection, *key, message.outcome):
        return rejected(Reason.OUTCOME_CHANGED, f"it is {row['publication']} already"), None
    source = PublicationSource.RUNNER
    evidence.add_publication(connection, grant, message.outcome, source, now=now)
    _go_on(connection, row, publication=message.outcome, may_retry=True, now=now)
    return ReplayAck(accepted=True, disposition=Disposition.PERSISTED), row["session_id"]


def note_silence(connection: Connection, key: Key, *, now: str) -> PublicationOutcome | None:
    """What is known of the publication of a dispatch that is given up.

    A credential that was given out may have been used; then it is ``unknown`` from here on.
    """
    row = dispatches.find(connection, *key)
    grant = grants.publication_of(connection, *key)
    if row is None or grant is None or grant["redeemed_at"] is None:
        return None
    if row["publication"] is not None:
        return PublicationOutcome(row["publication"])
    dispatches.set_publication(connection, *key, UNKNOWN)
    evidence.add_publication(connection, grant, UNKNOWN, PublicationSource.HUB, now=now)
    return UNKNOWN


def subject_of(connection: Connection, key: Key) -> Subject | None:
    """What to look for; None: what came of it is known by now."""
    row = dispatches.find(connection, *key)
    grant = grants.publication_of(connection, *key)
    if row is None or grant is None or row["publication"] != UNKNOWN:
        return None
    given = sessions.input_of(connection, key[0])
    return Subject(
        row["session_id"],
        given.project_id,
        given.repository,
        grant["branch"],
        given.input_commit,
        grant["result_commit"],
    )


def settle_unknown(
    connection: Connection, key: Key, outcome: PublicationOutcome, *, now: str
) -> bool:
    """Keep what the remote shows, and let a session that waits for it go on; False: it is known."""
    row, grant = dispatches.find(connection, *key), grants.publication_of(connection, *key)
    if row is None or grant is None or not dispatches.set_publication(connection, *key, outcome):
        return False
    evidence.add_publication(connection, grant, outcome, PublicationSource.HUB, now=now)
    _go_on(connection, row, publication=outcome, may_retry=True, now=now)
    return True


def give_up(connection: Connection, key: Key, *, now: str) -> None:
    """It stays unknown: the session ends as its dispatch did, and is not dispatched again."""
    row = dispatches.find(connection, *key)
    if row is not None:
        _go_on(connection, row, publication=None, may_retry=False, now=now)


def _go_on(
    connection: Connection,
    row: RowMapping,
    *,
    publication: PublicationOutcome | None,
    may_retry: bool,
    now: str,
) -> None:
    if row["session_state"] != SessionState.SETTLING or row["fence"] != row["highest_fence"]:
        return
    result = evidence.find_result(connection, row["attempt_id"], row["fence"])
    outcome = Outcome.EXPIRED
    failure: FailureCode | None = FailureCode.LEASE_EXPIRED
    if result is not None:
        outcome, code = Outcome(result["outcome"]), result["failure_code"]
        failure = None if code is None else FailureCode(code)
    sign_off(
        connection,
        row,
        outcome,
        failure,
        publication=publication,
        is_owed=True,
        may_retry=may_retry,
        now=now,
    )
