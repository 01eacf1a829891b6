"""What an agent is told of its network: what is beside it needs no proxy."""

from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from forge_bridge.egress.networks import AgentNetwork
from forge_bridge.egress.way_out import proxy_environment

SUBNET = IPv4Network("10.231.0.16/28")


@pytest.mark.requirement("B-54", "B-55")
def test_whatever_is_beside_an_agent_is_reached_without_the_proxy() -> None:
    network = AgentNetwork("network", environment=proxy_environment(SUBNET))
    told = network.reaching("10.231.0.19").environment
    for name in ("NO_PROXY", "no_proxy"):
        direct = set(told[name].split(","))
        assert direct >= {"localhost", "agent", "postgres", "redis", "browser", "10.231.0.19"}
    assert told["HTTP_PROXY"] == told["http_proxy"] == network.environment["HTTP_PROXY"]


def test_an_agent_without_a_proxy_is_told_of_none() -> None:
    network = AgentNetwork("network")
    assert network.reaching("10.231.0.19") == network
