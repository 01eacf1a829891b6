"""Stage ``publish``: the result commit goes to its branch, and what came of it is durable.

::

    redeem the grant ─▶ look ─▶ record the intent ─▶ push ─▶ look ─▶ record the outcome
                          │ it is there already, or somebody was faster      ▲
                          └─────────────────────────────────────────────────┘

The credential is in memory from the first step to the last.  A push that was ended, by a cancel
or at a deadline, is told as ``unknown``: what the remote has made of it, only the remote knows,
and the hub looks there itself.  Source: requirement rows B-61…B-63; docs/how-to/publish-results.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import anyio

from forge_bridge.sandbox.grants import redeem
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.attempt_events import Published, PushIntended, StageEntered
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.publication import (
    PUBLISHED,
    Credential,
    Pushed,
    Remote,
    RemoteUnreachable,
    Seen,
    after_push,
    before_push,
    normal_url,
)
from forge_core.wire.codes import (
    EventType,
    FailureCode,
    PublicationMode,
    PublicationOutcome,
    Stage,
)
from forge_core.wire.events import EMPTY
from forge_core.wire.from_bridge import PublishGrantAck, RedeemPublishGrant

LOOKS: Final = 3
LOOK_AGAIN_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Grant:
    """What was redeemed; ``until_ms`` is CLOCK_BOOTTIME."""

    remote: Remote
    until_ms: int


async def publish(context: StageContext) -> None:
    """Push the result commit, if there is one and it is for us to push.

    :raises StageFailed: ``publication_denied``, ``publication_stale``.
    """
    commit = context.run.state.result_commit
    if context.start.publication.mode is not PublicationMode.BRIDGE_PUSH or commit is None:
        return
    await context.run.feed(StageEntered(Stage.PUBLISH))
    try:
        grant = await _redeem(context, commit)
    except StageFailed:
        raise
    except ForgeError as error:
        raise _denied(str(error)) from error
    try:
        await _Publication(context, grant, commit).run()
    finally:
        grant.remote.credential.wipe()


async def _redeem(context: StageContext, commit: str) -> Grant:
    start, runner = context.start, context.runner
    assert start.publication.handle is not None, "an offer's departure: it has a handle"
    request = RedeemPublishGrant(
        attempt_id=start.attempt_id,
        fence=start.fence,
        runner_instance_id=runner.identity.runner_instance_id,
        handle=start.publication.handle,
        branch=start.branch,
        result_commit=commit,
    )
    answer = await redeem(context, request, PublishGrantAck)
    if answer.repository_url is None or answer.username is None or answer.credential is None:
        raise _denied("the hub's answer lacks the URL, the user name or the credential")
    url = normal_url(answer.repository_url)
    registered = runner.repositories.remotes().get(start.repository)
    if url != registered:
        raise _denied(
            f"the hub names {url}, and the remote of {start.repository} here is "
            f"{registered or 'not recorded'}; forge-bridge add-repo --remote records it"
        )
    until_ms = runner.clock.now_ms() + context.settings.push_ms
    if answer.expires_at is not None:
        until_ms = min(until_ms, _expiry_ms(context, answer.expires_at))
    return Grant(Remote(url, Credential(answer.username, answer.credential)), until_ms)


def _expiry_ms(context: StageContext, expires_at: str) -> int:
    clock = context.runner.clock
    try:
        left_s = datetime.fromisoformat(expires_at).timestamp() - clock.unix_seconds()
    except ValueError:
        raise _denied(f"the credential expires at {expires_at}, which is no time") from None
    if left_s <= 0:
        raise _denied(f"the credential has expired at {expires_at}, by the clock of this host")
    return clock.now_ms() + int(left_s * 1000)


class _Publication:
    """One result on its way, from the redeemed grant to the recorded outcome."""

    def __init__(self, context: StageContext, grant: Grant, commit: str) -> None:
        self._context = context
        self._grant = grant
        self._commit = commit
        self._branch = context.start.branch
        self._outcome = PublicationOutcome.ABORTED
        self._said = "it was ended before anything was pushed"

    async def run(self) -> None:
        """However it ends, what came of it is told, and told before the attempt's result."""
        context = self._context
        await context.tell(EventType.PUBLICATION_STARTED, EMPTY)
        try:
            await self._move()
        except DiskUnusable:
            raise
        except ForgeError as error:
            self._said = str(error)
        finally:
            told = Published(self._branch, self._commit, self._outcome)
            with anyio.CancelScope(shield=True):
                await context.run.feed(told)
        context.run.log.info("published", outcome=self._outcome, branch=self._branch)
        self._judge()

    async def _move(self) -> None:
        git, remote, start = self._context.runner.git, self._grant.remote, self._context.start
        before = await self._look()
        settled = before_push(before, input_commit=start.input_commit, result_commit=self._commit)
        if settled is not None:
            self._outcome, self._said = settled, f"it is at {before.commit}"
            return
        await self._context.run.feed(PushIntended(self._branch, self._commit))
        self._outcome = PublicationOutcome.UNKNOWN
        self._said = "it was ended during the push"
        push: Pushed | None = None
        try:
            push = await git.push(
                start.repository,
                remote,
                branch=self._branch,
                commit=self._commit,
                expected=before,
                timeout_ms=max(1, self._grant.until_ms - self._context.runner.clock.now_ms()),
            )
            self._said = push.said
        except RemoteUnreachable as error:
            self._said = str(error)
        after = await self._look_after()
        self._outcome = after_push(before, push, after, result_commit=self._commit)

    async def _look(self) -> Seen:
        """A remote that cannot be seen right now is looked at again, a few times."""
        runner = self._context.runner
        for number in range(1, LOOKS):
            try:
                return await runner.git.remote_branch(self._grant.remote, self._branch)
            except RemoteUnreachable as error:
                self._context.run.log.info("will look again", error=str(error))
            await runner.clock.sleep_until_ms(runner.clock.now_ms() + number * LOOK_AGAIN_MS)
        return await runner.git.remote_branch(self._grant.remote, self._branch)

    async def _look_after(self) -> Seen | None:
        try:
            return await self._look()
        except ForgeError as error:
            self._context.run.log.warning("cannot see what was pushed", error=str(error))
            return None

    def _judge(self) -> None:
        where = f"branch {self._branch} of {self._grant.remote.url}"
        if self._outcome in PUBLISHED:
            return
        if self._outcome is PublicationOutcome.STALE_REMOTE:
            raise StageFailed(
                FailureCode.PUBLICATION_STALE,
                f"cannot publish {self._commit}: {where} is not where the attempt began: "
                f"{self._said}",
            )
        doubt = ""
        if self._outcome is PublicationOutcome.UNKNOWN:
            doubt = "; it may have been published all the same, which the hub finds out"
        raise _denied(f"{where}: {self._said}{doubt}")


def _denied(why: str) -> StageFailed:
    return StageFailed(FailureCode.PUBLICATION_DENIED, f"cannot publish the result: {why}")
