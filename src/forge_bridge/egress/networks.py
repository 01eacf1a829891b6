"""Networks, each in a subnet of its own, and what those who are in them have to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from typing import Final, Protocol

from forge_core.errors import EngineRefused, EngineSubnetTaken
from forge_core.labels import Owner
from forge_core.network_spec import NetworkSpec, network_faults, network_request
from forge_core.ports import Engine
from forge_core.sandbox_spec import ContainerSpec
from forge_core.subnet_pool import SubnetPool

NO_NAME_SERVER: Final = IPv4Address("127.0.0.1")
"""The loopback of whoever asks: the engine's resolver asks there, and nobody answers."""

MAX_TRIES: Final = 256
NO_PROXY: Final = ("NO_PROXY", "no_proxy")


@dataclass(frozen=True, slots=True)
class AgentNetwork:
    """What an agent, and whatever runs beside it, has to know of its network.

    :ivar name_servers: of every container in it; none: the engine's own.
    :ivar environment: of the agent.
    """

    name: str
    name_servers: tuple[IPv4Address, ...] = (NO_NAME_SERVER,)
    environment: Mapping[str, str] = field(default_factory=dict)

    def reaching(self, address: str) -> AgentNetwork:
        """The same for an agent that is to reach this address without the proxy, if there is one.

        It is in the subnet, but few programs can read that in ``NO_PROXY``.
        """
        named = {n: v for n, v in self.environment.items() if n in NO_PROXY}
        return replace(
            self,
            environment={**self.environment, **{n: f"{v},{address}" for n, v in named.items()}},
        )


class Maker(Protocol):
    """Makes things of one owner, so that they are found again whatever happens."""

    @property
    def engine(self) -> Engine: ...
    @property
    def owner(self) -> Owner: ...

    async def create_container(self, spec: ContainerSpec) -> str:
        """Create it, and compare what the engine has made with what was asked."""

    async def remove_container(self, container: str) -> None:
        """One that has served its purpose."""

    async def create_network(self, role: str, *, is_internal: bool) -> NetworkSpec:
        """Likewise, in a subnet that nobody else has."""


async def make_network(
    engine: Engine, pool: SubnetPool, owner: Owner, role: str, *, is_internal: bool
) -> tuple[str, NetworkSpec]:
    """Have the engine make a network in the next subnet that no network of others overlaps.

    :param pool: has promised it to this owner.
    :returns: its id, and what it is.
    :raises EngineRefused: there is no such subnet.
    """
    for _ in range(min(pool.size, MAX_TRIES)):
        spec = NetworkSpec(owner, role, pool.take(owner.key), is_internal)
        try:
            return await engine.create_network(spec.name, network_request(spec)), spec
        except EngineSubnetTaken:
            pool.give_back(owner.key, spec.subnet)
    raise EngineRefused(
        f"cannot find a subnet for {role} of attempt {owner.attempt_id}: each one that was tried "
        "overlaps a network of somebody else in this engine; remove those networks, or set "
        "FORGE_SANDBOX_SUBNET_POOL to a network that nobody uses"
    )


async def require_as_asked(engine: Engine, network: str, spec: NetworkSpec) -> None:
    """Read the network back.

    :raises EngineRefused: it is not what was asked for.
    """
    faults = network_faults(network_request(spec), await engine.inspect_network(network))
    if faults:
        raise EngineRefused(
            f"cannot contain attempt {spec.owner.attempt_id}: the engine created {spec.role} "
            f"otherwise than asked: {'; '.join(faults)}"[:2000]
        )
