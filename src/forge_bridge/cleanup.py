"""Cleaning up without a bridge: what ``sandbox reap`` does, and what it would do (B-42).

::

    look for an owner ─▶ engine ─▶ locks ─▶ end old dispatches ─▶ remove orphans ─▶ release

Takes no work and talks to no hub.  Whatever it is interrupted in, the next pass or the next start
of the bridge goes on with.
"""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.abc

from forge_bridge.flows.boot import believed, end_old_dispatches
from forge_bridge.flows.reap import PassOutcome, Reaper
from forge_bridge.flows.replay import Replay
from forge_bridge.groups import first_error
from forge_bridge.repositories import RegisteredRepositories
from forge_bridge.runner import Identity, Runner
from forge_bridge.settings import BridgeSettings, LoadedSettings, make_default_parents
from forge_bridge.state_root import StateRoot
from forge_bridge.state_root.ledgers import StoredLedger
from forge_core.admission import DiskPressure, Key
from forge_core.attempt import Phase
from forge_core.errors import RefusedError
from forge_core.labels import Owner, runner_filter
from forge_core.ready import Record
from forge_core.reap import removals_of_all
from forge_core.recovery import restore
from forge_core.resources import ResourceCapacity
from forge_core.teardown import Removal
from forge_core.wire.codes import CleanupTrigger
from forge_core.wire.shapes import Capabilities, SandboxReadiness
from forge_edges.clock import SystemClock
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from forge_edges.git_stores import GitStores
from forge_edges.host_runtime import LocalHost

_NOTHING: Final = Capabilities(
    runtimes=(),
    quota_supported=False,
    dedicated_disk=False,
    sandbox_required=SandboxReadiness(ready=False),
    image_policy_enforced=False,
    signature_verification=False,
    resource_capacity=ResourceCapacity(slots=0),
)


@dataclass(frozen=True, slots=True)
class Cleanup:
    """What was done, for which runner."""

    runner_id: str | None
    outcome: PassOutcome


@dataclass(frozen=True, slots=True)
class CleanupPlan:
    """What would be done.

    :ivar dispatches: that would be ended, as their ledgers tell.
    :ivar listed: the ids that engine and host know; the other removals are in a ledger only.
    """

    runner_id: str | None
    dispatches: tuple[Key, ...] = ()
    removals: tuple[tuple[Owner, Removal], ...] = ()
    listed: frozenset[str] = frozenset()


async def clean_up(loaded: LoadedSettings) -> Cleanup:
    """End and remove what earlier instances left; every report is on disk when this returns.

    :raises EngineLockHeld: the bridge runs, or another cleanup does.
    :raises EngineUnreachable: nothing was removed.
    :raises RefusedError: the state root is unfit; the text holds the remedy.
    :raises DiskUnusable: the state root cannot be written.
    """
    settings, clock = loaded.settings, SystemClock()
    make_default_parents(loaded)
    root = await StateRoot.open(
        settings.sandbox_state_root, clock=clock, runner_id=settings.runner_id
    )
    await root.require_unowned()
    async with _engine(settings) as engine:
        instance_id = clock.new_id()
        facts = await engine.facts()
        lock = await root.acquire_engine_lock(facts.id, root.runner_id, instance_id=instance_id)
        try:
            with first_error():
                outcome = await _end_and_remove(settings, root, instance_id, clock, engine)
        finally:
            await root.ledgers.close()
            lock.release()
    return Cleanup(root.runner_id, outcome)


async def _end_and_remove(
    settings: BridgeSettings,
    root: StateRoot,
    instance_id: str,
    clock: SystemClock,
    engine: DockerEngine,
) -> PassOutcome:
    async with anyio.create_task_group() as tasks:
        runner = await _runner(settings, root, instance_id, clock, engine, tasks)
        ended = await end_old_dispatches(runner, root.ledgers, CleanupTrigger.CLI)
        orphans = await Reaper(runner).remove_orphans(CleanupTrigger.CLI)
        # A message that the outbox could not take stays in its ledger for the next start.
        tasks.cancel_scope.cancel()
    return PassOutcome((*ended, *orphans.reaped), orphans.unlisted)


async def plan_cleanup(settings: BridgeSettings) -> CleanupPlan:
    """What :func:`clean_up` would find; writes nothing anywhere.  Raises likewise."""
    root = await StateRoot.find(
        settings.sandbox_state_root, clock=SystemClock(), runner_id=settings.runner_id
    )
    if root is None:
        return CleanupPlan(None)
    await root.require_unowned()
    async with _engine(settings) as engine:
        await root.require_unowned((await engine.facts()).id)
        dispatches = dict(filter(None, map(_unfinished, await root.ledgers.read_all())))
        labels = runner_filter(root.runner_id)
        host = LocalHost(root.host, SystemClock())
        listed = [*await engine.list_resources(labels), *await host.list_resources(labels)]
    return CleanupPlan(
        root.runner_id,
        tuple(owner.key for owner in dispatches),
        removals_of_all(dispatches, listed, runner_id=root.runner_id),
        frozenset(resource.id for resource in listed),
    )


def _unfinished(stored: StoredLedger) -> tuple[Owner, tuple[Record, ...]] | None:
    """A dispatch that its ledger does not show as released; None too where it is suspect."""
    try:
        records = believed(stored.contents)
        attempt, _ = restore(records)
    except RefusedError:
        return None
    return None if attempt.phase is Phase.ENDED else (attempt.owner, records)


def _engine(settings: BridgeSettings) -> AbstractAsyncContextManager[DockerEngine]:
    return DockerEngine.connect(resolve_endpoint(settings.docker_context, os.environ))


async def _runner(
    settings: BridgeSettings,
    root: StateRoot,
    instance_id: str,
    clock: SystemClock,
    engine: DockerEngine,
    tasks: anyio.abc.TaskGroup,
) -> Runner:
    """A runner that offers nothing, and holds what resists."""
    repositories = RegisteredRepositories(root.path)
    outbox = Replay(root.messages, clock, runner_id=root.runner_id, runner_instance_id=instance_id)
    await outbox.load()
    return Runner(
        identity=Identity.of_this_host(root.runner_id, instance_id, settings.trust_domain_id or ""),
        clock=clock,
        engine=engine,
        host=LocalHost(root.host, clock),
        git=GitStores(root.repositories, repositories.clones),
        outbox=outbox,
        ledgers=root.ledgers,
        repositories=repositories,
        tasks=tasks,
        sandbox=None,
        capacity=settings.resource_capacity,
        capabilities=_NOTHING,
        disk=DiskPressure(100, 100, 0),
    )
