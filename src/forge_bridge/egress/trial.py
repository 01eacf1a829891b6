"""Whether the way out holds: the real proxy in real networks, looked at from inside (B-39, B-54).

Repeated with every preflight, since it is as much the engine and its host that are tried as the
image.  Only the signature is checked once: a digest stands for the same bytes for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from typing import Any, Final

import anyio

from forge_bridge.containers import create_as_asked
from forge_bridge.egress.look import Address, look_around
from forge_bridge.egress.networks import AgentNetwork, make_network, require_as_asked
from forge_bridge.egress.way_out import READY_MS, Egress, open_egress
from forge_bridge.flows.teardown import remove_all
from forge_bridge.groups import first_error
from forge_bridge.services.container import ServiceImage
from forge_bridge.services.images import SignatureCheck, Trial, fit_image
from forge_core.errors import EngineNotFound, EngineRefused, EngineTimedOut, RefusedError
from forge_core.labels import Owner
from forge_core.network_spec import AGENT_NETWORK, NetworkSpec, contains_egress
from forge_core.ports import Engine
from forge_core.sandbox_spec import ContainerSpec, container_request
from forge_core.squid_conf import UpstreamProxy
from forge_core.subnet_pool import SPARE_SUBNETS, SubnetPool, gateway_address

TRIAL_S: Final = 90.0
CLEAN_UP_S: Final = 60.0
LISTED: Final = (".egress-trial.example.net",)
PORTS: Final = (22, 80, 2375)
"""What a host is most likely to listen on; one that refuses is there as well."""

_DEFAULT_BRIDGE: Final = "bridge"


@dataclass(slots=True)
class EgressTrial:
    """The proxy that the settings name.

    :param pool: where its subnets come from.
    :param check_signature: raises RefusedError ``signature_invalid``.
    :ivar image: what can be used as things are; changes with every :meth:`prove` that comes to a
        verdict.
    """

    reference: str
    pool: IPv4Network
    check_signature: SignatureCheck
    upstream: UpstreamProxy | None = None
    image: ServiceImage | None = None
    _signed: bool = False

    async def prove(self, trial: Trial) -> str:
        """Try it; what was seen, in one sentence.

        :raises ForgeError: it does not hold, or it could not be tried.
        """
        try:
            image, evidence = await self._try(trial)
        except RefusedError:
            # Until then, what was admitted on the strength of the last trial may still start.
            self.image = None
            raise
        self.image = image
        return evidence

    async def _try(self, trial: Trial) -> tuple[ServiceImage, str]:
        await _require_containment(trial.engine)
        image = await fit_image(trial.engine, self.reference)
        if not self._signed:
            await self.check_signature((self.reference,))
            self._signed = True
        maker = _TrialMaker(trial, SubnetPool(self.pool))
        try:
            with first_error(), anyio.move_on_after(TRIAL_S):
                return image, await self._look(maker, image)
            raise EngineTimedOut(f"cannot try the egress proxy in {TRIAL_S:.0f} s")
        finally:
            with anyio.move_on_after(CLEAN_UP_S, shield=True):
                await remove_all(trial.engine, trial.owner)

    async def _look(self, maker: _TrialMaker, image: ServiceImage) -> str:
        egress = Egress(image, maker.trial.tooling_image, LISTED, self.upstream)
        async with open_egress(maker, egress) as network:
            addresses = await maker.host_addresses()
            seen = await look_around(
                maker,
                network,
                image=egress.probe_image,
                wait_ms=READY_MS,
                addresses=addresses,
            )
            if faults := seen.faults():
                raise EngineRefused(f"cannot contain egress: {'; '.join(faults)}")
        return (
            f"{self.reference} refuses a site, a tunnel and its own manager; from the agent's "
            f"network there is no route, no answer about other names, and nobody at "
            f"{', '.join(sorted({host for host, _ in addresses}))}"
        )


async def prove_closed_network(trial: Trial, pool: IPv4Network) -> None:
    """Look from a network without a proxy, in which agents with services are: it leads nowhere.

    :param pool: where its subnet comes from.
    :raises ForgeError: it does, or it could not be looked at.
    """
    await _require_containment(trial.engine)
    maker = _TrialMaker(trial, SubnetPool(pool))
    try:
        with anyio.move_on_after(TRIAL_S):
            spec = await maker.create_network(AGENT_NETWORK, is_internal=True)
            seen = await look_around(
                maker,
                AgentNetwork(spec.name),
                image=trial.tooling_image,
                wait_ms=None,
                addresses=await maker.host_addresses(),
            )
            if faults := seen.faults():
                raise EngineRefused(f"cannot contain agents with services: {'; '.join(faults)}")
            return
        raise EngineTimedOut(f"cannot try the network of services in {TRIAL_S:.0f} s")
    finally:
        with anyio.move_on_after(CLEAN_UP_S, shield=True):
            await remove_all(trial.engine, trial.owner)


async def _require_containment(engine: Engine) -> None:
    version = (await engine.facts()).version
    if not contains_egress(version):
        raise EngineRefused(
            f"cannot contain egress on Engine {version}: its internal networks keep a default "
            "route; upgrade to 26.1 or later"
        )


@dataclass(slots=True)
class _TrialMaker:
    """Keeps :class:`forge_bridge.egress.networks.Maker` for a runner itself, without a ledger."""

    trial: Trial
    pool: SubnetPool
    made: list[NetworkSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool.hold(self.owner.key, SPARE_SUBNETS)

    @property
    def engine(self) -> Engine:
        return self.trial.engine

    @property
    def owner(self) -> Owner:
        return self.trial.owner

    async def create_container(self, spec: ContainerSpec) -> str:
        request = container_request(spec, self.trial.hardening)
        return await create_as_asked(self.engine, spec.name, request)

    async def remove_container(self, container: str) -> None:
        await self.engine.remove_container(container)

    async def create_network(self, role: str, *, is_internal: bool) -> NetworkSpec:
        network, spec = await make_network(
            self.engine, self.pool, self.owner, role, is_internal=is_internal
        )
        self.made.append(spec)
        await require_as_asked(self.engine, network, spec)
        return spec

    async def host_addresses(self) -> Sequence[Address]:
        """Where the host would be, on the bridges of this trial and on the engine's own."""
        hosts = [str(gateway_address(spec.subnet)) for spec in self.made]
        with suppress(EngineNotFound):
            bridge: Any = await self.engine.inspect_network(_DEFAULT_BRIDGE)
            configs = (bridge.get("IPAM") or {}).get("Config") or ()
            hosts += [str(config["Gateway"]) for config in configs if config.get("Gateway")]
        return [(host, port) for host in hosts for port in PORTS]
