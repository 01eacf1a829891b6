"""Which runner an attempt is offered to, and why not to the others (B-96).

The hub's view of a runner is always a little old, so this only chooses whom to ask: the
runner's own admission has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forge_core.blockers import session_blockers
from forge_core.resources import (
    CAPACITY_CODES,
    ResourceCapacity,
    ResourceVector,
    exceeded_component,
)
from forge_core.wire.codes import NetworkPolicy, Policy, RejectionCode, RunnerState, Runtime
from forge_core.wire.from_hub import HostFallback, Requirements
from forge_core.wire.shapes import Capabilities, RunnerSettings


class Absence(StrEnum):
    """Why a runner could not even be considered."""

    NO_RUNNER = "no_runner"
    OFFLINE = "offline"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an attempt needs of a runner.

    :param has_approved_commit: a commit was named whose contract counts (B-52).
    :param runner_id: the only runner that may take it; None: any.
    :param host_fallback: permission to run on the host, already checked to be unexpired.
    """

    trust_domain_id: str
    policy: Policy
    repository: str
    resources: ResourceVector
    requirements: Requirements
    has_approved_commit: bool = False
    runner_id: str | None = None
    host_fallback: HostFallback | None = None


@dataclass(frozen=True, slots=True)
class Declined:
    """What became of an offer that a runner did not take, in a code and in words."""

    code: RejectionCode
    detail: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runner as the hub sees it.

    :param ready: it has sent a heartbeat since it registered, so ``used`` means something.
    :param outstanding: what our own undecided offers will take on top of ``used``.
    :param declined: why it did not take this very attempt, while that still counts.
    """

    runner_id: str
    trust_domain_id: str
    connected: bool
    ready: bool
    state: RunnerState
    settings: RunnerSettings
    capabilities: Capabilities
    repositories: frozenset[str]
    used: ResourceVector
    outstanding: ResourceVector
    capacity: ResourceCapacity
    disk_latched: bool = False
    declined: Declined | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one runner was not chosen; ``runner_id`` is None when there is no runner at all."""

    runner_id: str | None
    reason: RejectionCode | Absence
    detail: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The runner to ask, or None, with a named reason for every runner that was left out."""

    runner_id: str | None
    refusals: tuple[Refusal, ...]


def place(wanted: Wanted, candidates: Iterable[Candidate]) -> Placement:
    """Choose the runner with the most free slots; the smallest id among equals (B-96)."""
    eligible: list[Candidate] = []
    refusals: list[Refusal] = []
    considered = (c for c in candidates if wanted.runner_id in {None, c.runner_id})
    for candidate in sorted(considered, key=lambda c: c.runner_id):
        refusal = refuse(wanted, candidate)
        if refusal is None:
            eligible.append(candidate)
        else:
            refusals.append(refusal)
    if eligible:
        return Placement(max(eligible, key=_free_slots).runner_id, tuple(refusals))
    if not refusals:
        who = f"runner {wanted.runner_id} has not" if wanted.runner_id else "no runner has ever"
        refusals.append(Refusal(wanted.runner_id, Absence.NO_RUNNER, f"{who} registered"))
    return Placement(None, tuple(refusals))


def refuse(wanted: Wanted, candidate: Candidate) -> Refusal | None:
    """The first reason why ``candidate`` cannot take what is ``wanted``; None: it can."""
    found = (
        _absence(candidate)
        or _trust(wanted, candidate)
        or _policy(wanted, candidate)
        or _declined(candidate)
        or _capacity(wanted, candidate)
    )
    return None if found is None else Refusal(candidate.runner_id, *found)


_MAX_DETAIL: Final = 2_000
"""Characters; a runner names its blockers itself."""

_Reason = tuple[RejectionCode | Absence, str]


def _free_slots(candidate: Candidate) -> int:
    return candidate.capacity.slots - candidate.used.slots - candidate.outstanding.slots


def _absence(candidate: Candidate) -> _Reason | None:
    if not candidate.connected:
        return Absence.OFFLINE, "it is not connected"
    if not candidate.ready:
        return Absence.NOT_READY, "it has not sent a heartbeat since it registered"
    if candidate.state is RunnerState.STOPPING:
        return RejectionCode.STOPPING, "it is stopping"
    if candidate.settings.draining:
        return RejectionCode.DRAINING, "it is draining; resume it to let it take attempts"
    if candidate.state is RunnerState.DRAINING:
        return RejectionCode.DRAINING, "its host drains it; run `forge-bridge undrain` there"
    return None


def _trust(wanted: Wanted, candidate: Candidate) -> _Reason | None:
    if candidate.trust_domain_id != wanted.trust_domain_id:
        return (
            RejectionCode.TRUST_DOMAIN_MISMATCH,
            f"it serves trust domain {candidate.trust_domain_id}, not {wanted.trust_domain_id}",
        )
    if wanted.repository not in candidate.repositories:
        return (
            RejectionCode.UNKNOWN_REPOSITORY,
            f"it does not know repository {wanted.repository}; run `forge-bridge add-repo` there",
        )
    return None


def _policy(wanted: Wanted, candidate: Candidate) -> _Reason | None:
    runtimes = candidate.capabilities.runtimes
    if wanted.policy is Policy.HOST:
        if Runtime.HOST not in runtimes:
            return RejectionCode.HOST_EXECUTION_DENIED, "its operator does not allow host execution"
        return _host_requirements(wanted.requirements, candidate.capabilities)
    if wanted.policy is Policy.SANDBOX_REQUIRED and (missing := _blockers(wanted, candidate)):
        detail = f"cannot meet sandbox_required: {', '.join(missing)}"
        return RejectionCode.POLICY_UNSATISFIED, detail[:_MAX_DETAIL]
    if Runtime.DOCKER in runtimes:
        return _requirements(wanted.requirements, candidate.capabilities)
    if wanted.policy is Policy.SANDBOX_PREFERRED:
        return _fallback(wanted, candidate)
    return RejectionCode.RUNTIME_UNAVAILABLE, "it has no container runtime"


def _blockers(wanted: Wanted, candidate: Candidate) -> tuple[str, ...]:
    """What stands in the way of ``sandbox_required``: there, and in the session itself (B-51)."""
    readiness = candidate.capabilities.sandbox_required
    unnamed = () if readiness.ready else ("none named",)
    lacks = session_blockers(
        has_approved_commit=wanted.has_approved_commit,
        is_open=wanted.requirements.network_policy is NetworkPolicy.OPEN_PUBLIC,
    )
    return (*(readiness.blockers or unnamed), *lacks)


def _fallback(wanted: Wanted, candidate: Candidate) -> _Reason | None:
    """Both sides must have said yes: the project's owner and the operator (B-53)."""
    if wanted.host_fallback is None or not candidate.settings.host_fallback_enabled:
        who = "the project" if wanted.host_fallback is None else "its operator"
        return (
            RejectionCode.HOST_FALLBACK_DENIED,
            f"it has no container runtime and {who} does not allow host fallback",
        )
    if Runtime.HOST not in candidate.capabilities.runtimes:
        return RejectionCode.RUNTIME_UNAVAILABLE, "it has no runtime at all"
    return _host_requirements(wanted.requirements, candidate.capabilities)


