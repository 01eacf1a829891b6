"""The hub looks at a remote, with its own credential, where a runner could not tell (B-64)."""

from __future__ import annotations

from typing import Final

import anyio
import structlog

from forge_core.errors import ForgeError, RefusedError
from forge_core.publication import Credential, Remote, Seen, after_a_crash
from forge_edges.git_push import remote_branch
from forge_hub.dispatch import publications
from forge_hub.dispatch.board import Board
from forge_hub.dispatch.leases import Key
from forge_hub.dispatch.publications import Subject
from forge_hub.store import dispatches

AT_ONCE: Final = 4
PAUSE_MS: Final = 5_000
MAX_PAUSE_MS: Final = 300_000
MAX_ERRORS: Final = 16
"""Over an hour; after that somebody has to look, and the next start of the hub does."""

_log = structlog.get_logger(__name__)


async def restore(board: Board) -> None:
    """Take over what an earlier life of the hub left."""
    for key in await board.database.read(dispatches.with_unknown_publication):
        board.looks.add(key)


async def run(board: Board) -> None:
    """Look until cancelled."""
    limiter = anyio.CapacityLimiter(AT_ONCE)
    async with anyio.create_task_group() as tasks:
        while True:
            tasks.start_soon(_find_out, board, await board.looks.next(), limiter)


async def _find_out(board: Board, key: Key, limiter: anyio.CapacityLimiter) -> None:
    """Until the branch says it.  One that has not moved says nothing while a push may arrive."""
    clock, errors = board.clock, 0
    until_ms = clock.now_ms() + board.timing.publish_ttl_ms
    try:
        while True:
            may_still_come = clock.now_ms() < until_ms
            try:
                if errors == MAX_ERRORS:
                    await _give_up(board, key)
                    return
                if await _is_settled(board, key, limiter, may_still_come=may_still_come):
                    return
                pause_ms = PAUSE_MS
            except ForgeError as error:
                errors = min(errors + 1, MAX_ERRORS)
                pause_ms = min(MAX_PAUSE_MS, PAUSE_MS << errors)
                _log.warning("remotes.in_vain", attempt_id=key[0], fence=key[1], error=str(error))
            await clock.sleep_until_ms(clock.now_ms() + pause_ms)
    finally:
        board.looks.done(key)


async def _is_settled(
    board: Board, key: Key, limiter: anyio.CapacityLimiter, *, may_still_come: bool
) -> bool:
    subject = await board.database.read(lambda c: publications.subject_of(c, key))
    if subject is None:
        return True
    async with limiter:
        seen = await _look(board, subject)
    outcome = after_a_crash(
        seen,
        input_commit=subject.input_commit,
        result_commit=subject.result_commit,
        may_still_come=may_still_come,
    )
    if outcome is None:
        return False
    now = board.clock.utc()
    await board.database.write(lambda c: publications.settle_unknown(c, key, outcome, now=now))
    _log.info("remotes.settled", attempt_id=key[0], fence=key[1], outcome=outcome)
    board.changed(subject.session_id)
    return True


async def _look(board: Board, subject: Subject) -> Seen:
    if board.credentials is None:
        raise RefusedError("cannot look: no credentials are set up", code="credential_unavailable")
    found = await board.credentials.credential(subject.project_id, subject.repository)
    credential = Credential(found.username, found.password)
    try:
        return await remote_branch(Remote(found.repository_url, credential), subject.branch)
    finally:
        credential.wipe()


async def _give_up(board: Board, key: Key) -> None:
    now = board.clock.utc()
    subject = await board.database.read(lambda c: publications.subject_of(c, key))
    await board.database.write(lambda c: publications.give_up(c, key, now=now))
    _log.error("remotes.given_up", attempt_id=key[0], fence=key[1])
    if subject is not None:
        board.changed(subject.session_id)
