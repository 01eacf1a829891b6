"""Whether images are built where they should be: read back from the builder that runs (B-51)."""

from __future__ import annotations

from forge_bridge.doctor.policy_checks import BUILD_EGRESS, BUILDER
from forge_bridge.doctor.proofs import Proofs
from forge_core.errors import ForgeError
from forge_core.image_ports import BuilderFacts, ImageBuilder


async def prove_builder(builder: ImageBuilder, *, egress_enforced: bool) -> Proofs:
    """What the builder shows of itself; raises nothing that is expected.

    :param egress_enforced: FORGE_SANDBOX_BUILD_EGRESS_ENFORCED: the operator's word about the
        network around the builder, which nobody can see from within.
    """
    try:
        facts = await builder.facts()
    except ForgeError as error:
        return Proofs.ended_by(error, BUILDER.id, BUILD_EGRESS.id)
    shown: dict[str, str] = {}
    failed: dict[str, str] = {}
    if facts.dedicated and facts.limits_hold:
        shown[BUILDER.id] = f"{facts.identity}: every limit was read back from it"
    else:
        failed[BUILDER.id] = (
            "; ".join(facts.shortcomings) or f"{facts.identity} is the engine's own"
        )
    if why_not := _open_egress(facts, egress_enforced):
        failed[BUILD_EGRESS.id] = why_not
    else:
        shown[BUILD_EGRESS.id] = (
            f"{facts.identity} is a builder of its own, behind what the operator vouches for"
        )
    return Proofs(shown, failed)


def _open_egress(facts: BuilderFacts, enforced: bool) -> str | None:
    if not enforced:
        return "no build has a network, because nobody vouches for one"
    if not facts.dedicated:
        return f"{facts.identity} is the engine's own: its network is that of the engine"
    return None
