"""Small subnets for the networks of dispatches (B-19; sandbox.md, Network).

An engine's own pools end at about thirty networks, which it reports as "not found",
so every network of ours has a subnet of ours.  Admission promises a number of them; which ones
they are is found out when the networks are created, since only the engine knows what the networks
of others occupy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from forge_core.errors import RefusedError
from forge_core.labels import Key
from forge_core.wire.codes import NetworkPolicy
from forge_core.wire.shapes import Service

SUBNET_PREFIX: Final = 28
"""Sixteen addresses: for the bridge, an agent, its proxy, every service and a probe."""

MOST_NETWORKS: Final = 2
"""What a dispatch can have; held for one of which nobody knows."""

SPARE_SUBNETS: Final = MOST_NETWORKS
"""What the preflight needs while it looks; no dispatch is promised these."""

_GATEWAY: Final = 1
_PROXY: Final = 2


def networks_needed(policy: NetworkPolicy, services: Sequence[Service]) -> int:
    """How many networks a dispatch has."""
    match policy:
        case NetworkPolicy.PUBLIC_ALLOWLIST:
            return 2
        case NetworkPolicy.OPEN_PUBLIC:
            return 1
        case NetworkPolicy.NONE:
            return 1 if services else 0


def gateway_address(subnet: IPv4Network) -> IPv4Address:
    """Where the engine's bridge is, or would be."""
    return subnet[_GATEWAY]


def proxy_address(subnet: IPv4Network) -> IPv4Address:
    """Where the proxy is, in either of its networks."""
    return subnet[_PROXY]


@dataclass(slots=True)
class _Held:
    count: int
    subnets: set[IPv4Network] = field(default_factory=set)


class SubnetPool:
    """Who holds how many subnets, and which of them; no clock, no I/O, one owner.

    :param network: what they are taken from; None: there are none.
    """

    __slots__ = ("_held", "_network", "_next", "_taken", "_used")

    def __init__(self, network: IPv4Network | None = None) -> None:
        self._network = network
        self._held: dict[Key, _Held] = {}
        self._taken: set[IPv4Network] = set()
        self._used = 0
        self._next = 0

    @property
    def size(self) -> int:
        """How many subnets there are."""
        if self._network is None or self._network.prefixlen > SUBNET_PREFIX:
            return 0
        return 1 << (SUBNET_PREFIX - self._network.prefixlen)

    @property
    def free(self) -> int:
        """How many can still be promised."""
        return max(0, self.size - SPARE_SUBNETS - self._used)

    def hold(self, key: Key, count: int) -> None:
        """Promise ``count`` subnets; the caller has looked at :attr:`free`."""
        assert key not in self._held, key
        if count:
            self._held[key] = _Held(count)
            self._used += count

    def take(self, key: Key) -> IPv4Network:
        """One that nobody of ours has; each call gives the next, so that all are tried in turn.

        :raises RefusedError: code ``capacity_networks``: as many as were promised are taken, or
            there is none.
        """
        held = self._held.get(key, _Held(0))
        if len(held.subnets) >= held.count:
            raise _none_left(f"{key[0]} may have {held.count} networks, and has them")
        for _ in range(self.size):
            subnet = self._nth(self._next)
            self._next = (self._next + 1) % self.size
            if subnet not in self._taken:
                held.subnets.add(subnet)
                self._taken.add(subnet)
                return subnet
        raise _none_left(f"{len(self._taken)} of {self.size} are taken")

    def give_back(self, key: Key, subnet: IPv4Network) -> None:
        """There is no network of ours in it: somebody else's is there."""
        self._held[key].subnets.remove(subnet)
        self._taken.remove(subnet)

    def release(self, key: Key) -> None:
        """Every network of the dispatch was observed gone.  Idempotent."""
        held = self._held.pop(key, None)
        if held is not None:
            self._used -= held.count
            self._taken -= held.subnets

    def _nth(self, number: int) -> IPv4Network:
        assert self._network is not None
        first = int(self._network.network_address)
        return IPv4Network((first + (number << (32 - SUBNET_PREFIX)), SUBNET_PREFIX))


def _none_left(why: str) -> RefusedError:
    return RefusedError(
        f"cannot find a subnet: {why}; set FORGE_SANDBOX_SUBNET_POOL to a larger network",
        code="capacity_networks",
    )
