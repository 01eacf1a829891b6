"""Whether the configured services can run beside an agent: each was tried (B-38, B-51)."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network

from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.doctor.results import Check, CheckResult
from forge_bridge.egress.trial import prove_closed_network
from forge_bridge.services.images import ServiceImages, Trial
from forge_core.errors import ForgeError, RetryableError
from forge_core.ports import Engine
from forge_core.services import CATALOGUE
from forge_core.wire.codes import ServiceName


async def prove_services(
    services: ServiceImages, engine: Engine, settings: PreflightSettings, pool: IPv4Network
) -> Proofs:
    """What images and network show of themselves; raises nothing that is expected.

    :param pool: the subnets of the networks of attempts.
    """
    if settings.tooling_image is None or not services.references:
        return Proofs()
    trial = Trial(engine, settings.owner, settings.tooling_image, settings.hardening)
    try:
        await prove_closed_network(trial, pool)
    except ForgeError as error:
        if not isinstance(error, RetryableError):
            services.usable.clear()
        return Proofs.ended_by(error, *(CATALOGUE[n].check_id for n in services.references))
    return Proofs(*await services.prove(trial))


def service_checks(settings: PreflightSettings) -> Iterator[CheckResult]:
    """A service that cannot be used is not offered; nothing else depends on it."""
    for name in settings.services:
        kind, variable = CATALOGUE[name], f"FORGE_SERVICE_{name.upper()}_IMAGE"
        check = Check(kind.check_id, f"{name.value} can run beside an agent", variable)
        if evidence := settings.proofs.get(check.id):
            yield check.passed(evidence)
        else:
            why = settings.failures.get(check.id, "nothing has shown it")
            yield check.warns(why, f"mend or unset {variable}; until then it is not offered")


def usable_services(settings: PreflightSettings) -> tuple[ServiceName, ...]:
    """Those of which an image has shown that it works."""
    return tuple(n for n in settings.services if CATALOGUE[n].check_id in settings.proofs)
