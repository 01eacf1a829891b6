"""The hub says go: run the stages, decide the outcome, tear down (B-04)."""

from __future__ import annotations

from typing import Final

import anyio
import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.flows.offer import supersede
from forge_bridge.flows.teardown import tear_down
from forge_bridge.groups import first_error
from forge_bridge.host.place import OnHost, refusal
from forge_bridge.runner import Runner
from forge_bridge.sandbox.agent import run_agent
from forge_bridge.sandbox.output import OutputCollector
from forge_bridge.sandbox.place import InContainers
from forge_bridge.sandbox.prepare import prepare
from forge_bridge.sandbox.publish import publish
from forge_bridge.sandbox.stage import StageContext, failure_of
from forge_core import lease as leases
from forge_core.admission import Key
from forge_core.attempt import Phase
from forge_core.attempt_events import StageEntered, StagesEnded, Started
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.offer_rules import departure
from forge_core.ready import Message
from forge_core.wire.codes import (
    CleanupState,
    CleanupTrigger,
    FailureCode,
    Outcome,
    ReservationState,
    Runtime,
    Stage,
)
from forge_core.wire.from_bridge import SubmitDispatchResult
from forge_core.wire.from_hub import Start

logger = structlog.get_logger(__name__)

ANSWER_RETRY_MS: Final = 1_000


async def handle_start(runner: Runner, start: Start, received_ms: int) -> None:
    """Runs once for a live reservation; a second packet changes nothing, its key included.

    :param received_ms: CLOCK_BOOTTIME; the lease runs from here.
    """
    key = (start.attempt_id, start.fence)
    if start.fence < runner.admission.highest_fence(start.attempt_id):
        logger.warning("a start under an old fence", attempt_id=key[0], fence=key[1])
        return
    run = runner.attempts.get(key)
    if run is None:
        await _answer_too_late(runner, key)
        return
    if run.state.phase is not Phase.RESERVED:
        return
    if run.state.offer_id != start.offer_id:
        run.log.warning("a start that names another offer", offer_id=start.offer_id)
        return
    assert run.offer is not None, key
    difference = departure(run.offer, start)
    if difference is not None:
        await run.end(FailureCode.INTERNAL_ERROR, f"cannot start: {difference}")
        return
    why = refusal(run) if run.state.runtime is Runtime.HOST else None
    if why is not None:
        # What it stood on has gone, and the reservation with it: this start comes too late.
        await run.end(FailureCode.START_TIMEOUT, f"cannot start on the host: {why}")
        return
    await _begin(runner, run, start, received_ms)


async def handle_start_without_room(runner: Runner, key: Key, detail: str) -> None:
    """A start that was too much to keep, of which only its dispatch is known."""
    if key in runner.attempts:
        await refuse_start(runner, key, detail)
    elif key[1] >= runner.admission.highest_fence(key[0]):
        await _answer_too_late(runner, key)


async def refuse_start(runner: Runner, key: Key, detail: str) -> None:
    """A start that is not taken ends its reservation, so that the hub need not wait for it."""
    run = runner.attempts.get(key)
    if run is not None and run.state.phase is Phase.RESERVED:
        await run.end(FailureCode.INTERNAL_ERROR, detail)


async def _begin(runner: Runner, run: AttemptRun, start: Start, received_ms: int) -> None:
    assert runner.sandbox is not None
    lease = leases.grant(
        attempt_id=start.attempt_id,
        fence=start.fence,
        key=start.lease.key_bytes,
        sequence=start.lease.sequence,
        ttl_ms=start.lease.ttl_ms,
        hard_wall_ms=min(start.limits.hard_wall_ms, runner.sandbox.hard_wall_ms),
        idle_ms=min(start.limits.idle_ms, runner.sandbox.idle_ms),
        now_ms=received_ms,
    )
    try:
        await run.feed(Started(lease))
    except ForgeError as error:
        await run.end(*failure_of(error))
        return
    if run.state.phase is not Phase.RUNNING:
        # Its offer ran out, or it was cancelled, while this waited for its turn.
        return
    runner.admission.transition(run.state.key, ReservationState.STARTING)
    runner.notify()
    resources = runner.admission.reservations[run.state.key].resources
    is_on_host = run.state.runtime is Runtime.HOST
    place = OnHost(runner.host) if is_on_host else InContainers(runner.engine)
    context = StageContext(run, start, resources, runner.engine, runner.sandbox, place)
    runner.tasks.start_soon(run_attempt, context)