def _requirements(requirements: Requirements, capabilities: Capabilities) -> _Reason | None:
    missing = []
    if requirements.network_policy not in capabilities.network_policies:
        missing.append(f"network policy {requirements.network_policy}")
    offered = frozenset(capabilities.services)
    missing += [f"service {s.name}" for s in requirements.services if s.name not in offered]
    return _not_offered([*missing, *_publication(requirements, capabilities)])


def _host_requirements(requirements: Requirements, capabilities: Capabilities) -> _Reason | None:
    """On a host there are no services, and no network policy: it has the host's network."""
    missing = [f"service {service.name} on its host" for service in requirements.services]
    return _not_offered([*missing, *_publication(requirements, capabilities)])


def _publication(requirements: Requirements, capabilities: Capabilities) -> list[str]:
    mode = requirements.publication_mode
    return [] if mode in capabilities.publication_modes else [f"publication mode {mode}"]


def _not_offered(missing: list[str]) -> _Reason | None:
    if not missing:
        return None
    return RejectionCode.POLICY_UNSATISFIED, f"it does not offer {', '.join(missing)}"


def _declined(candidate: Candidate) -> _Reason | None:
    if candidate.declined is None:
        return None
    return candidate.declined.code, candidate.declined.detail


def _capacity(wanted: Wanted, candidate: Candidate) -> _Reason | None:
    if candidate.disk_latched:
        return RejectionCode.DISK_PRESSURE, "its disk is above the high watermark"
    taken = candidate.used + candidate.outstanding
    component = exceeded_component(taken, wanted.resources, candidate.capacity)
    if component is None:
        return None
    counts = (getattr(v, component) for v in (taken, wanted.resources, candidate.capacity))
    detail = "{}: {} taken and {} wanted of {}".format(component, *counts)
    return CAPACITY_CODES[component], detail
