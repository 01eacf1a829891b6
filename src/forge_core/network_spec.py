"""The networks of a dispatch: what is asked of the engine, and what it must say it has made.

sandbox.md, *Network*.  An internal network of a plain engine still reaches the host through the
bridge's own address, so ours have a bridge without one.  What this cannot see is
whether the engine acts on what it echoes; the preflight looks from inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any, Final

from forge_core.labels import Owner
from forge_core.subnet_pool import gateway_address

AGENT_NETWORK: Final = "agent-network"
EGRESS_NETWORK: Final = "egress-network"

CONTAINS_EGRESS_FROM: Final = 23
"""Major version of the engine: the internal networks of 20.10 keep a default route, and its
resolver asks outside on their behalf."""

NO_HOST_ADDRESS: Final = "com.docker.network.bridge.inhibit_ipv4"
_TALK_TO_EACH_OTHER: Final = "com.docker.network.bridge.enable_icc"


def contains_egress(engine_version: str) -> bool:
    """Whether what is in an internal network of this engine stays there."""
    major = engine_version.partition(".")[0]
    return not major.isdecimal() or int(major) >= CONTAINS_EGRESS_FROM


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """One network of a dispatch.

    :param is_internal: nothing but what is in it can be reached from it; else it leads out.
    """

    owner: Owner
    role: str
    subnet: IPv4Network
    is_internal: bool

    @property
    def name(self) -> str:
        """Derived from the labels, so that a late create is found by it."""
        return self.owner.name(self.role)


def network_request(spec: NetworkSpec) -> dict[str, Any]:
    """The body of ``POST /networks/create``, without the name (Engine API 1.41 and later)."""
    options = {NO_HOST_ADDRESS: "true"} if spec.is_internal else {_TALK_TO_EACH_OTHER: "false"}
    addresses = {"Subnet": str(spec.subnet), "Gateway": str(gateway_address(spec.subnet))}
    return {
        "Driver": "bridge",
        "Internal": spec.is_internal,
        "EnableIPv6": False,
        "IPAM": {"Driver": "default", "Config": [addresses]},
        "Options": options,
        "Labels": spec.owner.labels(spec.role),
    }


def network_faults(request: Mapping[str, Any], inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """What the engine says it created differs from what was asked: one sentence each."""
    faults = [
        f"{key}: asked for {request[key]!r}, the engine has {inspected.get(key)!r}"
        for key in ("Driver", "Internal", "EnableIPv6")
        if bool(inspected.get(key)) != bool(request[key])
        or (isinstance(request[key], str) and inspected.get(key) != request[key])
    ]
    for key in ("Options", "Labels"):
        has = inspected.get(key) or {}
        if not request[key].items() <= has.items():
            faults.append(f"{key}: asked for {request[key]!r}, the engine has {has!r}")
    wanted = request["IPAM"]["Config"]
    configs = (inspected.get("IPAM") or {}).get("Config") or []
    if [config.get("Subnet") for config in configs] != [config["Subnet"] for config in wanted]:
        faults.append(f"IPAM: asked for {wanted!r}, the engine has {configs!r}")
    return tuple(faults)
