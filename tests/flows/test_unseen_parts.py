"""A part that could not be tried this time is no worse for it: unseen, not failed (B-05, B-51)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from ipaddress import IPv4Network
from typing import Any

import pytest
from memory_engine import MemoryEngine
from test_preflight_checks import SETTINGS

from forge_bridge.doctor.builder_checks import prove_builder
from forge_bridge.doctor.checks import run_checks
from forge_bridge.doctor.egress_checks import prove_egress
from forge_bridge.doctor.image_checks import ImageProver
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.doctor.results import EXIT_COULD_NOT_LOOK
from forge_bridge.doctor.service_checks import prove_services
from forge_bridge.egress.trial import EgressTrial
from forge_bridge.images.gates import GateTools
from forge_bridge.services.container import ServiceImage
from forge_bridge.services.images import ServiceImages
from forge_core.errors import EngineRefused, EngineTimedOut, ForgeError
from forge_core.wire.codes import ServiceName

pytestmark = pytest.mark.requirement("B-05", "B-51")

POOL = IPv4Network("10.231.0.0/24")
REFERENCE = "image@sha256:" + "1" * 64
USABLE = ServiceImage.from_inspect(REFERENCE, {"Id": "sha256:" + "1" * 64})
SLOW = EngineTimedOut("cannot inspect it: no answer in 30 s")
REFUSED = EngineRefused("cannot inspect it: no")


class Failing(MemoryEngine):
    """Fails when it is asked who it is or what an image is."""

    def __init__(self, error: ForgeError) -> None:
        super().__init__()
        self.error = error

    async def facts(self) -> Any:
        raise self.error

    async def inspect_image(self, image: str) -> Mapping[str, Any]:
        raise self.error


class FailingTool:
    """A builder, or a signature verifier, that fails."""

    def __init__(self, error: ForgeError) -> None:
        self._error = error

    async def facts(self) -> Any:
        raise self._error

    async def prove(self, image: str) -> str:
        raise self._error


async def signatures_are_good(references: tuple[str, ...], /) -> None:
    """Nothing is signed here."""


async def egress(error: ForgeError) -> Proofs:
    trial = EgressTrial(REFERENCE, POOL, signatures_are_good, image=USABLE)
    proofs = await prove_egress(trial, Failing(error), SETTINGS)
    assert (trial.image is USABLE) is (error is SLOW)
    return proofs


async def services(error: ForgeError) -> Proofs:
    images = ServiceImages({ServiceName.REDIS: REFERENCE}, signatures_are_good)
    images.usable[ServiceName.REDIS] = USABLE
    proofs = await prove_services(images, Failing(error), SETTINGS, POOL)
    assert (ServiceName.REDIS in images.usable) is (error is SLOW)
    return proofs


async def signatures(error: ForgeError) -> Proofs:
    tools = GateTools(signatures=FailingTool(error))  # type: ignore[arg-type]
    prover = ImageProver(tools, enforced=False, utc=lambda: "2026-11-29T14:00:00.000Z")
    return await prover.prove(MemoryEngine(), REFERENCE)


async def builder(error: ForgeError) -> Proofs:
    return await prove_builder(FailingTool(error), egress_enforced=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [egress, services, signatures, builder])
async def test_only_what_was_seen_is_a_verdict(
    part: Callable[[ForgeError], Awaitable[Proofs]],
) -> None:
    unseen, failed = await part(SLOW), await part(REFUSED)
    assert set(unseen.unseen.values()) == {str(SLOW)}
    assert not unseen.failed
    assert failed.failed.keys() == unseen.unseen.keys()
    assert not failed.unseen


async def test_an_unseen_part_is_told_apart_and_containers_stay() -> None:
    settings = replace(SETTINGS, egress_enforced=True)
    unseen = Proofs(unseen={"egress": "the proxy did not answer in 90 s"})
    found = await checked(settings.with_proofs(unseen))
    assert found.parts_unseen == {"egress": "the proxy did not answer in 90 s"}
    assert found.exit_code == EXIT_COULD_NOT_LOOK
    (egress,) = (result for result in found.results if result.id == "egress")
    assert not egress.blocks_all
    assert "again" in str(egress.remedy)
    verdict = await checked(settings.with_proofs(Proofs(failed={"egress": "it leaks"})))
    assert verdict.parts_unseen == {}


async def checked(settings: PreflightSettings) -> Any:
    """Without an image nothing is run, which is enough for what only reads proofs."""
    return await run_checks(MemoryEngine(), replace(settings, tooling_image=None))
