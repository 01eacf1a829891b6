"""How a simulated runner is set up: its settings, what it offers, and what its preflight has shown.

No doctor runs here: the runner is fit from the start.
"""

from __future__ import annotations

import random  # noqa: TID251 - an argument's type; the instances are seeded
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network
from typing import Final

from forge_bridge.egress.trial import EgressTrial
from forge_bridge.runner import Runner, SandboxSettings
from forge_bridge.settings import BridgeSettings, default_bridge_service_config
from forge_core.wire.codes import NetworkPolicy, PublicationMode, Runtime
from forge_core.wire.shapes import Capabilities, SandboxReadiness

from .egress import simulated_trial
from .services import SERVICES

IMAGE: Final = "sha256:" + "1" * 64
THIS_RUNNER: Final = "runner-1"
SLOTS: Final = 2
KEPT_IMAGES: Final = 0
KEPT_IMAGES_MS: Final = 1_000
KEPT_EVIDENCE: Final = 2
KEPT_EVIDENCE_MS: Final = 120_000
POOLS: Final = tuple(IPv4Network(f"10.210.0.0/{prefix}") for prefix in (24, 25, 26))
"""The smallest has room for one attempt with a proxy, and nothing beside it."""


@cache
def settings(pool: IPv4Network, allows_host: bool) -> BridgeSettings:
    """Of a runner that takes its subnets from there, and lets attempts run on the host or not."""
    return default_bridge_service_config(
        server_url="http://127.0.0.1:1",
        trust_domain_id="domain",
        agent_tooling_image=f"tooling@{IMAGE}",
        minimum_workspace_bytes=2**30,
        disk_high_watermark_percent=90,
        disk_low_watermark_percent=80,
        max_concurrent_sandboxes=SLOTS,
        max_concurrent_sandbox_builds=SLOTS,
        sandbox_image_retention_count=KEPT_IMAGES,
        sandbox_image_retention_ttl_ms=KEPT_IMAGES_MS,
        sandbox_audit_retention_count=KEPT_EVIDENCE,
        sandbox_audit_retention_ttl_ms=KEPT_EVIDENCE_MS,
        stop_deadline_seconds=60,
        sandbox_subnet_pool=pool,
        allow_host_execution=allows_host,
    )


SANDBOX: Final = SandboxSettings(
    tooling=f"tooling@{IMAGE}",
    supervisor_source="supervisor",
    bundle_source="bundle",
    kill_grace_ms=2_000,
    push_ms=60_000,
)
CAPABILITIES: Final = Capabilities(
    runtimes=(Runtime.DOCKER, Runtime.HOST),
    quota_supported=False,
    dedicated_disk=False,
    sandbox_required=SandboxReadiness(ready=False, blockers=("quota",)),
    network_policies=tuple(NetworkPolicy),
    services=tuple(SERVICES),
    publication_modes=tuple(PublicationMode),
    image_policy_enforced=False,
    signature_verification=False,
    tooling_image=f"tooling@{IMAGE}",
    resource_capacity=settings(POOLS[0], allows_host=False).resource_capacity,
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What differs from seed to seed.

    :param pool: of subnets.
    :param egress: the proxy that the preflight has tried.
    :param allows_host: whether the operator does.
    :param has_engine: whether the preflight found one that is fit for attempts.
    """

    pool: IPv4Network
    egress: EgressTrial
    allows_host: bool
    has_engine: bool

    @classmethod
    def of(cls, rng: random.Random, login: str) -> Setup:
        """``login`` is that of an upstream proxy; a secret."""
        pool, allows_host = rng.choice(POOLS), rng.random() < 0.5
        has_engine = not allows_host or rng.random() < 0.5
        return cls(pool, simulated_trial(pool, login), allows_host, has_engine)

    @property
    def settings(self) -> BridgeSettings:
        """The operator's."""
        return settings(self.pool, self.allows_host)

    @property
    def capabilities(self) -> Capabilities:
        """What it offers."""
        if self.has_engine:
            return CAPABILITIES
        return CAPABILITIES.model_copy(update={"runtimes": (Runtime.HOST,)})

    def show(self, runner: Runner) -> None:
        """What a preflight would have shown."""
        runner.egress = self.egress
        runner.services = SERVICES
