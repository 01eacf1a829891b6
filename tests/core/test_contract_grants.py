"""A contract that asks for more than the hub grants is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.contract import Contract
from forge_core.contract_grants import require_granted
from forge_core.errors import RefusedError
from forge_core.wire.from_hub import Network
from forge_core.wire.shapes import Service

NONE = Network()
LISTED = Network(policy="public_allowlist", domains=("a.example", "b.example"))
OPEN = Network(policy="open_public")


def asks(**wishes: Any) -> Contract:
    return Contract.model_validate({"version": 1, **wishes}, strict=False)


def missing(
    contract: Contract,
    *secrets: str,
    network: Network = NONE,
    services: tuple[Service, ...] = (),
) -> str:
    """What the refusal names; nothing: it was granted."""
    try:
        require_granted(contract, network=network, services=services, secrets=secrets)
    except RefusedError as error:
        return str(error).partition("not granted: ")[2]
    return ""


@pytest.mark.requirement("B-41")
def test_a_contract_that_asks_for_nothing_is_granted() -> None:
    assert missing(asks(tmp={"executable": True}, environment={"A": "1"})) == ""


@pytest.mark.requirement("B-54")
@pytest.mark.parametrize(
    ("wish", "network", "text"),
    [
        ({"policy": "open_public"}, NONE, "network policy open_public"),
        ({"policy": "open_public"}, LISTED, "network policy open_public"),
        ({"policy": "open_public"}, OPEN, ""),
        (
            {"policy": "public_allowlist", "domains": ["a.example"]},
            NONE,
            "network policy public_allowlist",
        ),
        ({"policy": "public_allowlist", "domains": ["a.example"]}, LISTED, ""),
        (
            {"policy": "public_allowlist", "domains": ["a.example", "c.example"]},
            LISTED,
            "domain c.example",
        ),
        ({"policy": "public_allowlist", "domains": ["c.example"]}, OPEN, ""),
        ({"policy": "none"}, LISTED, ""),
    ],
)
def test_the_network_is_what_the_hub_says(
    wish: dict[str, Any], network: Network, text: str
) -> None:
    assert missing(asks(network=wish), network=network) == text


@pytest.mark.parametrize(
    ("wish", "granted", "text"),
    [
        ({"name": "redis"}, None, "service redis"),
        ({"name": "redis"}, Service(name="postgres"), "service redis"),
        ({"name": "redis"}, Service(name="redis", version="7"), ""),
        ({"name": "redis", "version": "7"}, Service(name="redis"), ""),
        ({"name": "redis", "version": "7"}, Service(name="redis", version="6"), "service redis 7"),
    ],
)
def test_services_are_those_of_the_hub(
    wish: dict[str, Any], granted: Service | None, text: str
) -> None:
    services = () if granted is None else (granted,)
    assert missing(asks(services=[wish]), services=services) == text


@pytest.mark.requirement("B-60")
def test_everything_that_is_missing_is_named_at_once() -> None:
    contract = asks(secrets=["TOKEN", "OTHER"], ports=[{"name": "web", "container": 80}])
    assert missing(contract, "OTHER") == "port web (80), secret TOKEN"
    with pytest.raises(RefusedError) as error:
        require_granted(contract, network=NONE, services=(), secrets=())
    assert (error.value.code, error.value.field) == ("contract_invalid", "port")
