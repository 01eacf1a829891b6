"""Whom an attempt is offered to, and why not to the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.placement import Absence, Candidate, Declined, Wanted, place, refuse
from forge_core.resources import ResourceCapacity, ResourceVector, can_reserve_sandbox_resources
from forge_core.wire.codes import (
    NetworkPolicy,
    Policy,
    PublicationMode,
    RejectionCode,
    RunnerState,
    Runtime,
    ServiceName,
)
from forge_core.wire.from_hub import HostFallback, Requirements
from forge_core.wire.shapes import Capabilities, RunnerSettings, SandboxReadiness, Service

FALLBACK = HostFallback(reason="migration", expires_at="2026-12-01T00:00:00.000Z")
CAPABILITIES = Capabilities(
    runtimes=(Runtime.DOCKER,),
    quota_supported=False,
    dedicated_disk=True,
    sandbox_required=SandboxReadiness(ready=True),
    network_policies=(NetworkPolicy.NONE,),
    services=(ServiceName.REDIS,),
    publication_modes=(PublicationMode.SHARED_FILESYSTEM,),
    image_policy_enforced=False,
    signature_verification=False,
    resource_capacity=ResourceCapacity(slots=4),
)
WANTED = Wanted(
    trust_domain_id="td",
    policy=Policy.SANDBOX_REQUIRED,
    repository="repo",
    resources=ResourceVector(slots=1, memory_bytes=100),
    requirements=Requirements(),
    has_approved_commit=True,
)
FIT = Candidate(
    runner_id="r1",
    trust_domain_id="td",
    connected=True,
    ready=True,
    state=RunnerState.ONLINE,
    settings=RunnerSettings(draining=False, host_fallback_enabled=False),
    capabilities=CAPABILITIES,
    repositories=frozenset({"repo"}),
    used=ResourceVector(),
    outstanding=ResourceVector(),
    capacity=ResourceCapacity(slots=4, memory_bytes=1_000),
)


def able(**changes: Any) -> Candidate:
    return replace(FIT, capabilities=CAPABILITIES.model_copy(update=changes))


DECLINED = Declined(RejectionCode.CAPACITY_DISK, "it is full")
HOST_ONLY = able(
    runtimes=(Runtime.HOST,), sandbox_required=SandboxReadiness(ready=False, blockers=("engine",))
)
WILLING = replace(HOST_ONLY, settings=RunnerSettings(draining=False, host_fallback_enabled=True))


@pytest.mark.requirement("B-96")
@pytest.mark.parametrize(
    ("candidate", "reason", "word"),
    [
        (replace(FIT, connected=False), Absence.OFFLINE, "not connected"),
        (replace(FIT, ready=False), Absence.NOT_READY, "heartbeat"),
        (replace(FIT, state=RunnerState.STOPPING), RejectionCode.STOPPING, "stopping"),
        (replace(FIT, state=RunnerState.DRAINING), RejectionCode.DRAINING, "forge-bridge undrain"),
        (
            replace(FIT, settings=RunnerSettings(draining=True, host_fallback_enabled=False)),
            RejectionCode.DRAINING,
            "resume",
        ),
        (replace(FIT, trust_domain_id="x"), RejectionCode.TRUST_DOMAIN_MISMATCH, "domain x"),
        (replace(FIT, repositories=frozenset()), RejectionCode.UNKNOWN_REPOSITORY, "add-repo"),
        (HOST_ONLY, RejectionCode.POLICY_UNSATISFIED, "engine"),
        (able(network_policies=()), RejectionCode.POLICY_UNSATISFIED, "network policy none"),
        (able(publication_modes=()), RejectionCode.POLICY_UNSATISFIED, "shared_filesystem"),
        (replace(FIT, declined=DECLINED), RejectionCode.CAPACITY_DISK, "it is full"),
        (replace(FIT, disk_latched=True), RejectionCode.DISK_PRESSURE, "watermark"),
        (replace(FIT, used=ResourceVector(slots=4)), RejectionCode.CAPACITY_SLOTS, "4 taken"),
        (
            replace(FIT, outstanding=ResourceVector(memory_bytes=901)),
            RejectionCode.CAPACITY_MEMORY,
            "901 taken and 100 wanted of 1000",
        ),
    ],
)
def test_each_reason_is_named(candidate: Candidate, reason: object, word: str) -> None:
    placement = place(WANTED, [candidate])
    assert placement.runner_id is None
    assert [(r.runner_id, r.reason) for r in placement.refusals] == [("r1", reason)]
    assert word in placement.refusals[0].detail


@pytest.mark.requirement("B-53", "B-96")
@pytest.mark.parametrize(
    ("policy", "fallback", "candidate", "reason"),
    [
        (Policy.SANDBOX_PREFERRED, None, FIT, None),
        (Policy.SANDBOX_PREFERRED, FALLBACK, WILLING, None),
        (Policy.SANDBOX_PREFERRED, None, WILLING, RejectionCode.HOST_FALLBACK_DENIED),
        (Policy.SANDBOX_PREFERRED, FALLBACK, HOST_ONLY, RejectionCode.HOST_FALLBACK_DENIED),
        (
            Policy.SANDBOX_PREFERRED,
            FALLBACK,
            replace(WILLING, capabilities=able(runtimes=()).capabilities),
            RejectionCode.RUNTIME_UNAVAILABLE,
        ),
        (Policy.SANDBOX_REQUIRED, FALLBACK, WILLING, RejectionCode.POLICY_UNSATISFIED),
        (Policy.SANDBOX_REQUIRED, None, able(runtimes=()), RejectionCode.RUNTIME_UNAVAILABLE),
        (Policy.HOST, None, HOST_ONLY, None),
        (Policy.HOST, None, FIT, RejectionCode.HOST_EXECUTION_DENIED),
    ],
)
def test_the_host_is_used_only_where_both_sides_said_so(
    policy: Policy,
    fallback: HostFallback | None,
    candidate: Candidate,
    reason: RejectionCode | None,
) -> None:
    refusal = refuse(replace(WANTED, policy=policy, host_fallback=fallback), candidate)
    assert (refusal and refusal.reason) == reason


@pytest.mark.requirement("B-53", "B-55", "B-96")
@pytest.mark.parametrize(
    ("policy", "fallback"), [(Policy.HOST, None), (Policy.SANDBOX_PREFERRED, FALLBACK)]
)
def test_a_host_has_no_services_and_publishes_as_it_says(
    policy: Policy, fallback: HostFallback | None
) -> None:
    wanted = replace(
        WANTED,
        policy=policy,
        host_fallback=fallback,
        requirements=Requirements(
            network_policy=NetworkPolicy.PUBLIC_ALLOWLIST,
            services=(Service(name=ServiceName.REDIS),),
            publication_mode=PublicationMode.BRIDGE_PUSH,
        ),
    )
    refusal = refuse(wanted, WILLING)
    assert refusal is not None
    assert refusal.reason is RejectionCode.POLICY_UNSATISFIED
    assert "service redis on its host, publication mode bridge_push" in refusal.detail


@pytest.mark.requirement("B-55")
def test_a_missing_service_is_named() -> None:
    services = (Service(name=ServiceName.REDIS), Service(name=ServiceName.POSTGRES))
    wanted = replace(WANTED, requirements=Requirements(services=services))
    refusal = refuse(wanted, FIT)
    assert refusal is not None
    assert refusal.detail == "it does not offer service postgres"


def test_nobody_there_is_a_reason_too() -> None:
    assert place(WANTED, []).refusals[0].reason is Absence.NO_RUNNER
    pinned = place(replace(WANTED, runner_id="r9"), [FIT])
    assert (pinned.runner_id, pinned.refusals[0].runner_id) == (None, "r9")


def test_the_freest_runner_is_chosen_and_the_smallest_id_among_equals() -> None:
    busy = replace(FIT, runner_id="r0", used=ResourceVector(slots=1))
    twin = replace(FIT, runner_id="r2")
    away = replace(FIT, runner_id="r3", connected=False)
    placement = place(WANTED, [away, twin, busy, FIT])
    assert placement.runner_id == "r1"
    assert [r.runner_id for r in placement.refusals] == ["r3"]


amounts = st.integers(min_value=0, max_value=2**63 - 1)
vectors = st.builds(ResourceVector, slots=amounts, memory_bytes=amounts, pids=amounts)


@pytest.mark.requirement("B-10")
@given(vectors, vectors, vectors, st.builds(ResourceCapacity, slots=amounts, pids=amounts))
def test_capacity_is_judged_as_admission_judges_it(
    used: ResourceVector,
    outstanding: ResourceVector,
    wanted: ResourceVector,
    capacity: ResourceCapacity,
) -> None:
    candidate = replace(FIT, used=used, outstanding=outstanding, capacity=capacity)
    refusal = refuse(replace(WANTED, resources=wanted), candidate)
    taken = used + outstanding
    if max(taken.slots, taken.memory_bytes, taken.pids) < 2**63:
        assert (refusal is None) == can_reserve_sandbox_resources(taken, wanted, capacity)


@pytest.mark.requirement("B-51")
def test_what_a_session_lacks_is_named_beside_what_the_runner_lacks() -> None:
    unready = able(sandbox_required=SandboxReadiness(ready=False, blockers=("lsm", "rootless")))
    lacking = replace(
        WANTED,
        has_approved_commit=False,
        requirements=Requirements(network_policy=NetworkPolicy.OPEN_PUBLIC),
    )
    refusal = refuse(lacking, unready)
    assert refusal is not None
    assert refusal.reason is RejectionCode.POLICY_UNSATISFIED
    names = "lsm, rootless, approved_commit, open_public"
    assert refusal.detail == f"cannot meet sandbox_required: {names}"
    preferred = replace(WANTED, policy=Policy.SANDBOX_PREFERRED, has_approved_commit=False)
    assert refuse(preferred, unready) is None


@pytest.mark.requirement("B-51")
def test_a_runner_that_names_blockers_is_not_ready_whatever_else_it_says() -> None:
    for ready, blockers, words in (
        (True, ("lsm",), "lsm"),
        (False, (), "none named"),
        (False, ("x" * 256,) * 256, "xxx"),
    ):
        readiness = SandboxReadiness(ready=ready, blockers=blockers)
        refusal = refuse(WANTED, able(sandbox_required=readiness))
        assert refusal is not None
        assert words in refusal.detail
        assert len(refusal.detail) <= 2_000
