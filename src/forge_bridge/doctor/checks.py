"""The checks in order, and what the runner may advertise on their strength (B-05, B-06, B-51)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from forge_bridge.doctor.egress_checks import egress_checks, network_policies
from forge_bridge.doctor.engine_checks import ENGINE, engine_checks
from forge_bridge.doctor.host_checks import account_of, host_checks
from forge_bridge.doctor.inside_checks import (
    TOOLING,
    inside_checks,
    quota_check,
    quota_supported,
)
from forge_bridge.doctor.policy_checks import can_publish, policy_checks
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.probe import Inside, look_inside
from forge_bridge.doctor.results import CheckResult, Gate, Verdict, exit_code
from forge_bridge.doctor.service_checks import service_checks, usable_services
from forge_core.blockers import Blocker
from forge_core.errors import EngineNotFound, ForgeError, RefusedError, RetryableError
from forge_core.network_spec import contains_egress
from forge_core.ports import Engine
from forge_core.sandbox_spec import Hardening, image_faults, require_pinned
from forge_core.wire.codes import PublicationMode, Runtime, ServiceName
from forge_core.wire.shapes import Capabilities, EngineFacts, SandboxReadiness

CONTAINER: Final = Gate(Blocker.CONTAINER, "A hardened container runs", "a probe container")

LOOK_AGAIN: Final = "run the check again; a bridge that runs does so by itself"


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found; doctor, advertisement and admission all read it from here.

    :ivar hardening: with which the probe ran; whatever is advertised holds for this one alone.
    """

    results: tuple[CheckResult, ...]
    capabilities: Capabilities
    hardening: Hardening = Hardening()  # noqa: RUF009 - frozen

    @property
    def exit_code(self) -> int:
        """See :func:`forge_bridge.doctor.results.exit_code`."""
        return exit_code(self.results)

    @property
    def unseen(self) -> str | None:
        """Why nobody can say whether containers run, which another look may see; None: it can."""
        unseen = (result.evidence for result in self._unseen if result.blocks_all)
        return next(unseen, None)

    @property
    def parts_unseen(self) -> Mapping[str, str]:
        """Why parts that containers can do without could not be tried, by check id."""
        return {result.id: result.evidence for result in self._unseen if not result.blocks_all}

    @property
    def _unseen(self) -> Iterator[CheckResult]:
        return (result for result in self.results if not result.looked)


async def run_checks(engine: Engine, settings: PreflightSettings) -> Preflight:
    """Look at everything; takes well under a second when all is well.

    Raises nothing that is expected: what cannot be looked at is a finding too.
    """
    try:
        facts, info = await engine.facts(), await engine.info()
    except ForgeError as error:
        unseen = ENGINE.unseen(str(error), "start the engine, or name it: FORGE_DOCKER_CONTEXT")
        results = (
            unseen,
            quota_check(None, settings),
            *_part_checks(settings),
        )
        return Preflight(results, capabilities(results, settings, None), settings.hardening)
    results, seen = await _look(engine, facts, info, settings)
    advertised = capabilities(results, settings, facts, has_quota=quota_supported(seen))
    return Preflight(results, advertised, settings.hardening)


async def _look(
    engine: Engine, facts: EngineFacts, info: Mapping[str, Any], settings: PreflightSettings
) -> tuple[tuple[CheckResult, ...], Inside | None]:
    seen: Inside | None = None
    account: str | None = None
    fault = await _image_fault(engine, settings.tooling_image)
    if fault is None:
        try:
            seen = await look_inside(engine, settings)
            account = await account_of(seen)
        except ForgeError as error:
            fault = _probe_fault(error)
    return (
        *engine_checks(facts, info, settings),
        *((fault,) if fault is not None else ()),
        *(inside_checks(seen, settings) if seen is not None else ()),
        *(host_checks(seen, account) if seen is not None else ()),
        quota_check(seen, settings),
        *_part_checks(settings),
    ), seen


def _part_checks(settings: PreflightSettings) -> Iterator[CheckResult]:
    """What parts have shown of themselves; what could not be tried is no verdict."""
    for result in chain(policy_checks(settings), service_checks(settings), egress_checks(settings)):
        is_unseen = result.id in settings.unseen
        yield replace(result, remedy=LOOK_AGAIN, looked=False) if is_unseen else result


