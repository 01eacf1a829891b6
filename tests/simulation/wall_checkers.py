"""The invariants of what surrounds an agent; told by :class:`.checkers.Checkers`.

``subnet``    no subnet is given twice, nor before the network in it was observed gone
``host``      nothing runs on the host but by policy or permission, and with its operator's leave
``service``   an agent does not go on without its services
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any, Final

from forge_bridge.flows.reap import PASS_INTERVAL_MS
from forge_bridge.host.place import AGENT
from forge_bridge.runner import Runner
from forge_core.admission import Key
from forge_core.labels import ATTEMPT_ID, FENCE, INSTANCE_ID, ROLE
from forge_core.wire.codes import Runtime

from .containers import Hostility
from .engine import Thing
from .engine_networks import subnet_of
from .hub import KILL_GRACE_MS

if TYPE_CHECKING:
    from .bridge import Life
    from .checkers import Checkers
    from .services import ServicePid1

TICK_MS: Final = 1_000
SLOW_DISK_MS: Final = 30_000
"""For what waits behind a few records of the same dispatch."""

SLACK_MS: Final = 1_500
"""For the way from the bridge to PID 1, and for what a killed process takes to end."""


class WallCheckers:
    """What one life of the bridge does with its networks, beside what the others look at."""

    def __init__(self, checkers: Checkers) -> None:
        self._checkers = checkers
        self._world = checkers.world
        self._instance_id = ""
        self._freed: set[Key] = set()
        self._allowed_ms: dict[Key, int] = {}
        self._frozen_ms = 0
        self._died: dict[Key, tuple[str, int]] = {}

    def freed(self, key: Key) -> None:
        """Its capacity is given back, and its subnets with it."""
        self._freed.add(key)

    def asks_for_network(self, life: Life, name: str, request: Mapping[str, Any]) -> None:
        """A life asks for a network: nothing that it has made may be in that subnet."""
        self._of_life(life)
        wanted = subnet_of(request)
        self._world.require(wanted, "subnet", f"{name} is to be anywhere")
        for network in self._networks():
            there = subnet_of(network.request)
            known = _key_of(network) not in self._freed
            if known and wanted is not None and there is not None and there.overlaps(wanted):
                self._world.violate("subnet", f"{name} is to be where {network.resource.name} is")

    def admits_to_host(self, runner: Runner, key: Key) -> None:
        """Only where the operator allows it, and somebody has chosen it for now."""
        self._world.require(self._may_use_host(runner, key), "host", f"{key} is admitted to it")

    def starts_on_host(self, life: Life, labels: Mapping[str, str]) -> None:
        """Likewise, but for what the record of the intent took."""
        key = (labels[ATTEMPT_ID], int(labels[FENCE]))
        if life.runner is None or labels[ROLE] != AGENT:
            return
        faults = self._checkers.simulation.faults
        since_ms = max(self._allowed_ms.get(key, 0), self._frozen_ms)
        lately = self._world.now_ms - since_ms <= (SLOW_DISK_MS if faults.disk_slow else TICK_MS)
        may = lately or self._may_use_host(life.runner, key)
        self._world.require(may, "host", f"{key} starts on it")

    def _may_use_host(self, runner: Runner, key: Key) -> bool:
        simulation = self._checkers.simulation
        attempt = simulation.hub.dispatches[key].attempt
        if not simulation.host.setup.allows_host:
            return False
        if attempt.runs_on == "host":
            return True
        until_s = attempt.host_until_s
        enabled = runner.hub_settings.host_fallback_enabled
        wall_s = self._world.now_s + self._world.wall_offset_s
        return enabled and until_s is not None and wall_s < until_s

    def _look_at_host(self, now_ms: int) -> None:
        life = self._checkers.simulation.host.life
        if life is None or life.runner is None:
            return
        if self._world.processes.is_frozen(life.process):
            self._frozen_ms = now_ms
        for key, reservation in life.runner.admission.reservations.items():
            on_host = reservation.runtime is Runtime.HOST
            if on_host and reservation.offer_id and self._may_use_host(life.runner, key):
                self._allowed_ms[key] = now_ms

    def service_died(self, service: ServicePid1) -> None:
        """By itself, so that its attempt has a reason to end."""
        life = self._checkers.simulation.host.life
        if life is not None:
            self._died[service.key] = (life.process, self._world.now_ms)

    def every_second(self, now_ms: int) -> None:
        """What time alone can break."""
        self._check_subnets()
        self._check_forsaken(now_ms)
        self._look_at_host(now_ms)

    def _check_forsaken(self, now_ms: int) -> None:
        """An agent does not go on without its services."""
        checkers = self._checkers
        life = checkers.simulation.host.life
        for agent in checkers.agents:
            process, since_ms = self._died.get(agent.key, ("", 0))
            if life is None or process != life.process or agent.hostility is Hostility.ENDLESS:
                continue
            since_ms = max(since_ms, checkers.trouble_ms, agent.frozen_ms)
            over_ms = since_ms + PASS_INTERVAL_MS + KILL_GRACE_MS + SLACK_MS
            goes_on = now_ms > over_ms
            self._world.require(not goes_on, "service", f"{agent.key} goes on without its services")

    def _check_subnets(self) -> None:
        """Each network that is there has its subnet to itself, until it is gone."""
        life = self._checkers.simulation.host.life
        runner = None if life is None else life.runner
        if life is None or runner is None:
            return
        self._of_life(life)
        taken: set[IPv4Network] = runner.admission.subnets._taken
        for network in self._networks():
            held = _key_of(network) in self._freed or subnet_of(network.request) in taken
            self._world.require(held, "subnet", f"that of {network.resource.name} is free already")

    def _of_life(self, life: Life) -> None:
        if life.instance_id != self._instance_id:
            self._instance_id = life.instance_id
            self._freed.clear()

    def _networks(self) -> list[Thing]:
        """Of this life, in the engine that stands there now."""
        networks = self._checkers.simulation.engine.networks.values()
        mine = self._instance_id
        return [n for n in networks if n.resource.labels.get(INSTANCE_ID) == mine]


def _key_of(network: Thing) -> Key:
    labels = network.resource.labels
    return labels[ATTEMPT_ID], int(labels[FENCE])
