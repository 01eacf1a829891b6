"""The invariants, apart from the workload: what is watched, and what must hold at every step.

Each checker has a name, which a violation begins with:

``capacity``      what is held fits, adds up, and covers every agent that really runs
``one run``       no agent runs twice under one fence, nor under an old one
``intent``        nothing is created without a durable intent in the ledger
``lease``         no agent outlives its lease by more than a tick and the grace
``drain``         nothing is admitted while the runner drains
``foreign``       nothing of others is touched
``published``     exactly the result commit is pushed, with a durable intent, once in effect
``secret``        no secret is written, sent or given to the engine
``durable``       a message is on disk before it is sent
``delivered``     in the end, every durable message has reached the hub
``reported``      in the end, the hub knows of everything that was removed
``nothing left``  in the end, engine, ledgers and outbox are empty and the capacity is whole
``outcome``       a result never changes, and no fault that is simulated is an ``internal_error``
``protocol``      what the hub is told is what its models say
``exactly once``  what comes again is the same message

Those of networks, services and the host are in ``wall_checkers``, of images in ``image_checkers``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from forge_bridge.flows.reap import PASS_INTERVAL_MS
from forge_bridge.runner import Runner
from forge_core.admission import Admission, Key
from forge_core.attempt import Phase
from forge_core.labels import ATTEMPT_ID, FENCE, INSTANCE_ID, RUNNER_ID, Owner, is_ours
from forge_core.ledger import parse_ledger
from forge_core.ports import EngineResource
from forge_core.ready import Record, RecordKind, messages_of
from forge_core.resources import COMPONENTS, ResourceVector
from forge_core.sealed import unseal
from forge_core.wire.codes import ReservationState, Runtime
from forge_supervisor import supervisor as real

from .containers import Hostility, Pid1
from .disk import LEDGERS, OUTBOX, REPORTS, ledger_path
from .engine import PROCESS as ENGINE
from .engine import Container
from .final_checkers import check_delivery, check_publications, check_reports
from .host import HostProcess
from .hub import KILL_GRACE_MS, REPLAYED
from .image_checkers import ImageCheckers
from .network import FORGED_SEQUENCE
from .setup import SLOTS, THIS_RUNNER
from .wall_checkers import SLACK_MS, SLOW_DISK_MS, TICK_MS, WallCheckers
from .work import COMMIT, message_id
from .world import World

if TYPE_CHECKING:
    from .bridge import Life
    from .services import ServicePid1
    from .simulation import Simulation

LATE_S: Final = 15.0
"""How long ago nothing was listed, when the disk was slow since."""

HOST_KILL_MS: Final = 300_000
"""For a host that must do it without PID 1, against an engine that resists for a while."""


class Checkers:
    """Told by the engine, the containers, the disk and the bridge's doors what they see."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.simulation: Simulation
        self.secrets: set[bytes] = set()
        self.agents: list[Pid1] = []
        self.recorded: dict[tuple[str, str], str] = {}
        self.created_s: dict[str, float] = {}
        self._removed: dict[str, Key] = {}
        self._superseded_ms: dict[Key, int] = {}
        self._unended_ms: dict[Key, int] = {}
        self._ran: set[tuple[str, int, str]] = set()
        self._held: frozenset[Key] = frozenset()
        self._admission: Admission | None = None
        self._used: ResourceVector | None = None
        self._was_draining = False
        self._lease_ends_ms: dict[Key, int] = {}
        self._held_back_ttl_ms: dict[Key, int] = {}
        self._start_heard_ms: dict[Key, int] = {}
        self.trouble_ms = 0
        self.walls = WallCheckers(self)
        self.images = ImageCheckers(self)

    # -- what others tell -----------------------------------------------------------------------

    def secret(self, value: str) -> str:
        """From now on this may be nowhere."""
        self.secrets.add(value.encode())
        return value

    def created(self, resource: EngineResource) -> None:
        """See :class:`.engine.EngineWatch`."""
        self.created_s[resource.id] = self.world.now_s

    def started(self, container: Container) -> None:
        """See :class:`.engine.EngineWatch`; an agent counts from its ``init``."""

    def removed(self, resource: EngineResource) -> None:
        """See :class:`.engine.EngineWatch`."""
        ours = resource.labels.get(RUNNER_ID) == THIS_RUNNER
        consistent = ours and is_ours(resource.name, resource.labels)
        self.world.require(consistent, "foreign", f"{resource.name} is removed")
        if not _is_of_runner(resource.labels):
            self._removed[resource.name] = _key_of(resource)

    def ledgers_forgotten(self) -> None:
        """Of what was removed before, nobody can tell any more."""
        self._removed.clear()

    def agent_started(self, agent: Pid1, init: real.Init) -> None:
        """PID 1 has believed its ``init``."""
        run = (*agent.key, agent.container.role)
        again = run in self._ran
        self.world.require(not again, "one run", f"{agent.key} runs a second time")
        self._ran.add(run)
        self.agents.append(agent)

    def agent_ended(self, agent: Pid1) -> None:
        """Its processes are gone."""
        if agent in self.agents:
            self.agents.remove(agent)

    def service_told(self, service: ServicePid1, password: str) -> None:
        """See :class:`.services.ServiceWatch`: nothing that is kept may have it, not yet either."""
        self.secret(password)
        for path, data in self.simulation.disk.files.items():
            self._search(path, data)
        for container in self.simulation.engine.containers.values():
            self._search(container.name, json.dumps(container.request).encode())

    def service_died(self, service: ServicePid1) -> None:
        """See :class:`.services.ServiceWatch`."""
        self.walls.service_died(service)

    def wrote(self, path: str, data: bytes) -> None:
        """Something is about to be on disk."""
        self._search(path, data)

    def synced(self, path: str, data: bytes) -> None:
        """It is on disk for good."""
        if path.startswith(LEDGERS) and path.endswith(".ledger"):
            self._note_messages(path, data)
        self.images.synced(path, data)

    def delivered(self, target: str, payload: Mapping[str, Any]) -> None:
        """The bridge hears something that may move a lease."""
        if target not in ("Start", "LeaseUpdate"):
            return
        key, now = (payload["attemptId"], payload["fence"]), self.world.now_ms
        if target == "Start":
            # The first packet wins, and nothing that comes later begins anew.
            self._start_heard_ms.setdefault(key, now)
            self._lease_ends_ms.setdefault(key, now + payload["lease"]["ttlMs"])
        elif now < self._lease_ends_ms.get(key, 0) and payload["sequence"] < FORGED_SEQUENCE:
            self._lease_ends_ms[key] = now + payload["ttlMs"]
            if not self._is_calm():
                self._held_back_ttl_ms[key] = payload["ttlMs"]

    def before_push(self, branch: str, commit: str) -> None:
        """A life pushes: it has said so on disk."""
        intended = any(
            record.kind == RecordKind.PUSH_INTENT
            and (record.data["branch"], record.data["resultCommit"]) == (branch, commit)
            for path, data in self.simulation.disk.synced.items()
            if path.startswith(LEDGERS)
            for record in parse_ledger(data).records
        )
        self.world.require(intended, "intent", f"{commit} is pushed without a durable intent")

    def moves(self, branch: str, expected: str | None, commit: str) -> None:
        """A push of ours is about to move a branch of the remote."""
        require, simulation = self.world.require, self.simulation
        imported = commit in simulation.git.refs.values()
        require(imported, "published", f"{commit} is pushed, and nothing like it was imported")
        given_out = {
            dispatch.redeemed
            for dispatch in simulation.hub.dispatches.values()
            if dispatch.attempt.branch == branch
        }
        require(commit in given_out, "published", f"{commit} is pushed without a credential for it")
        first = branch not in {moved for moved, *_ in simulation.remote.moved}
        require(first, "published", f"{branch} is moved a second time")
        require(expected in {None, COMMIT}, "published", f"{branch} was at {expected}")

    def before_effect(self, life: Life, what: str, arguments: tuple[Any, ...]) -> None:
        """A life asks the engine for something."""
        match what:
            case "create_container":
                self._search(what, json.dumps(arguments[1]).encode())
                self._require_intent(arguments[0], arguments[1]["Labels"])
                self.images.asks_for_container(arguments[1])
            case "create_volume" | "create_network":
                labels = arguments[1]
                self._require_intent(arguments[0], labels.get("Labels", labels))
                if what == "create_network":
                    self.walls.asks_for_network(life, *arguments)
            case "host create_volume":
                self._require_intent(*arguments)
            case "host create_container":
                name, program = arguments
                said = repr((program.argv, program.environment, program.labels)).encode()
                self._search(what, said)
                self._require_intent(name, program.labels)
                self.walls.starts_on_host(life, program.labels)
            case "build":
                self._search(what, repr(arguments).encode())
            case "remove_image":
                self.images.asks_to_remove(life, *arguments)
            case "send":
                self._check_init(life, *arguments)
            case _ if what.startswith(("start_", "remove_", "connect_", "disconnect_")):
                self._require_ours(what, arguments[0])

    def before_send(self, life: Life, method: str, payload: Mapping[str, object]) -> None:
        """A life sends something to the hub."""
        self._search(method, json.dumps(payload).encode())
        if method not in REPLAYED or "streamSequence" in payload:
            return
        disk = self.simulation.disk
        identity = message_id(method, payload)
        found = any(identity in path for path in disk.synced if path.startswith((OUTBOX, REPORTS)))
        self.world.require(found, "durable", f"{method} {identity} is sent but not on disk")

    # -- at every step --------------------------------------------------------------------------

    def after_step(self) -> None:
        """What must hold now."""
        life = self.simulation.host.life
        runner = None if life is None else life.runner
        if runner is None:
            self._admission = None
            return
        admission = runner.admission
        if admission is not self._admission:
            self._admission, self._used = admission, admission.used
            self._held, self._was_draining = frozenset(admission.reservations), False
        if admission.used is not self._used:
            self._used = admission.used
            self._check_change(runner)
            self._held = frozenset(admission.reservations)
        self._was_draining = runner.hub_settings.draining
        if runner.hub.is_online:
            self._check_coverage(admission)

    def _check_change(self, runner: Runner) -> None:
        """Something was taken, or given back."""
        admission, require = runner.admission, self.world.require
        total = ResourceVector()
        for reservation in admission.reservations.values():
            total += reservation.resources
        require(total == admission.used, "capacity", f"{admission.used} is not {total}")
        for key, reservation in admission.reservations.items():
            if key in self._held or reservation.state is not ReservationState.RESERVED:
                continue
            drained = self._was_draining and runner.hub_settings.draining
            require(not drained, "drain", f"{key} is admitted")
            require(not runner.stopping, "drain", f"{key} is admitted by a bridge that stops")
            require(admission.used.slots <= SLOTS, "capacity", f"{key} is admitted too")
            highest = admission.highest_fence(key[0])
            if reservation.runtime is Runtime.HOST:
                self.walls.admits_to_host(runner, key)
            require(key[1] == highest, "one run", f"{key} is admitted after {highest}")
        for key in sorted(self._held.difference(admission.reservations)):
            self._check_freed(key)

    def _check_freed(self, key: Key) -> None:
        """Nothing of a dispatch may be there when its capacity is given back.

        But for what a slow engine has created since nothing was observed to be there.
        """
        life = self.simulation.host.life
        engine_id = None if life is None else life.engine.engine_id
        recently_s = self.world.now_s - (LATE_S if self.simulation.engine_may_be_late else 0.0)
        left = [
            resource.name
            for resource in self._ours(of_engine=engine_id)
            if _key_of(resource) == key and self.created_s[resource.id] < recently_s
        ]
        self.walls.freed(key)
        self.world.require(not left, "capacity", f"{key} is freed and {left} are there")

    def _check_coverage(self, admission: Admission) -> None:
        """The hub is told what really runs: an agent that nothing is held for is not told."""
        for agent in self.agents:
            if agent.key not in admission.reservations and self._is_here(agent):
                self.world.violate("capacity", f"{agent.key} runs and nothing is held for it")

    def every_second(self) -> None:
        """What time alone can break."""
        now = self.world.now_ms
        if self._is_calm():
            self._held_back_ttl_ms.clear()
        else:
            self.trouble_ms = now
            # PID 1 counts from when it hears a renewal, which a frozen engine hands on late.
            for key, ttl_ms in self._held_back_ttl_ms.items():
                self._lease_ends_ms[key] = now + ttl_ms
        self._check_runs(now)
        self.walls.every_second(now)
        for agent in tuple(self.agents):
            if self.world.processes.is_frozen(agent.container.process):
                agent.frozen_ms = now
            end_ms = max(self._lease_ends_ms[agent.key], self.trouble_ms)
            self._check_superseded(agent, now)
            if agent.hostility is Hostility.ENDLESS:
                limit_ms = end_ms + HOST_KILL_MS
            else:
                limit_ms = min(end_ms + TICK_MS, self._hub_waits_until_ms(agent))
                limit_ms = max(limit_ms, agent.frozen_ms) + KILL_GRACE_MS
            self.world.require(
                now <= limit_ms + SLACK_MS,
                "lease",
                f"{agent.key} still runs ({agent.hostility.value})",
            )

    def _check_runs(self, now: int) -> None:
        """Once a higher fence was seen, a run under a lower one has a reason to end."""
        life = self.simulation.host.life
        runner = None if life is None else life.runner
        if life is None or runner is None or self.world.processes.is_frozen(life.process):
            self._unended_ms.clear()
            return
        for key, run in runner.attempts.items():
            ending = run.state.phase is not Phase.RUNNING or run.state.failure is not None
            if ending or runner.admission.highest_fence(key[0]) == key[1]:
                self._unended_ms.pop(key, None)
                continue
            since_ms = self._unended_ms.setdefault(key, now)
            allowed_ms = SLOW_DISK_MS if self.simulation.faults.disk_slow else TICK_MS
            goes_on = now > since_ms + allowed_ms
            self.world.require(not goes_on, "one run", f"{key} has no reason to end, superseded")

    def _check_superseded(self, agent: Pid1, now: int) -> None:
        """Once the bridge has seen a higher fence, an agent under a lower one must go."""
        attempt_id, fence = agent.key
        if self._admission is not None and self._admission.highest_fence(attempt_id) > fence:
            self._superseded_ms.setdefault(agent.key, now)
        since_ms = self._superseded_ms.get(agent.key)
        if since_ms is not None:
            # What the engine did not let go at once is tried again by the next pass.
            allowed_ms = PASS_INTERVAL_MS + KILL_GRACE_MS + SLACK_MS
            if agent.hostility is Hostility.ENDLESS:
                allowed_ms = HOST_KILL_MS
            over_ms = max(since_ms, self.trouble_ms, agent.frozen_ms) + allowed_ms
            self.world.require(now <= over_ms, "one run", f"{agent.key} goes on, superseded")

    def _hub_waits_until_ms(self, agent: Pid1) -> int:
        """Until then the hub gives the attempt to nobody else (protocol.md, A lost hub)."""
        dispatch = self.simulation.hub.dispatches[agent.key]
        # A start that the network holds back for longer than its ttl begins a lease all the same.
        sent_ms = max(dispatch.sent_ms, self._start_heard_ms[agent.key])
        return sent_ms + 2 * dispatch.attempt.ttl_ms

    def _is_calm(self) -> bool:
        """Whether a renewal goes at once from the hub to PID 1, and a kill from the host."""
        simulation, loop = self.simulation, self.world.processes
        engine, life, faults = simulation.engine, simulation.host.life, simulation.faults
        if life is None or life.runner is None or loop.is_frozen(life.process):
            return False
        if not engine.up or engine.is_replaced or loop.is_frozen(ENGINE):
            return False
        return not (faults.engine_slow or faults.engine_lost or faults.disk_slow)

    # -- at the end -----------------------------------------------------------------------------

    def is_quiet(self, *, on_disk_too: bool = False) -> bool:
        """Whether everything has come to rest."""
        life = self.simulation.host.life
        runner = None if life is None else life.runner
        return (
            life is not None
            and runner is not None
            and runner.hub.is_online
            and not runner.admission.reservations
            and not life.unacknowledged
            and not self.simulation.engine.is_replaced
            and not self._ours()
            and not self.simulation.hub.live()
            and not self.simulation.builds.running
            and not (on_disk_too and (self._files() or self.images.left()))
        )

    def _files(self) -> list[str]:
        """What is in ``attempts/``, ``outbox/`` and ``cleanup-reports/``."""
        names = self.simulation.disk.names
        return [*names(LEDGERS, ".ledger"), *names(OUTBOX, ".json"), *names(REPORTS, ".json")]

    def at_the_end(self) -> None:
        """What must hold once nothing goes wrong any more and time has passed."""
        simulation, require = self.simulation, self.world.require
        life = simulation.host.life
        runner = None if life is None else life.runner
        require(runner is not None, "nothing left", "the bridge does not run")
        if runner is not None:
            held = dict(runner.admission.reservations)
            require(not held, "nothing left", f"held: {list(held.values())}")
            require(
                not any(getattr(runner.admission.used, name) for name in COMPONENTS),
                "nothing left",
                "capacity is not whole",
            )
        names = [resource.name for resource in self._ours()]
        require(not names, "nothing left", f"in the engine: {names}")
        believed = [dispatch.id for dispatch in simulation.hub.live()]
        require(not believed, "nothing left", f"the hub believes that these run: {believed}")
        files = self._files()
        require(not files, "nothing left", f"on disk: {files}")
        images = self.images.left()
        require(not images, "nothing left", f"of images: {images}")
        for resource in simulation.foreign:
            there = resource in simulation.engine.resources()
            require(there, "foreign", f"{resource.name} is gone")
        check_delivery(simulation)
        check_reports(simulation, self._removed)
        check_publications(simulation)

    # -- private --------------------------------------------------------------------------------

    def _is_here(self, agent: Pid1) -> bool:
        """In the engine that this life of the bridge began with, and that stands there now.

        What a dead bridge has left on the host goes on until somebody has looked.
        """
        if isinstance(agent.container, HostProcess):
            return not agent.container.stays
        engine, life = self.simulation.engine, self.simulation.host.life
        serves_it = life is not None and life.engine.engine_id == engine.id
        return serves_it and agent.container.id in engine.containers

    def _require_intent(self, name: str, labels: Mapping[str, str]) -> None:
        if _is_of_runner(labels):
            return
        path = ledger_path(labels[ATTEMPT_ID], int(labels[FENCE]))
        records = parse_ledger(self.simulation.disk.synced.get(path, b"")).records
        intended = any(r.kind == RecordKind.INTENT and r.data["name"] == name for r in records)
        self.world.require(intended, "intent", f"{name} is asked for without a durable intent")

    def _require_ours(self, what: str, reference: str) -> None:
        for resource in self.simulation.engine.resources():
            if reference in (resource.id, resource.name):
                ours = resource.labels.get(RUNNER_ID) == THIS_RUNNER
                consistent = ours and is_ours(resource.name, resource.labels)
                self.world.require(consistent, "foreign", f"{what} of {resource.name}")

    def _check_init(self, life: Life, container: Any, data: bytes) -> None:
        """The orders go out: from here on the agent may run."""
        if not data.startswith(b'{"type":"init"'):
            return
        runner = life.runner
        key = (container.labels[ATTEMPT_ID], int(container.labels[FENCE]))
        highest = 0 if runner is None else runner.admission.highest_fence(key[0])
        self.world.require(highest <= key[1], "one run", f"{key} is started, {highest} was seen")

    def _search(self, where: str, data: bytes) -> None:
        for secret in self.secrets:
            if secret in data:
                self.world.violate("secret", f"a secret is in {where}")

    def _note_messages(self, path: str, data: bytes) -> None:
        for line in data.splitlines():
            value = unseal(line)
            for message in messages_of([Record(RecordKind(value["kind"]), value["data"])]):
                report = message.method == "SubmitCleanupReport"
                identity = f"{message.id}.1" if report else message.id
                self.recorded[message.method, identity] = path

    def _ours(self, *, of_engine: str | None = None) -> list[EngineResource]:
        """Of this runner, in the engine that stands there now or in the one that is named.

        But for what lives as long as the bridge itself.
        """
        engine, life = self.simulation.engine, self.simulation.host.life
        instance_id = None if life is None else life.instance_id
        found = engine.resources() if of_engine is None else engine.resources_of(of_engine)
        found += self.simulation.machine.resources()
        return [
            resource
            for resource in found
            if resource.labels.get(RUNNER_ID) == THIS_RUNNER
            and is_ours(resource.name, resource.labels)
            and not (_is_of_runner(resource.labels) and resource.labels[INSTANCE_ID] == instance_id)
        ]


def _key_of(resource: EngineResource) -> Key:
    return resource.labels[ATTEMPT_ID], int(resource.labels[FENCE])


def _is_of_runner(labels: Mapping[str, str]) -> bool:
    owner = Owner.from_labels(labels)
    return owner is not None and owner.is_runner
