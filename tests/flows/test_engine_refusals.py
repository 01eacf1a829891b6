"""What an attempt says when the engine would not do what it needs: that it was the engine."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any, cast

import pytest

from forge_bridge.egress.networks import make_network
from forge_bridge.sandbox.stage import failure_of
from forge_core.errors import (
    EngineConflict,
    EngineNotFound,
    EngineRefused,
    EngineSubnetTaken,
    ForgeError,
)
from forge_core.labels import Owner
from forge_core.ports import Engine
from forge_core.subnet_pool import SubnetPool

OWNER = Owner("runner", "instance", "attempt", 1, "project", "domain")


class CrowdedEngine:
    """Strangers have networks wherever one looks."""

    async def create_network(self, name: str, _request: Any) -> str:
        raise EngineSubnetTaken(f"cannot create network {name}: its subnet is taken")


@pytest.mark.requirement("B-04", "B-19")
@pytest.mark.parametrize("error", [EngineConflict, EngineNotFound, EngineRefused])
def test_a_refusal_of_the_engine_is_no_failure_of_the_bridge(error: type[ForgeError]) -> None:
    code, detail = failure_of(error("cannot create network n: the address pools are used up"))
    assert code == "engine_lost"
    assert "address pools" in detail


@pytest.mark.requirement("B-19")
async def test_a_pool_that_strangers_have_taken_is_named_and_stays_whole() -> None:
    pool = SubnetPool(IPv4Network("10.9.0.0/26"))
    pool.hold(OWNER.key, 1)
    engine = cast("Engine", CrowdedEngine())
    with pytest.raises(EngineRefused, match="FORGE_SANDBOX_SUBNET_POOL") as refusal:
        await make_network(engine, pool, OWNER, "agent-network", is_internal=True)
    assert failure_of(refusal.value)[0] == "engine_lost"
    pool.take(OWNER.key)
