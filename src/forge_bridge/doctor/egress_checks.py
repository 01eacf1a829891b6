"""Whether attempts get out by the proxy alone, and which networks may be offered (B-39, B-54)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.doctor.results import Check, CheckResult, Gate
from forge_bridge.egress.trial import EgressTrial
from forge_bridge.services.images import Trial
from forge_core.blockers import Blocker
from forge_core.errors import ForgeError
from forge_core.network_spec import contains_egress
from forge_core.ports import Engine
from forge_core.wire.codes import NetworkPolicy
from forge_core.wire.shapes import EngineFacts

EGRESS: Final = Gate(
    Blocker.EGRESS,
    "public_allowlist lets out by its proxy alone",
    "the proxy, a container behind it",
)
OPEN: Final = Check(
    "open_public", "No attempt has an open network", "FORGE_ALLOW_OPEN_PUBLIC_SANDBOX"
)


async def prove_egress(egress: EgressTrial, engine: Engine, settings: PreflightSettings) -> Proofs:
    """What the way out shows of itself; raises nothing that is expected."""
    if settings.tooling_image is None:
        return Proofs(failed={EGRESS.id: "there is no tooling image to look from"})
    trial = Trial(engine, settings.owner, settings.tooling_image, settings.hardening)
    try:
        return Proofs(shown={EGRESS.id: await egress.prove(trial)})
    except ForgeError as error:
        return Proofs.ended_by(error, EGRESS.id)


def egress_checks(settings: PreflightSettings) -> Iterator[CheckResult]:
    """What is enforced must hold; what is not is not offered."""
    if evidence := settings.proofs.get(EGRESS.id):
        yield EGRESS.passed(evidence)
    elif settings.egress_enforced:
        yield EGRESS.blocks_required(
            settings.failures.get(EGRESS.id, "nothing has shown it"),
            "mend it, or unset FORGE_SANDBOX_EGRESS_ENFORCED; until then it is not offered",
        )
    else:
        yield EGRESS.warns(
            "there is none, so that public_allowlist is not offered",
            "set FORGE_SANDBOX_EGRESS_PROXY_IMAGE and FORGE_SANDBOX_EGRESS_ENFORCED=true",
        )
    if settings.open_public_allowed:
        yield OPEN.warns(
            "open_public is offered: its attempts reach everything, this host included",
            "unset FORGE_ALLOW_OPEN_PUBLIC_SANDBOX where others may run attempts",
        )


def network_policies(
    settings: PreflightSettings, engine: EngineFacts | None
) -> tuple[NetworkPolicy, ...]:
    """What may be offered on the strength of this, as long as containers run at all."""
    offered = [NetworkPolicy.NONE]
    if EGRESS.id in settings.proofs:
        offered.append(NetworkPolicy.PUBLIC_ALLOWLIST)
    if settings.open_public_allowed and engine is not None and contains_egress(engine.version):
        offered.append(NetworkPolicy.OPEN_PUBLIC)
    return tuple(offered)
