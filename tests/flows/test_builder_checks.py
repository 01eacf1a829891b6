"""What the builder shows of itself decides, and what is only configured does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from forge_bridge.doctor.builder_checks import prove_builder
from forge_bridge.images.doors import NoBuilder
from forge_core.image_ports import BuilderFacts

IDENTITY = "buildkit:sha256:1"


@dataclass
class Looked(NoBuilder):
    """A builder that was looked at."""

    facts_: BuilderFacts

    async def facts(self) -> BuilderFacts:
        return self.facts_


def looked(*shortcomings: str, dedicated: bool = True) -> Looked:
    return Looked(BuilderFacts(IDENTITY, dedicated, not shortcomings, shortcomings))


@pytest.mark.requirement("B-32", "B-33", "B-51")
async def test_a_limited_builder_of_our_own_behind_egress_control_passes() -> None:
    proofs = await prove_builder(looked(), egress_enforced=True)
    assert proofs.shown.keys() == {"builder", "build_egress"}
    assert all(IDENTITY in evidence for evidence in proofs.shown.values())
    assert proofs.failed == {}


@pytest.mark.requirement("B-33", "B-51")
async def test_a_limit_that_was_not_found_blocks_and_is_named() -> None:
    proofs = await prove_builder(looked("no limit on processes"), egress_enforced=True)
    assert proofs.shown.keys() == {"build_egress"}
    assert proofs.failed == {"builder": "no limit on processes"}


@pytest.mark.requirement("B-32", "B-51")
async def test_the_operators_word_is_not_enough_for_the_engines_own_builder() -> None:
    proofs = await prove_builder(looked(dedicated=False), egress_enforced=True)
    assert proofs.shown == {}
    assert proofs.failed.keys() == {"builder", "build_egress"}


@pytest.mark.requirement("B-32", "B-51")
async def test_without_the_operators_word_egress_is_not_vouched_for() -> None:
    proofs = await prove_builder(looked(), egress_enforced=False)
    assert proofs.shown.keys() == {"builder"}
    assert "nobody vouches" in proofs.failed["build_egress"]


@pytest.mark.requirement("B-51")
async def test_a_builder_that_cannot_be_had_says_why() -> None:
    proofs = await prove_builder(NoBuilder("no docker here"), egress_enforced=True)
    assert proofs.shown == {}
    assert set(proofs.failed.values()) == {"no docker here"}
