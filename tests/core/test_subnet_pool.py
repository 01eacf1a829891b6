"""Subnets are promised by number, handed out in turn, and come back as a whole."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.subnet_pool import (
    SPARE_SUBNETS,
    SubnetPool,
    gateway_address,
    networks_needed,
    proxy_address,
)
from forge_core.wire.codes import NetworkPolicy
from forge_core.wire.shapes import Service

pytestmark = pytest.mark.requirement("B-19")

POOL = IPv4Network("10.213.0.0/25")
KEYS = [(name, fence) for name in "abcd" for fence in (1, 2)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("hold", "take", "give_back", "release")),
            st.sampled_from(KEYS),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_a_subnet_is_never_held_twice_and_none_is_lost(
    steps: list[tuple[str, tuple[str, int], int]],
) -> None:
    pool = SubnetPool(POOL)
    promised: dict[tuple[str, int], int] = {}
    has: dict[tuple[str, int], set[IPv4Network]] = {}
    for action, key, count in steps:
        match action:
            case "hold" if key not in promised and count <= pool.free:
                pool.hold(key, count)
                promised[key], has[key] = count, set()
            case "take" if key in promised and len(has[key]) < promised[key]:
                subnet = pool.take(key)
                assert subnet.subnet_of(POOL)
                assert not any(subnet in others for others in has.values())
                has[key].add(subnet)
            case "take":
                with pytest.raises(RefusedError, match="cannot find a subnet"):
                    pool.take(key)
            case "give_back" if has.get(key):
                pool.give_back(key, has[key].pop())
            case "release":
                pool.release(key)
                promised.pop(key, None)
                has.pop(key, None)
        assert pool.free == pool.size - SPARE_SUBNETS - sum(promised.values())


def test_what_somebody_else_occupies_is_passed_over() -> None:
    pool = SubnetPool(POOL)
    pool.hold(KEYS[0], 1)
    tried = set()
    for _ in range(pool.size):
        subnet = pool.take(KEYS[0])
        tried.add(subnet)
        pool.give_back(KEYS[0], subnet)
    assert tried == set(POOL.subnets(new_prefix=28))


def test_a_large_pool_costs_no_more_than_a_small_one() -> None:
    pool = SubnetPool(IPv4Network("10.0.0.0/8"))
    assert pool.size == 1 << 20
    pool.hold(KEYS[0], 1)
    assert pool.take(KEYS[0]) == IPv4Network("10.0.0.0/28")


def test_without_a_pool_there_is_nothing() -> None:
    pool = SubnetPool()
    assert (pool.size, pool.free) == (0, 0)
    pool.hold(KEYS[0], 0)
    with pytest.raises(RefusedError) as refusal:
        pool.take(KEYS[0])
    assert refusal.value.code == "capacity_networks"


def test_addresses_are_fixed() -> None:
    subnet = IPv4Network("10.213.0.16/28")
    assert str(gateway_address(subnet)) == "10.213.0.17"
    assert str(proxy_address(subnet)) == "10.213.0.18"


@pytest.mark.parametrize(
    ("policy", "services", "count"),
    [
        (NetworkPolicy.NONE, (), 0),
        (NetworkPolicy.NONE, (Service(name="redis"),), 1),
        (NetworkPolicy.OPEN_PUBLIC, (), 1),
        (NetworkPolicy.PUBLIC_ALLOWLIST, (), 2),
        (NetworkPolicy.PUBLIC_ALLOWLIST, (Service(name="redis"),), 2),
    ],
)
def test_what_a_dispatch_needs(
    policy: NetworkPolicy, services: tuple[Service, ...], count: int
) -> None:
    assert networks_needed(policy, services) == count
