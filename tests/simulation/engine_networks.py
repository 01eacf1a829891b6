"""The networks of the simulated engine: subnets, addresses, and endpoints that outlive containers.

Fault model (measured on real engines): a subnet that overlaps anybody's is refused; the engine's
own pools run dry; an option that the engine does not know is dropped without a word; the endpoint
of a container that is gone stays, and with it the network, until it is disconnected by force.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any, Final

from forge_core.errors import EngineConflict, EngineNotFound, EngineRefused, EngineSubnetTaken
from forge_core.wire.codes import ResourceKind

if TYPE_CHECKING:
    from .engine import Container, SimulatedEngine, Thing

_FIRST_FREE: Final = 3
"""Below it are the network itself, the bridge, and what chooses its own address."""


class EngineNetworks:
    """What is asked of an engine about its networks; the engine itself holds them."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def create(self, name: str, request: Mapping[str, Any]) -> str:
        """See :meth:`forge_core.ports.Engine.create_network`."""
        engine = self._engine
        if any(n.resource.name == name for n in engine.networks.values()):
            raise EngineConflict(f"cannot create network {name}: the name is taken")
        wanted = subnet_of(request)
        if wanted is not None and self.has_part_of(wanted):
            raise EngineSubnetTaken(f"cannot create network {name}: {wanted} is taken")
        if engine.rng.random() < engine.faults.pools_empty:
            raise EngineRefused(f"cannot create network {name}: the address pools are used up")
        identity = engine.new_id()
        network = engine.new_thing(ResourceKind.NETWORK, identity, name, request.get("Labels", {}))
        network.request = request
        if engine.rng.random() < engine.faults.network_lies:
            network.request = {**request, "Options": {}}
        engine.networks[identity] = network
        engine.watch.created(network.resource)
        return identity

    def add_foreign(self, name: str, subnet: IPv4Network) -> str:
        """A network of somebody else, in a subnet that is free; its id."""
        identity = self._engine.new_id()
        network = self._engine.new_thing(ResourceKind.NETWORK, identity, name, {})
        network.request = {"IPAM": {"Config": [{"Subnet": str(subnet)}]}}
        self._engine.networks[identity] = network
        return identity

    def inspect(self, reference: str) -> Mapping[str, Any]:
        """What it is, as far as the engine has understood."""
        network = self.find(reference)
        named = {name: {"Name": name} for name in self.endpoints(reference)}
        own = {"Id": network.resource.id, "Name": network.resource.name, "Containers": named}
        return {**network.request, **own}

    def connect(self, reference: str, container: str, address: str) -> None:
        """One more network for a container, running or not."""
        identity = self.find(reference).resource.id
        endpoint = {"IPAMConfig": {"IPv4Address": address}}
        found = self._engine.container(container, "connect")
        found.networks[identity] = endpoint
        if found.status == "running":
            found.addresses[identity] = self._address(self._engine.networks[identity], endpoint)

    def endpoints(self, reference: str) -> Sequence[str]:
        """Who is in it, gone or not."""
        network = self.find(reference)
        inside = (c.name for c in self._engine.containers.values() if self._is_in(c, network))
        return sorted({*inside, *network.stale_endpoints})

    def remove(self, reference: str) -> None:
        """Unless somebody is in it."""
        network = self.find(reference)
        if self.endpoints(reference):
            raise EngineConflict(f"cannot remove network {reference}: it has endpoints")
        self._engine.resist(network, f"network {reference}")
        del self._engine.networks[network.resource.id]
        self._engine.tell(f"removes network {network.resource.name}")
        self._engine.watch.removed(network.resource)

    def disconnect(self, reference: str, container: str) -> None:
        """By force: a stale endpoint goes too."""
        network = self.find(reference)
        if container in network.stale_endpoints:
            network.stale_endpoints.remove(container)
            self._engine.tell(f"drops the stale endpoint of {container}")
            return
        found = self._engine.container(container, "disconnect")
        if found.networks.pop(network.resource.id, None) is None:
            raise EngineNotFound(f"cannot disconnect {container}: it is not in {reference}")
        found.addresses.pop(network.resource.id, None)

    def join(self, container: Container) -> None:
        """It is about to start: its networks must be there, and give it addresses."""
        for identity, endpoint in container.networks.items():
            network = self._engine.networks.get(identity)
            if network is None:
                raise EngineNotFound(f"cannot start {container.name}: network {identity} is gone")
            container.addresses[identity] = self._address(network, endpoint)

    def leave(self, container: Container) -> None:
        """It has ended; now and then an endpoint of it does not."""
        for identity in container.addresses:
            network = self._engine.networks.get(identity)
            stays = self._engine.rng.random() < self._engine.faults.endpoint_stuck
            if network is not None and stays:
                network.stale_endpoints.add(container.name)
                self._engine.tell(f"forgets to take {container.name} off {network.resource.name}")
        container.addresses.clear()

    def find(self, reference: str) -> Thing:
        """By id or name."""
        for identity, network in self._engine.networks.items():
            if reference in (identity, network.resource.name):
                return network
        raise EngineNotFound(f"cannot find network {reference}: there is none")

    def has_part_of(self, wanted: IPv4Network) -> bool:
        """Whether anybody's network overlaps it."""
        subnets = (subnet_of(network.request) for network in self._engine.networks.values())
        return any(subnet is not None and subnet.overlaps(wanted) for subnet in subnets)

    def _is_in(self, container: Container, network: Thing) -> bool:
        return container.status == "running" and network.resource.id in container.networks

    def _address(self, network: Thing, endpoint: Mapping[str, Any]) -> str:
        chosen = endpoint.get("IPAMConfig", {}).get("IPv4Address")
        subnet = subnet_of(network.request)
        if chosen is not None or subnet is None:
            return chosen or "192.0.2.1"
        given = {c.addresses.get(network.resource.id) for c in self._engine.containers.values()}
        free = (str(one) for one in itertools.islice(subnet, _FIRST_FREE, None))
        return next(one for one in free if one not in given)


def subnet_of(request: Mapping[str, Any]) -> IPv4Network | None:
    """What a request for a network asks for; None: whatever there is."""
    configs: list[dict[str, str]] = request.get("IPAM", {}).get("Config") or [{}]
    subnet = configs[0].get("Subnet")
    return None if subnet is None else IPv4Network(subnet)
