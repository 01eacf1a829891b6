"""The preflight of a bridge: its settings in, findings and advertisement out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio

from forge_bridge.doctor.builder_checks import prove_builder
from forge_bridge.doctor.checks import Preflight, run_checks
from forge_bridge.doctor.egress_checks import prove_egress
from forge_bridge.doctor.image_checks import ImageProver
from forge_bridge.doctor.lsm_checks import prove_enforcing
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.doctor.publication_checks import prove_publication
from forge_bridge.doctor.service_checks import prove_services
from forge_bridge.egress.trial import EgressTrial
from forge_bridge.services.images import ServiceImages
from forge_bridge.settings import BridgeSettings
from forge_core.errors import RefusedError
from forge_core.image_ports import ImageBuilder
from forge_core.labels import PREFLIGHT, Owner
from forge_core.ports import Engine
from forge_core.sandbox_spec import Hardening
from forge_edges.trusted_file import UntrustedFile, read_trusted_file

MAX_PROFILE_BYTES: Final = 1 << 20


async def preflight(
    engine: Engine,
    settings: BridgeSettings,
    hardening: Hardening,
    *,
    runner_id: str,
    instance_id: str,
    prover: ImageProver | None = None,
    builder: ImageBuilder | None = None,
    services: ServiceImages | None = None,
    egress: EgressTrial | None = None,
) -> Preflight:
    """Run every check for these settings.

    :param hardening: :func:`read_hardening`, read once: what is tried here is what is applied.
    :param instance_id: this life of the process; with ``runner_id`` it labels what the probe
        makes, so that the next start finds it should this one die in the middle.
    :param prover: tries the image gates; None: nothing shows that they work.
    :param builder: is looked at likewise.
    :param services: their images are tried; what can be used it says afterwards.
    :param egress: the way out is tried likewise; None: it is not to be offered.
    """
    proofs = Proofs()
    if prover is not None:
        proofs = await prover.prove(engine, settings.agent_tooling_image)
    if builder is not None:
        egress_enforced = settings.sandbox_build_egress_enforced
        proofs |= await prove_builder(builder, egress_enforced=egress_enforced)
    proofs |= await prove_publication(
        settings.sandbox_publication_mode, settings.sandbox_state_root
    )
    proofs |= await prove_enforcing(hardening.lsm_security_opt)
    trust_domain_id = settings.trust_domain_id or PREFLIGHT
    known = PreflightSettings(
        owner=Owner.of_runner(PREFLIGHT, runner_id, instance_id, trust_domain_id),
        tooling_image=settings.agent_tooling_image,
        hardening=hardening,
        capacity=settings.resource_capacity,
        publication_mode=settings.sandbox_publication_mode,
        dedicated_disk=settings.sandbox_dedicated_disk,
        docker_desktop_allowed=settings.allow_docker_desktop_sandbox,
        host_execution_allowed=settings.allow_host_execution,
        egress_enforced=settings.sandbox_egress_enforced,
        open_public_allowed=settings.allow_open_public_sandbox,
    )
    if services is not None:
        known = replace(known, services=tuple(services.references))
        proofs |= await prove_services(services, engine, known, settings.sandbox_subnet_pool)
    if egress is not None:
        proofs |= await prove_egress(egress, engine, known)
    return await run_checks(engine, known.with_proofs(proofs))


async def read_hardening(settings: BridgeSettings) -> Hardening:
    """The configured hardening with the seccomp profile's text (B-35).

    :raises RefusedError: the profile cannot be read, is too large, is no JSON object, or can be
        changed by other accounts.
    """
    profile = settings.sandbox_seccomp_profile
    text = None if profile is None else await anyio.to_thread.run_sync(_read_profile, profile)
    return Hardening(text, settings.sandbox_lsm_security_opt)


def _read_profile(path: Path) -> str:
    try:
        return read_trusted_file(path, max_bytes=MAX_PROFILE_BYTES).decode("utf-8")
    except (UntrustedFile, UnicodeDecodeError) as error:
        raise RefusedError(
            f"cannot use the seccomp profile {path}: {error}",
            code="configuration",
            field="FORGE_SANDBOX_SECCOMP_PROFILE",
        ) from None
