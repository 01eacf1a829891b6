"""What a contract asks for against what the hub grants (B-41, B-54, B-60; sandbox.md).

A contract is a wish: it never widens what its attempt may do.  What it expects and would not get
is an error before anything is built, because the agent would fail over it later and say less.
"""

from __future__ import annotations

from collections.abc import Collection

from forge_core.contract import CONTRACT_PATH, Contract
from forge_core.egress_domains import covers
from forge_core.errors import RefusedError
from forge_core.wire.codes import NetworkPolicy
from forge_core.wire.from_hub import Network
from forge_core.wire.shapes import Service


def require_granted(
    contract: Contract,
    *,
    network: Network,
    services: Collection[Service],
    secrets: Collection[str],
) -> None:
    """Everything that the contract asks for must be there.

    :param network: as the start says; likewise ``services``.
    :param secrets: the names of those that the hub has handed over.
    :raises RefusedError: code ``contract_invalid``; names all that is missing.
    """
    missing = [
        *_network(contract, network),
        *_services(contract, services),
        # No message of the hub grants a port, so no runner publishes one.
        *(f"port {port.name} ({port.container})" for port in contract.ports),
        *(f"secret {name}" for name in contract.secrets if name not in secrets),
    ]
    if missing:
        raise RefusedError(
            f"cannot use {CONTRACT_PATH}: it asks for what the attempt was not granted: "
            f"{', '.join(missing)}",
            code="contract_invalid",
            field=missing[0].partition(" ")[0],
        )


def _network(contract: Contract, granted: Network) -> list[str]:
    asked = contract.network
    if asked.policy is NetworkPolicy.NONE or granted.policy is NetworkPolicy.OPEN_PUBLIC:
        return []
    if asked.policy is not granted.policy:
        return [f"network policy {asked.policy}"]
    return [f"domain {name}" for name in asked.domains if not covers(granted.domains, name)]


def _services(contract: Contract, services: Collection[Service]) -> list[str]:
    granted = {service.name: service.version for service in services}
    missing = []
    for service in contract.services:
        version = granted.get(service.name)
        differs = None not in (service.version, version) and service.version != version
        if service.name not in granted or differs:
            missing.append(f"service {service.name}" + (f" {service.version}" if differs else ""))
    return missing
