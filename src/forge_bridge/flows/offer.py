"""An offer arrives: decide, hold, record, answer (B-04)."""

from __future__ import annotations

import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.runner import Runner
from forge_bridge.waiting import until
from forge_core import attempt as core
from forge_core.admission import Verdict
from forge_core.attempt_events import EndRequested
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.wire.codes import Decision, FailureCode, RejectionCode
from forge_core.wire.from_bridge import Ack, SubmitOfferDecision
from forge_core.wire.from_hub import Offer

logger = structlog.get_logger(__name__)


async def handle_offer(runner: Runner, offer: Offer) -> None:
    """One decision per offer; the same offer again gets the same answer."""
    key = (offer.attempt_id, offer.fence)
    known = key in runner.attempts
    await _supersede(runner, offer)
    verdict = runner.admission.decide(offer, runner.facts(), runner.clock.now_ms())
    if verdict.accepted and not known and key in runner.admission.reservations:
        verdict = await _open_ledger(runner, offer, verdict)
    runner.notify()
    await _answer(runner, offer, verdict)


async def refuse_malformed(runner: Runner, payload: object, detail: str) -> None:
    """An offer that cannot be read is still answered when it says which offer it is."""
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
    await _send(runner, decision)


async def watch_reservations(runner: Runner) -> None:
    """Release what was reserved and never started, as its offer runs out."""
    while True:
        changed = runner.changed
        for key in runner.admission.expired(runner.clock.now_ms()):
            run = runner.attempts.get(key)
            if run is not None:
                await run.feed(EndRequested(FailureCode.START_TIMEOUT, "no start came in time"))
        next_ms = runner.admission.next_expiry_ms()
        await until(runner.clock, next_ms, changed)


async def _supersede(runner: Runner, offer: Offer) -> None:
    for key in runner.admission.superseded_by(offer.attempt_id, offer.fence):
        run = runner.attempts.get(key)
        if run is not None:
            await run.feed(EndRequested(FailureCode.SUPERSEDED, f"fence {offer.fence} was offered"))


async def _open_ledger(runner: Runner, offer: Offer, verdict: Verdict) -> Verdict:
    """The reservation is on disk before the hub hears of it.

    A disk that cannot be written takes no work: the reservation is given back.
    """
    key = (offer.attempt_id, offer.fence)
    owner = runner.identity.owner(*key, offer.project_id, offer.trust_domain_id)
    resources = runner.admission.reservations[key].resources
    attempt, ready = core.reserve(owner, offer.offer_id, resources, runner.now())
    try:
        ledger = await runner.ledgers.create(*key)
        run = AttemptRun(runner, attempt, ledger)
        runner.attempts[key] = run
        await run.begin(ready)
    except DiskUnusable as error:
        logger.error("cannot reserve", attempt_id=offer.attempt_id, error=str(error))
        runner.attempts.pop(key, None)
        return runner.admission.withdraw(offer, RejectionCode.DISK_PRESSURE, str(error)[:2000])
    return verdict


async def _answer(runner: Runner, offer: Offer, verdict: Verdict) -> None:
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
    logger.info(
        "offer decided",
        attempt_id=offer.attempt_id,
        fence=offer.fence,
        decision=decision.decision,
        code=verdict.code,
        detail=verdict.detail,
    )
    await _send(runner, decision)


async def _send(runner: Runner, decision: SubmitOfferDecision) -> None:
    try:
        await runner.hub.call(decision, Ack)
    except ForgeError as error:
        # Not repeated: the reservation expires, and the hub offers again.
        logger.warning(
            "cannot deliver an offer decision", offer_id=decision.offer_id, error=str(error)
        )