async def _image_fault(engine: Engine, image: str | None) -> CheckResult | None:
    """Why the tooling image must not be run at all; None when nothing speaks against it."""
    if image is None:
        return TOOLING.blocks_all(
            "no tooling image is configured",
            "set FORGE_AGENT_TOOLING_IMAGE=repository@sha256:<64 hex>",
        )
    try:
        require_pinned(image, field_name="FORGE_AGENT_TOOLING_IMAGE")
        faults = image_faults(await engine.inspect_image(image))
    except EngineNotFound:
        return TOOLING.blocks_all(
            f"the engine does not have {image}, and nothing is ever pulled for an attempt",
            f"docker pull {image}",
        )
    except RetryableError as error:
        return TOOLING.unseen(str(error), LOOK_AGAIN)
    except RefusedError as error:
        return TOOLING.blocks_all(str(error), "pin the tooling image by its digest")
    if faults:
        return TOOLING.blocks_all(f"{image}: {'; '.join(faults)}", "build it without them")
    return None


def _probe_fault(error: ForgeError) -> CheckResult:
    if isinstance(error, RetryableError):
        return CONTAINER.unseen(str(error), LOOK_AGAIN)
    if isinstance(error, RefusedError) and error.code == "image_refused":
        return TOOLING.blocks_all(str(error), "build it without that file")
    return CONTAINER.blocks_all(str(error), "see the engine's log: journalctl --user -u docker")


def runtimes(results: tuple[CheckResult, ...], settings: PreflightSettings) -> tuple[Runtime, ...]:
    """What may be advertised: docker only when nothing speaks against every container (B-05)."""
    docker = all(not result.blocks_all for result in results)
    return (
        *((Runtime.DOCKER,) if docker else ()),
        *((Runtime.HOST,) if settings.host_execution_allowed else ()),
    )


def publication_modes(
    advertised: tuple[Runtime, ...], settings: PreflightSettings
) -> tuple[PublicationMode, ...]:
    """How results can really leave: the chosen mode, when this bridge is able to do it (B-37)."""
    able = bool(advertised) and can_publish(settings)
    return (settings.publication_mode,) if able else ()


def sandbox_readiness(results: tuple[CheckResult, ...]) -> SandboxReadiness:
    """Whether ``sandbox_required`` can be met, and by name what stands in the way (B-51)."""
    blockers = tuple(sorted({Blocker(result.id) for result in results if result.blocks}))
    return SandboxReadiness(ready=not blockers, blockers=blockers)


def _services(settings: PreflightSettings, engine: EngineFacts | None) -> tuple[ServiceName, ...]:
    """None where the network that they share with the agent would lead out."""
    contained = engine is not None and contains_egress(engine.version)
    return usable_services(settings) if contained else ()


def capabilities(
    results: tuple[CheckResult, ...],
    settings: PreflightSettings,
    engine: EngineFacts | None,
    *,
    has_quota: bool = False,
) -> Capabilities:
    """What the runner tells the hub that it can do (B-06); the same findings, nothing else."""
    passed = {result.id for result in results if result.verdict is Verdict.PASS}
    advertised = runtimes(results, settings)
    hardening = settings.hardening
    return Capabilities(
        runtimes=advertised,
        engine=engine,
        quota_supported=has_quota,
        dedicated_disk=settings.dedicated_disk,
        sandbox_required=sandbox_readiness(results),
        network_policies=network_policies(settings, engine) if Runtime.DOCKER in advertised else (),
        services=_services(settings, engine) if Runtime.DOCKER in advertised else (),
        publication_modes=publication_modes(advertised, settings),
        image_policy_enforced="image_policy" in passed,
        signature_verification="signatures" in passed,
        seccomp_digest=hardening.seccomp_digest if "seccomp" in passed else None,
        lsm=hardening.lsm_security_opt if "lsm" in passed else None,
        tooling_image=settings.tooling_image,
        resource_capacity=settings.capacity,
    )
