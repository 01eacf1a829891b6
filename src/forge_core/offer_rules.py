"""What an offer must be, whatever the capacity, to be taken (codes.md, RejectionCode; B-51)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from forge_core.blockers import session_blockers
from forge_core.errors import RefusedError
from forge_core.host_fallback import refuse_fallback
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.services import share_out, version_fits
from forge_core.wire.codes import (
    NetworkPolicy,
    Policy,
    PublicationMode,
    RejectionCode,
    Runtime,
    ServiceName,
)
from forge_core.wire.from_hub import Offer, Start
from forge_core.wire.shapes import Service

REPEATED: Final = tuple(name for name in Start.model_fields if name in Offer.model_fields)
"""What a start says again."""

NO_HOST_EXECUTION: Final = "the operator has not set FORGE_ALLOW_HOST_EXECUTION=true on this runner"
NO_HOST_FALLBACK: Final = "host fallback is not enabled for this runner in the hub's settings"


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What a decision looks at besides the reservations; the advertisement says the same.

    :param services: the version of each that can run beside an agent.
    :param remotes: the repositories whose results can be pushed somewhere.
    """

    trust_domain_id: str
    capacity: ResourceCapacity
    repositories: frozenset[str]
    runtimes: frozenset[Runtime]
    blockers: tuple[str, ...] = ()
    network_policies: frozenset[NetworkPolicy] = frozenset({NetworkPolicy.NONE})
    services: Mapping[ServiceName, str] = field(default_factory=dict)
    publication_modes: frozenset[PublicationMode] = frozenset()
    remotes: frozenset[str] = frozenset()
    host_execution_allowed: bool = False
    host_fallback_enabled: bool = False
    utc: str = ""
    draining: bool = False
    stopping: bool = False
    disk_pressure: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one offer: accepted, or a code from the closed list with its detail."""

    runtime: Runtime | None = None
    code: RejectionCode | None = None
    detail: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether capacity is now held for the offer."""
        return self.code is None


def judge(offer: Offer, facts: RunnerFacts) -> Verdict:
    """Where the offer would run, or the first reason other than capacity why it cannot."""
    refusal = _refuse_stranger(offer, facts)
    if refusal is not None:
        return refusal
    runtime = _runtime(offer, facts)
    refuse = refuse_host if runtime is Runtime.HOST else _refuse_sandbox
    refusal = refuse(offer, facts) or _refuse_disk(facts)
    return Verdict(runtime=runtime) if refusal is None else refusal


def _refuse_stranger(offer: Offer, facts: RunnerFacts) -> Verdict | None:
    if facts.stopping:
        return refused(RejectionCode.STOPPING)
    if facts.draining:
        return refused(RejectionCode.DRAINING)
    if offer.trust_domain_id != facts.trust_domain_id:
        return refused(
            RejectionCode.TRUST_DOMAIN_MISMATCH,
            f"this runner belongs to trust domain {facts.trust_domain_id}",
        )
    if offer.repository not in facts.repositories:
        return refused(
            RejectionCode.UNKNOWN_REPOSITORY,
            f"no repository {offer.repository} here; forge-bridge add-repo adds one",
        )
    return None


def _runtime(offer: Offer, facts: RunnerFacts) -> Runtime:
    """The host only where it is the policy, or where a sandbox that is preferred cannot be had."""
    if offer.policy is Policy.HOST:
        return Runtime.HOST
    can_fall_back = offer.policy is Policy.SANDBOX_PREFERRED and offer.host_fallback is not None
    return (
        Runtime.HOST if can_fall_back and Runtime.DOCKER not in facts.runtimes else Runtime.DOCKER
    )


def refuse_host(offer: Offer, facts: RunnerFacts) -> Verdict | None:
    """Why the offer may not run on the host at this moment; None: it may (B-53).

    Asked when the offer is decided, and again before anything of it starts.
    """
    if not facts.host_execution_allowed:
        return refused(RejectionCode.HOST_EXECUTION_DENIED, NO_HOST_EXECUTION)
    if offer.policy is Policy.SANDBOX_REQUIRED:
        return refused(RejectionCode.POLICY_UNSATISFIED, "sandbox_required never runs on the host")
    if offer.policy is Policy.SANDBOX_PREFERRED:
        if not facts.host_fallback_enabled:
            return refused(RejectionCode.HOST_FALLBACK_DENIED, NO_HOST_FALLBACK)
        why = refuse_fallback(offer.host_fallback, utc=facts.utc)
        if why is not None:
            return refused(RejectionCode.HOST_FALLBACK_DENIED, f"the project's permission {why}")
    if offer.requirements.services:
        return refused(RejectionCode.POLICY_UNSATISFIED, "there are no services on the host")
    return _refuse_publication(offer, facts)


