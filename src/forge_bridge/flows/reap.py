"""A pass over everything that carries this runner's labels (B-80, B-86, B-88)."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from forge_bridge.flows.teardown import remove, tear_down
from forge_bridge.runner import Runner
from forge_core.attempt import Phase
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.labels import ROLE, Owner, runner_filter
from forge_core.ports import Engine, EngineResource
from forge_core.ready import Message
from forge_core.reap import Claim, claim_of
from forge_core.teardown import REMOVAL_ORDER, Removal
from forge_core.wire.codes import CleanupTrigger, RemovalOutcome, ReservationState
from forge_core.wire.from_bridge import SubmitCleanupReport, SubmitReapOutcome
from forge_core.wire.from_hub import Reap
from forge_core.wire.shapes import RemovedResource

logger = structlog.get_logger(__name__)

PASS_INTERVAL_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What one pass did."""

    removed: int = 0
    absent: int = 0
    failed: int = 0

    def count(self, resources: tuple[RemovedResource, ...]) -> PassOutcome:
        """With these resources added."""
        outcomes = [resource.outcome for resource in resources]
        return PassOutcome(
            self.removed + outcomes.count(RemovalOutcome.REMOVED),
            self.absent + outcomes.count(RemovalOutcome.ABSENT),
            self.failed + outcomes.count(RemovalOutcome.FAILED),
        )


class Reaper:
    """Runs passes, one at a time."""

    def __init__(self, runner: Runner, engine: Engine) -> None:
        self._runner = runner
        self._engine = engine
        self._one_at_a_time = anyio.Lock()

    async def run_every_minute(self) -> None:
        """For as long as the bridge runs."""
        clock = self._runner.clock
        while True:
            await clock.sleep_until_ms(clock.now_ms() + PASS_INTERVAL_MS)
            await self.run_pass(CleanupTrigger.PERIODIC)

    async def run_pass(
        self, trigger: CleanupTrigger, only: tuple[str, int] | None = None
    ) -> PassOutcome:
        """Remove what has ended and what an earlier instance left; leave everything else.

        :param only: restrict the pass to one dispatch.
        """
        async with self._one_at_a_time:
            outcome = await self._finish_degraded(trigger, only)
            try:
                listed = await self._engine.list_resources(
                    runner_filter(self._runner.identity.runner_id)
                )
            except ForgeError as error:
                # Nothing is ever removed on the strength of a list that could not be had.
                logger.warning("a pass could not list the runner's resources", error=str(error))
                return outcome
            for owner, resources in self._removable(listed).items():
                if only is None or only == (owner.attempt_id, owner.fence):
                    removed = await self._remove_all(owner, resources, trigger)
                    outcome = outcome.count(removed)
            return outcome

    async def _finish_degraded(
        self, trigger: CleanupTrigger, only: tuple[str, int] | None
    ) -> PassOutcome:
        outcome = PassOutcome()
        runs = [r for r in self._runner.attempts.values() if r.state.phase is Phase.DEGRADED]
        for run in runs:
            if only is None or only == run.state.key:
                outcome = outcome.count(await tear_down(run, self._engine, trigger))
        return outcome

    def _removable(self, listed: Sequence[EngineResource]) -> dict[Owner, list[EngineResource]]:
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
            key = (owner.attempt_id, owner.fence) if owner is not None else None
            if owner is not None and claim in (Claim.ENDED, Claim.OLD_INSTANCE):
                held = runner.attempts.get(key) if key is not None else None
                if held is None or held.state.owner != owner:
                    found[owner].append(resource)
        return found

    async def _remove_all(
        self, owner: Owner, resources: list[EngineResource], trigger: CleanupTrigger
    ) -> tuple[RemovedResource, ...]:
        ordered = sorted(resources, key=lambda r: (REMOVAL_ORDER.index(r.kind), r.name))
        removed = tuple(
            [
                await remove(self._engine, Removal(r.kind, r.id, r.name, r.labels[ROLE]))
                for r in ordered
            ]
        )
        try:
            await self._runner.outbox.put(self._report(owner, removed, trigger))
        except DiskUnusable as error:
            logger.error("cannot store a cleanup report", error=str(error))
        return removed

    def _report(
        self, owner: Owner, removed: tuple[RemovedResource, ...], trigger: CleanupTrigger
    ) -> Message:
        created_at = self._runner.clock.utc()
        material = f"{owner}|{trigger}|{created_at}|{self._runner.identity.runner_instance_id}"
        report = SubmitCleanupReport(
            report_id=hashlib.sha256(material.encode()).hexdigest()[:32],
            attempt_id=owner.attempt_id,
            fence=owner.fence,
            resource_runner_instance_id=owner.runner_instance_id,
            runner_id=owner.runner_id,
            runner_instance_id=self._runner.identity.runner_instance_id,
            part=1,
            parts=1,
            created_at=created_at,
            trigger=trigger,
            resources=removed,
        )
        return Message(report.report_id, "SubmitCleanupReport", report.to_wire())


async def handle_reap(runner: Runner, reaper: Reaper | None, reap: Reap) -> None:
    """The scoped Reap action of Profile Settings; its outcome is durable (B-88)."""
    if reaper is None or reap.runner_id != runner.identity.runner_id:
        return
    only = None
    if reap.attempt_id is not None and reap.fence is not None:
        only = (reap.attempt_id, reap.fence)
    outcome = await reaper.run_pass(CleanupTrigger.REAP_ACTION, only)
    answer = SubmitReapOutcome(
        request_id=reap.request_id,
        runner_instance_id=runner.identity.runner_instance_id,
        removed=outcome.removed,
        absent=outcome.absent,
        failed=outcome.failed,
        degraded_reservation_count=runner.admission.count(ReservationState.DEGRADED),
    )
    message = Message(f"{reap.request_id}.reap", "SubmitReapOutcome", answer.to_wire())
    try:
        await runner.outbox.put(message)
    except DiskUnusable as error:
        logger.error("cannot store the outcome of a reap action", error=str(error))