async def run_attempt(context: StageContext) -> None:
    """From the first stage to the last resource; owned by the bridge's root task group.

    Only a stop at once cancels it, and then the next start removes what is left.
    """
    run = context.run
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.keep_deadlines)
        failure, detail = await _run_stages(context)
        tasks.cancel_scope.cancel()
    if detail is not None:
        detail = run.masker.mask(detail)
    run.log.info("stages ended", failure=failure, detail=detail)
    await _conclude(run, failure, detail)
    context.forget_secrets()
    await tear_down(run, CleanupTrigger.TEARDOWN)


async def _run_stages(context: StageContext) -> tuple[FailureCode | None, str | None]:
    run = context.run
    try:
        with first_error(), run.stages:
            await _stages(context)
    except ForgeError as error:
        return failure_of(error)
    except anyio.get_cancelled_exc_class():
        # The bridge itself is going down without waiting: say so, then pass it on.
        await _conclude(run, FailureCode.BRIDGE_STOPPED, "the bridge was stopped at once")
        raise
    except Exception as error:
        run.log.exception("a stage failed unexpectedly")
        return FailureCode.INTERNAL_ERROR, f"{type(error).__name__} in the bridge; see its log"
    return None, None


async def _stages(context: StageContext) -> None:
    run = context.run
    await run.feed(StageEntered(Stage.PREPARE))
    await prepare(context)
    async with anyio.create_task_group() as beside:
        await context.place.build(context, beside)
        collector = OutputCollector(context)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collector.run)
            await run_agent(context)
            context.place.release()
            await run.feed(StageEntered(Stage.OUTPUT))
            collector.agent_is_gone()
    await publish(context)


async def _conclude(run: AttemptRun, failure: FailureCode | None, detail: str | None) -> None:
    """The result must become durable; a full disk is waited for, while nothing new is taken.

    A bridge that goes down tries once: what could not be recorded, the next start tells.
    """
    runner = run.runner
    while run.state.phase is Phase.RUNNING:
        try:
            with anyio.CancelScope(shield=True):
                await run.feed(StagesEnded(failure, detail))
        except DiskUnusable as error:
            run.log.error("cannot record the outcome; trying again", error=str(error))
            await runner.clock.sleep_until_ms(runner.clock.now_ms() + 1_000)


async def _answer_too_late(runner: Runner, key: Key) -> None:
    """A start without a live reservation runs nothing (protocol.md, Offer, reservation, start).

    What was held here has ended with a result of its own, which nothing may contradict.  A hub
    that is not answered renews for ever what does not run, so a full disk is waited for; how many
    wait is bounded by the queue of what the hub has said.
    """
    if runner.admission.was_held(key):
        return
    await supersede(runner, *key)
    clock = runner.clock
    while not await answer_without_run(
        runner, *key, FailureCode.START_TIMEOUT, "no live reservation"
    ):
        await clock.sleep_until_ms(clock.now_ms() + ANSWER_RETRY_MS)


async def answer_without_run(
    runner: Runner, attempt_id: str, fence: int, failure: FailureCode, detail: str
) -> bool:
    """The result of a dispatch that never ran here, so there is nothing to clean up.

    An offer of it that comes later still is refused: no result may contradict this one.

    :returns: whether it is on disk.
    """
    result = SubmitDispatchResult(
        attempt_id=attempt_id,
        fence=fence,
        resource_runner_instance_id=runner.identity.runner_instance_id,
        revision=2,
        outcome=Outcome.FAILED,
        failure_code=failure,
        cleanup=CleanupState.COMPLETE,
        summary=detail,
    )
    message_id = f"{attempt_id}.{fence}.r2"
    try:
        await runner.outbox.put(Message(message_id, "SubmitDispatchResult", result.to_wire()))
    except DiskUnusable as error:
        logger.error("cannot store a result", attempt_id=attempt_id, error=str(error))
        return False
    runner.admission.spend((attempt_id, fence))
    return True
