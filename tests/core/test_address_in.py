"""Where a container is, by what the engine says of it, which may be nothing."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import pytest

from forge_core.read_back import address_in


def inspected(**networks: Any) -> dict[str, Any]:
    return {"NetworkSettings": {"Networks": networks}}


@pytest.mark.requirement("B-55")
def test_a_running_container_has_its_address_in_each_network() -> None:
    seen = inspected(agent={"IPAddress": "10.9.0.3"}, egress={"IPAddress": "10.9.0.19"})
    assert address_in(seen, "agent") == IPv4Address("10.9.0.3")


@pytest.mark.requirement("B-55")
@pytest.mark.parametrize(
    "seen",
    [
        inspected(agent={"IPAddress": ""}),
        inspected(agent=None),
        inspected(egress={"IPAddress": "10.9.0.19"}),
        {"NetworkSettings": {"Networks": None}},
        {},
    ],
    ids=["ended", "no-endpoint", "taken-off", "no-networks", "nothing"],
)
def test_one_that_has_ended_or_was_taken_off_has_none(seen: dict[str, Any]) -> None:
    assert address_in(seen, "agent") is None
