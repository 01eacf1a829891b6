"""An offer arrives: decide, hold, record, answer (B-04)."""

from __future__ import annotations

from typing import Final

import anyio
import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.keyed_queue import KeyedQueue
from forge_bridge.runner import Runner
from forge_bridge.waiting import until
from forge_core import attempt as core
from forge_core.admission import Verdict
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.offer_rules import refused
from forge_core.wire.codes import Decision, FailureCode, RejectionCode
from forge_core.wire.from_bridge import Ack, SubmitOfferDecision
from forge_core.wire.from_hub import Offer

logger = structlog.get_logger(__name__)

DECISIONS_WAITING: Final = 4_096
DECISIONS_AT_ONCE: Final = 64
"""Far fewer calls than a connection has room for: heartbeats must not wait behind them."""

DECISION_MS: Final = 30_000
RETRY_EXPIRY_MS: Final = 1_000


class Decisions:
    """Answers on their way to the hub: sent once, and pointless when their offer has run out.

    They do not wait in the queue of what the hub asks for, so that a hub that is slow to
    acknowledge one holds up nothing else, not even the start of the attempt itself.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue = KeyedQueue(runner.tasks, limit=DECISIONS_WAITING)
        self._at_once = anyio.CapacityLimiter(DECISIONS_AT_ONCE)

    def send(self, decision: SubmitOfferDecision, until_ms: int) -> None:
        """Take a decision along; never waits.

        :param until_ms: CLOCK_BOOTTIME; after this nobody waits for it.
        """
        if not self._queue.submit(object(), lambda: self._deliver(decision, until_ms)):
            logger.error("too many decisions wait for the hub", offer_id=decision.offer_id)

    async def _deliver(self, decision: SubmitOfferDecision, until_ms: int) -> None:
        async with self._at_once:
            left_ms = until_ms - self._runner.clock.now_ms()
            if left_ms <= 0:
                return
            try:
                timeout_ms = min(left_ms, DECISION_MS)
                ack = await self._runner.hub.call(decision, Ack, timeout_ms=timeout_ms)
                why_not = None if ack.accepted else f"the hub says {ack.reason or 'no'}"
            except ForgeError as error:
                why_not = str(error)
        if why_not is not None:
            # Not repeated: the reservation expires, and the hub offers again.
            logger.warning(
                "cannot deliver an offer decision", offer_id=decision.offer_id, error=why_not
            )


async def handle_offer(
    runner: Runner, decisions: Decisions, offer: Offer, received_ms: int
) -> None:
    """One decision per offer; the same offer again gets the same answer.

    :param received_ms: CLOCK_BOOTTIME; the offer runs out ``expiresInMs`` after this.
    """
    key = (offer.attempt_id, offer.fence)
    expires_at_ms = received_ms + offer.expires_in_ms
    known = key in runner.attempts
    if not known and runner.clock.now_ms() >= expires_at_ms:
        verdict = refused(RejectionCode.EXPIRED, "it had run out before it could be looked at")
    else:
        await supersede(runner, offer.attempt_id, offer.fence)
        verdict = runner.admission.decide(offer, runner.facts(), received_ms)
        if verdict.accepted and not known and key in runner.admission.reservations:
            verdict = await _open_ledger(runner, offer, verdict)
        runner.notify()
    logger.info(
        "offer decided",
        attempt_id=offer.attempt_id,
        fence=offer.fence,
        accepted=verdict.accepted,
        code=verdict.code,
        detail=verdict.detail,
    )
    decision = SubmitOfferDecision(
        offer_id=offer.offer_id,
        attempt_id=offer.attempt_id,
        fence=offer.fence,
        runner_id=runner.identity.runner_id,
        runner_instance_id=runner.identity.runner_instance_id,
        decision=Decision.ACCEPTED if verdict.accepted else Decision.REJECTED,
        runtime=verdict.runtime,
        reason_code=verdict.code,
        detail=verdict.detail,
        used_resources=runner.admission.used,
        resource_capacity=runner.capacity,
    )
    decisions.send(decision, max(expires_at_ms, runner.clock.now_ms() + DECISION_MS))


def refuse_malformed(runner: Runner, decisions: Decisions, payload: object, detail: str) -> None:
    """An offer that cannot be read is still answered when it says which offer it is.

    What was accepted already stays accepted: this is a damaged copy of it.
    """
    if not isinstance(payload, dict):
        return
    try:
        decision = SubmitOfferDecision(
            offer_id=payload.get("offerId"),
            attempt_id=payload.get("attemptId"),
            fence=payload.get("fence"),
            runner_id=runner.identity.runner_id,
            runner_instance_id=runner.identity.runner_instance_id,
            decision=Decision.REJECTED,
            reason_code=RejectionCode.MALFORMED,
            detail=detail[:2000],
            used_resources=runner.admission.used,
            resource_capacity=runner.capacity,
        )
    except ValueError:
        return
    if (decision.attempt_id, decision.fence) not in runner.attempts:
        decisions.send(decision, runner.clock.now_ms() + DECISION_MS)


async def watch_reservations(runner: Runner) -> None:
    """Release what was reserved and never started, as its offer runs out."""
    clock = runner.clock
    while True:
        changed = runner.changed
        for key in runner.admission.expired(clock.now_ms()):
            run = runner.attempts.get(key)
            if run is not None:
                await run.end(FailureCode.START_TIMEOUT, "no start came in time")
        next_ms, now_ms = runner.admission.next_expiry_ms(), clock.now_ms()
        if next_ms is not None and next_ms <= now_ms:
            # Its ledger is not there yet, or cannot be written now.
            next_ms = now_ms + RETRY_EXPIRY_MS
        await until(clock, next_ms, changed)


async def supersede(runner: Runner, attempt_id: str, fence: int) -> None:
    """End what runs under lower fences of this attempt."""
    for key in runner.admission.superseded_by(attempt_id, fence):
        run = runner.attempts.get(key)
        if run is not None:
            await run.end(FailureCode.SUPERSEDED, f"fence {fence} has come")


async def _open_ledger(runner: Runner, offer: Offer, verdict: Verdict) -> Verdict:
    """The reservation is on disk before the hub hears of it.

    A disk that cannot be written takes no work: the reservation is given back.
    """
    key = (offer.attempt_id, offer.fence)
    owner = runner.identity.owner(*key, offer.project_id, offer.trust_domain_id)
    held = runner.admission.reservations[key]
    attempt, ready = core.reserve(owner, offer.offer_id, held.resources, runner.now(), held.runtime)
    try:
        ledger = await runner.ledgers.create(*key)
        run = AttemptRun(runner, attempt, ledger, offer)
        runner.attempts[key] = run
        await run.begin(ready)
    except ForgeError as error:
        logger.error("cannot reserve", attempt_id=offer.attempt_id, error=str(error))
        if runner.attempts.pop(key, None) is not None:
            await _remove_ledger(runner, offer)
        return runner.admission.withdraw(offer, RejectionCode.DISK_PRESSURE, str(error)[:2000])
    return verdict


async def _remove_ledger(runner: Runner, offer: Offer) -> None:
    try:
        await runner.ledgers.remove(offer.attempt_id, offer.fence)
    except DiskUnusable as error:
        # The next start reads it, ends the dispatch and removes it.
        logger.warning("cannot remove a ledger", attempt_id=offer.attempt_id, error=str(error))