def _refuse_sandbox(offer: Offer, facts: RunnerFacts) -> Verdict | None:
    if Runtime.DOCKER not in facts.runtimes:
        return refused(RejectionCode.RUNTIME_UNAVAILABLE, "; ".join(facts.blockers)[:2000] or None)
    if offer.policy is Policy.SANDBOX_REQUIRED:
        lacks = session_blockers(
            has_approved_commit=offer.approved_commit is not None,
            is_open=offer.requirements.network_policy is NetworkPolicy.OPEN_PUBLIC,
        )
        if missing := (*facts.blockers, *lacks):
            return refused(RejectionCode.POLICY_UNSATISFIED, ", ".join(missing)[:2000])
    wanted = offer.requirements
    if wanted.network_policy not in facts.network_policies:
        return refused(RejectionCode.POLICY_UNSATISFIED, f"network policy {wanted.network_policy}")
    return _refuse_services(wanted.services, facts) or _refuse_publication(offer, facts)


def _refuse_services(wanted: Sequence[Service], facts: RunnerFacts) -> Verdict | None:
    names = [service.name for service in wanted]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return refused(RejectionCode.MALFORMED, f"service {twice[0]} is asked for twice")
    if absent := [name for name in names if name not in facts.services]:
        return refused(RejectionCode.POLICY_UNSATISFIED, f"services {', '.join(absent)}")
    for service in wanted:
        actual = facts.services[service.name]
        if not version_fits(service.version, actual):
            detail = f"service {service.name} {service.version}: this runner has {actual}"
            return refused(RejectionCode.POLICY_UNSATISFIED, detail)
    return None


def refuse_shares(resources: ResourceVector, services: Iterable[Service]) -> Verdict | None:
    """Whether an attempt with these resources has room for its services."""
    try:
        share_out(resources, [service.name for service in services])
    except RefusedError as error:
        return refused(RejectionCode.POLICY_UNSATISFIED, str(error))
    return None


def _refuse_publication(offer: Offer, facts: RunnerFacts) -> Verdict | None:
    mode, name = offer.requirements.publication_mode, offer.repository
    if mode not in facts.publication_modes:
        return refused(RejectionCode.POLICY_UNSATISFIED, f"publication mode {mode}")
    if mode is PublicationMode.BRIDGE_PUSH and name not in facts.remotes:
        return refused(
            RejectionCode.POLICY_UNSATISFIED,
            f"publication mode {mode}: no remote of {name} is recorded here; "
            f"forge-bridge add-repo {name} PATH --remote URL records one",
        )
    return None


def _refuse_disk(facts: RunnerFacts) -> Verdict | None:
    return refused(RejectionCode.DISK_PRESSURE) if facts.disk_pressure else None


def refused(code: RejectionCode, detail: str | None = None) -> Verdict:
    """No, because."""
    return Verdict(code=code, detail=detail)


def departure(offer: Offer, start: Start) -> str | None:
    """What a start says otherwise than its offer; None: nothing.

    Only the offer was judged, so nothing else may be started under it.
    """
    for name in REPEATED:
        if getattr(start, name) != getattr(offer, name):
            return f"{Start.model_fields[name].alias} is not that of the offer"
    agreed, policy, mode = offer.requirements, start.network.policy, start.publication.mode
    if policy is not agreed.network_policy:
        return f"network policy {policy} is not {agreed.network_policy}, as offered"
    if mode is not agreed.publication_mode:
        return f"publication mode {mode} is not {agreed.publication_mode}, as offered"
    if mode is PublicationMode.BRIDGE_PUSH and start.publication.handle is None:
        return f"publication mode {mode} comes without a handle"
    if len(start.services) != len(agreed.services) or set(start.services) != set(agreed.services):
        names = ", ".join(service.name for service in start.services) or "none"
        return f"services ({names}) are not those of the offer"
    return None
