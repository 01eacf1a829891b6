"""What ``sandbox_required`` asks for beyond the engine (B-51): proven, or a blocker by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.results import CheckResult, Gate
from forge_core.blockers import Blocker
from forge_core.wire.codes import PublicationMode

PUBLICATION: Final = Gate(
    Blocker.PUBLICATION_MODE, "Results leave by bridge_push", "FORGE_SANDBOX_PUBLICATION_MODE"
)
IMAGE_POLICY: Final = Gate(
    Blocker.IMAGE_POLICY, "Images pass SBOM, vulnerability and provenance gates", "the gates"
)
SIGNATURES: Final = Gate(
    Blocker.SIGNATURES, "Image signatures are verified", "the signature verifier"
)
BUILDER: Final = Gate(
    Blocker.BUILDER, "Images are built in a builder of their own, within limits", "the builder"
)
BUILD_EGRESS: Final = Gate(
    Blocker.BUILD_EGRESS, "Image builds reach nothing that they should not", "the builder"
)
REMEDIES: Final = {
    IMAGE_POLICY: "set FORGE_SANDBOX_IMAGE_POLICY_ENFORCED=true, its two tools and the signing "
    "key, so that each works on the tooling image",
    SIGNATURES: "set FORGE_SANDBOX_SIGNATURE_EXECUTABLE and FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY, "
    "and sign the tooling image with that key",
    BUILDER: "set FORGE_SANDBOX_BUILDKIT_IMAGE, on an engine that enforces limits",
    BUILD_EGRESS: "set FORGE_SANDBOX_BUILD_EGRESS_ENFORCED=true for a builder behind such control",
}


def policy_checks(settings: PreflightSettings) -> Iterator[CheckResult]:
    """Every finding that needs no engine."""
    for check, remedy in REMEDIES.items():
        if evidence := settings.proofs.get(check.id):
            yield check.passed(evidence)
        else:
            why = settings.failures.get(check.id, "nothing has shown it")
            yield check.blocks_required(why, remedy)
    yield _publication(settings)


def can_publish(settings: PreflightSettings) -> bool:
    """Whether results can leave in the chosen mode: a push must have been shown to work."""
    kept_here = settings.publication_mode is PublicationMode.SHARED_FILESYSTEM
    return kept_here or PUBLICATION.id in settings.proofs


def _publication(settings: PreflightSettings) -> CheckResult:
    mode = settings.publication_mode.value
    if settings.publication_mode is PublicationMode.SHARED_FILESYSTEM:
        return PUBLICATION.blocks_required(
            f"{mode}: results stay in the stores under the state root",
            f"set FORGE_SANDBOX_PUBLICATION_MODE={PublicationMode.BRIDGE_PUSH.value}",
        )
    if can_publish(settings):
        return PUBLICATION.passed(f"{mode}: {settings.proofs[PUBLICATION.id]}")
    why = settings.failures.get(PUBLICATION.id, "nothing has shown that a push works")
    return PUBLICATION.blocks_required(
        f"{mode} is configured, and every offer is refused: {why}",
        "install Git 2.31 or later with its https transport, or set "
        f"FORGE_SANDBOX_PUBLICATION_MODE={PublicationMode.SHARED_FILESYSTEM.value} to take the "
        "attempts that do not need it",
    )
