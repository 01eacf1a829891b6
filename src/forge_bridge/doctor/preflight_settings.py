"""What the checks need to know of the settings: plain values, so that any caller has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forge_bridge.doctor.proofs import Proofs
from forge_core.labels import Owner
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import Hardening
from forge_core.wire.codes import PublicationMode, ServiceName


@dataclass(frozen=True, slots=True)
class PreflightSettings:
    """What the operator decided, and what other parts have proven.

    :param owner: whose the probe's resources are, should a crash leave them behind.
    :param proofs: evidence by check id (``image_policy``, ``signatures``, ``build_egress``,
        ``publication_mode``) from the parts that have tried their tools; a setting alone is never
        evidence.
    :param services: those that have an image.
    :param failures: why a part that is configured could not show it, by check id.
    :param unseen: those of them that are no verdict: another try may see.
    """

    owner: Owner
    tooling_image: str | None
    hardening: Hardening
    capacity: ResourceCapacity
    publication_mode: PublicationMode = PublicationMode.SHARED_FILESYSTEM
    dedicated_disk: bool = False
    docker_desktop_allowed: bool = False
    host_execution_allowed: bool = False
    services: tuple[ServiceName, ...] = ()
    egress_enforced: bool = False
    open_public_allowed: bool = False
    proofs: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    unseen: frozenset[str] = frozenset()

    def with_proofs(self, proofs: Proofs) -> PreflightSettings:
        """The same, with what was tried."""
        return replace(
            self,
            proofs=proofs.shown,
            failures={**proofs.failed, **proofs.unseen},
            unseen=frozenset(proofs.unseen),
        )
