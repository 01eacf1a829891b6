"""A pass over everything that carries this runner's labels (B-80, B-86, B-88)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

import anyio
import structlog

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.flows.teardown import remove_all, tear_down
from forge_bridge.groups import for_each
from forge_bridge.runner import Runner
from forge_core.admission import Key
from forge_core.attempt import orphaned
from forge_core.attempt_events import ResourceCreated
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.labels import ROLE, Owner, runner_filter
from forge_core.ports import EngineResource
from forge_core.ready import Message
from forge_core.reap import Claim, claim_of
from forge_core.wire.codes import CleanupTrigger, RemovalOutcome, ReservationState, Runtime
from forge_core.wire.from_bridge import SubmitReapOutcome
from forge_core.wire.from_hub import Reap
from forge_core.wire.shapes import RemovedResource

logger = structlog.get_logger(__name__)

T = TypeVar("T")

PASS_INTERVAL_MS: Final = 60_000
DISPATCHES_AT_ONCE: Final = 8
"""Of each, one thing is removed after the other; an engine does little more at a time."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """One resource that a pass went for, and whose it was."""

    owner: Owner
    resource: RemovedResource


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What one pass did.

    :ivar unlisted: why the engine gave no list, so that more may be there; None: it gave one.
    """

    reaped: tuple[Reaped, ...] = ()
    unlisted: str | None = None

    def count(self, outcome: RemovalOutcome) -> int:
        """How many resources came out like this."""
        return sum(1 for one in self.reaped if one.resource.outcome is outcome)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left of what had to go."""
        return self.unlisted is None and self.count(RemovalOutcome.FAILED) == 0


class Reaper:
    """Runs passes, one at a time.

    What no ledger tells of gets one before it is removed, so that a death in between loses no
    report.  It holds the whole capacity, since nobody knows what it may use, until it was
    observed gone (B-86).
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._one_at_a_time = anyio.Lock()
        self._makes_its_own = False
        self._held_without_ledger: dict[Runtime, set[Owner]] = {r: set() for r in Runtime}

    async def run_every_minute(self) -> None:
        """For as long as the bridge runs."""
        clock = self._runner.clock
        while True:
            await clock.sleep_until_ms(clock.now_ms() + PASS_INTERVAL_MS)
            await self.run_pass(CleanupTrigger.PERIODIC)

    async def run_pass(self, trigger: CleanupTrigger, only: Key | None = None) -> PassOutcome:
        """Remove what has ended and what an earlier instance left; leave everything else.

        :param only: restrict the pass to one dispatch.
        """
        async with self._one_at_a_time:
            reaped = await self._finish_degraded(trigger, only)
            orphans = await self._remove_orphans(trigger, only)
            return PassOutcome((*reaped, *orphans.reaped), orphans.unlisted)

    async def remove_orphans(self, trigger: CleanupTrigger) -> PassOutcome:
        """A pass over what belongs to no dispatch that this instance holds."""
        async with self._one_at_a_time:
            return await self._remove_orphans(trigger, None)

    async def between_passes(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what no pass may disturb: from its start on, they leave alone what is the runner's.

        Nobody waits for its end, which may take minutes: a reap action least of all.

        :param work: makes what no dispatch holds, as the preflight does; starts no pass, and one
            work is done at a time.
        """
        async with self._one_at_a_time:
            self._makes_its_own = True
        try:
            return await work()
        finally:
            self._makes_its_own = False

    def _is_in_use(self, owner: Owner) -> bool:
        instance_id = self._runner.identity.runner_instance_id
        own = owner.is_runner and owner.runner_instance_id == instance_id
        return own and self._makes_its_own

    async def _finish_degraded(
        self, trigger: CleanupTrigger, only: Key | None
    ) -> tuple[Reaped, ...]:
        async def finish(run: AttemptRun) -> list[Reaped]:
            removed = await tear_down(run, trigger)
            return [Reaped(run.state.owner, resource) for resource in removed]

        reservations = self._runner.admission.reservations.values()
        degraded = [r.key for r in reservations if r.state is ReservationState.DEGRADED]
        chosen = [key for key in degraded if only is None or only == key]
        runs = [run for key in chosen if (run := self._runner.attempts.get(key)) is not None]
        finished = await for_each(finish, runs, at_once=DISPATCHES_AT_ONCE)
        return tuple(chain.from_iterable(finished))

    async def _remove_orphans(self, trigger: CleanupTrigger, only: Key | None) -> PassOutcome:
        done = [await self._remove_left(runtime, trigger, only) for runtime in Runtime]
        unlisted = next((one.unlisted for one in done if one.unlisted is not None), None)
        return PassOutcome(tuple(chain.from_iterable(one.reaped for one in done)), unlisted)

    async def _remove_left(
        self, runtime: Runtime, trigger: CleanupTrigger, only: Key | None
    ) -> PassOutcome:
        """What was left in the engine, or on the host."""
        labels = runner_filter(self._runner.identity.runner_id)
        try:
            listed = await self._runner.holder(runtime).list_resources(labels)
        except ForgeError as error:
            # Nothing is ever removed on the strength of a list that could not be had.
            logger.warning("a pass could not list the runner's resources", error=str(error))
            return PassOutcome(unlisted=str(error))
        orphans = self._orphans(listed)
        for owner in self._held_without_ledger[runtime] - orphans.keys():
            self._free(owner, runtime)

        async def remove(owners: Sequence[Owner]) -> list[Reaped]:
            return [
                Reaped(owner, resource)
                for owner in owners
                for resource in await self._remove(owner, runtime, orphans[owner], trigger)
            ]

        # Two instances can have left something of one dispatch, which has one ledger.
        dispatches: dict[Key, list[Owner]] = defaultdict(list)
        for owner in orphans:
            if (only is None or only == owner.key) and not self._is_in_use(owner):
                dispatches[owner.key].append(owner)
        reaped = await for_each(remove, dispatches.values(), at_once=DISPATCHES_AT_ONCE)
        return PassOutcome(tuple(chain.from_iterable(reaped)))

    def _orphans(self, listed: Sequence[EngineResource]) -> dict[Owner, list[EngineResource]]:
        runner = self._runner
        found: dict[Owner, list[EngineResource]] = defaultdict(list)
        for resource in listed:
            claim, owner = claim_of(
                resource,
                runner_id=runner.identity.runner_id,
                runner_instance_id=runner.identity.runner_instance_id,
                reservations=runner.admission.reservations,
            )
            if claim is Claim.DISAGREES:
                logger.warning(
                    "a resource carries our labels under a foreign name; not touched",
                    kind=resource.kind,
                    name=resource.name,
                )
            if owner is None or claim not in (Claim.ENDED, Claim.OLD_INSTANCE):
                continue
            # What a ledger tells of is removed with it; another owner's waits until then.
            if owner.key not in runner.attempts:
                found[owner].append(resource)
        return found

    async def _remove(
        self,
        owner: Owner,
        runtime: Runtime,
        resources: Sequence[EngineResource],
        trigger: CleanupTrigger,
    ) -> tuple[RemovedResource, ...]:
        """Remove what was found of one dispatch; nothing without its ledger."""
        if owner.is_runner:
            removed = await remove_all(self._runner.holder(runtime), owner, known=resources)
        else:
            try:
                run = await self._begin_ledger(owner, runtime, resources)
            except ForgeError as error:
                logger.error("cannot record what is to be removed", error=str(error))
                removed = tuple(_left_alone(resource, error) for resource in resources)
            else:
                self._held_without_ledger[runtime].discard(owner)
                return await tear_down(run, trigger)
        if any(r.outcome is RemovalOutcome.FAILED for r in removed):
            self._held_without_ledger[runtime].add(owner)
            self._hold(owner.key)
        else:
            self._free(owner, runtime)
        return removed

    async def _begin_ledger(
        self, owner: Owner, runtime: Runtime, resources: Sequence[EngineResource]
    ) -> AttemptRun:
        runner = self._runner
        found = map(_as_created, resources)
        attempt, ready = orphaned(owner, runner.clock.new_id(), found, runtime)
        run = AttemptRun(runner, attempt, await runner.ledgers.create(*attempt.key))
        try:
            await run.begin(ready)
        except ForgeError:
            await runner.ledgers.remove(*attempt.key)
            raise
        runner.attempts[attempt.key] = run
        self._hold(attempt.key)
        return run

    def _hold(self, key: Key) -> None:
        self._runner.admission.hold_orphaned(key, self._runner.capacity)
        self._runner.notify()

    def _free(self, owner: Owner, runtime: Runtime) -> None:
        """Observed gone; what else is of the same dispatch keeps its capacity."""
        if owner not in self._held_without_ledger[runtime]:
            return
        self._held_without_ledger[runtime].remove(owner)
        key, held = owner.key, chain.from_iterable(self._held_without_ledger.values())
        if key not in self._runner.attempts and key not in (one.key for one in held):
            self._runner.admission.free(key)
            self._runner.notify()


def _as_created(resource: EngineResource) -> ResourceCreated:
    return ResourceCreated(resource.kind, resource.id, resource.name, resource.labels[ROLE])


def _left_alone(resource: EngineResource, why: ForgeError) -> RemovedResource:
    return RemovedResource(
        kind=resource.kind,
        id=resource.id,
        name=resource.name,
        role=resource.labels[ROLE],
        outcome=RemovalOutcome.FAILED,
        detail=f"its removal could not be recorded: {why}"[:2000],
    )


async def handle_reap(runner: Runner, reaper: Reaper, reap: Reap) -> None:
    """The scoped Reap action of Profile Settings; its outcome is durable (B-88)."""
    if reap.runner_id != runner.identity.runner_id:
        return
    outcome = await reaper.run_pass(CleanupTrigger.REAP_ACTION, reap.dispatch)
    answer = SubmitReapOutcome(
        request_id=reap.request_id,
        runner_instance_id=runner.identity.runner_instance_id,
        removed=outcome.count(RemovalOutcome.REMOVED),
        absent=outcome.count(RemovalOutcome.ABSENT),
        failed=outcome.count(RemovalOutcome.FAILED),
        degraded_reservation_count=runner.admission.count(ReservationState.DEGRADED),
    )
    message = Message(f"{reap.request_id}.reap", "SubmitReapOutcome", answer.to_wire())
    try:
        await runner.outbox.put(message)
    except DiskUnusable as error:
        logger.error("cannot store the outcome of a reap action", error=str(error))
