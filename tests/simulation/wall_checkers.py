"""The invariants of what surrounds an agent; told by :class:`.checkers.Checkers`.

``subnet``    no subnet is given twice, nor before the network in it was observed gone
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any

from forge_core.admission import Key
from forge_core.labels import ATTEMPT_ID, FENCE, INSTANCE_ID

from .engine import Thing
from .engine_networks import subnet_of

if TYPE_CHECKING:
    from .bridge import Life
    from .checkers import Checkers


class WallCheckers:
    """What one life of the bridge does with its networks, beside what the others look at."""

    def __init__(self, checkers: Checkers) -> None:
        self._checkers = checkers
        self._world = checkers.world
        self._instance_id = ""
        self._freed: set[Key] = set()

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

    def every_second(self, _now_ms: int) -> None:
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
