"""Who may run here: every decision against a second, naive implementation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from ipaddress import IPv4Network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from forge_core.admission import (
    DEFAULT_REQUEST,
    REMEMBERED_ATTEMPTS,
    REMEMBERED_DECISIONS,
    Admission,
    DiskPressure,
    Key,
    RunnerFacts,
    Verdict,
)
from forge_core.offer_rules import refuse_host
from forge_core.resources import COMPONENTS, ResourceCapacity, ResourceVector
from forge_core.subnet_pool import SubnetPool
from forge_core.wire.base import MAX_INT
from forge_core.wire.codes import (
    Decision,
    NetworkPolicy,
    Policy,
    PublicationMode,
    RejectionCode,
    ReservationState,
    Runtime,
    ServiceName,
)
from forge_core.wire.from_bridge import SubmitOfferDecision
from forge_core.wire.from_hub import HostFallback, Offer, Requirements
from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes
from forge_core.wire.shapes import Service

POOL = IPv4Network("10.213.0.0/26")
CAPACITY = ResourceCapacity(slots=3, builds=1, pids=1024, memory_bytes=4 << 30, cpu_millis=3000)
FACTS = RunnerFacts(
    trust_domain_id="domain-1",
    capacity=CAPACITY,
    repositories=frozenset({"demo"}),
    runtimes=frozenset({Runtime.DOCKER}),
    network_policies=frozenset({NetworkPolicy.NONE}),
    publication_modes=frozenset({PublicationMode.SHARED_FILESYSTEM}),
)


def offered(offer_id: str = "o-1", attempt_id: str = "a-1", fence: int = 1, **more: Any) -> Offer:
    return Offer(
        offer_id=offer_id,
        attempt_id=attempt_id,
        fence=fence,
        **{
            "runner_instance_id": "instance-1",
            "session_id": "session-1",
            "project_id": "project-1",
            "trust_domain_id": "domain-1",
            "policy": Policy.SANDBOX_PREFERRED,
            "resources": ResourceVector(slots=1),
            "repository": "demo",
            "expires_in_ms": 1_000,
            **more,
        },
    )


@dataclass
class Twin:
    """Admission once more: a list, whose sums are made again for every question."""

    held: list[tuple[Key, str, ResourceVector, ReservationState, int]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    ever_held: set[Key] = field(default_factory=set)
    answers: dict[tuple[str, Key], Verdict] = field(default_factory=dict)

    def used(self, component: str) -> int:
        return sum(getattr(resources, component) for _, _, resources, _, _ in self.held)

    def wanted(self, resources: ResourceVector) -> ResourceVector:
        defaults = {"slots": 1, "pids": 256, "memory_bytes": 1 << 30, "cpu_millis": 1000}
        return replace(
            resources, **{k: v for k, v in defaults.items() if getattr(resources, k) == 0}
        )

    def code(self, offer: Offer, facts: RunnerFacts) -> RejectionCode | None:
        key = (offer.attempt_id, offer.fence)
        older = any(a == key[0] and fence >= key[1] for a, fence in self.ever_held)
        if older or key[1] < self.seen.get(key[0], 0):
            return RejectionCode.STALE_FENCE
        if facts.draining:
            return RejectionCode.DRAINING
        wanted = self.wanted(offer.resources)
        for component in COMPONENTS:
            ceiling = getattr(facts.capacity, component)
            ceiling = MAX_INT if ceiling is None else ceiling
            if self.used(component) + getattr(wanted, component) > ceiling:
                short = component.removesuffix("_bytes").removesuffix("_millis")
                return RejectionCode(f"capacity_{short}")
        return None


class AdmissionMachine(RuleBasedStateMachine):
    """Offers, starts, ends, left-overs and time, in any order."""

    keys = Bundle("keys")
    offers = Bundle("offers")

    def __init__(self) -> None:
        super().__init__()
        self.admission, self.twin = Admission(), Twin()
        self.facts, self.now_ms, self.number = FACTS, 0, 0

    @rule(
        target=offers,
        attempt=st.sampled_from("abcd"),
        fence=st.sampled_from([1, 2, 3, MAX_INT - 1, MAX_INT]),
        resources=st.builds(
            ResourceVector,
            slots=st.integers(0, 4),
            builds=st.integers(0, 1),
            pids=st.sampled_from([0, 1, 512, MAX_INT]),
            memory_bytes=st.sampled_from([0, 1, 2 << 30]),
            cpu_millis=st.sampled_from([0, 1, 1500]),
            disk_bytes=st.sampled_from([0, 1, MAX_INT]),
        ),
    )
    def make_offer(self, attempt: str, fence: int, resources: ResourceVector) -> Offer:
        self.number += 1
        return offered(f"o-{self.number}", f"att-{attempt}", fence, resources=resources)

    @rule(target=keys, offer=offers)
    def decide(self, offer: Offer) -> Key:
        key = (offer.attempt_id, offer.fence)
        expected = self.twin.answers.get((offer.offer_id, key))
        code = self.twin.code(offer, self.facts) if expected is None else expected.code
        verdict = self.admission.decide(offer, self.facts, self.now_ms)
        assert verdict.code == code
        assert verdict.runtime == (Runtime.DOCKER if code is None else None)
        assert expected is None or verdict == expected
        if expected is None:
            self.twin.seen[key[0]] = max(key[1], self.twin.seen.get(key[0], 0))
            self.twin.answers[offer.offer_id, key] = verdict
            if code is None:
                wanted = self.twin.wanted(offer.resources)
                expires_at_ms = self.now_ms + 1_000
                state = ReservationState.RESERVED
                self.twin.held.append((key, offer.offer_id, wanted, state, expires_at_ms))
                self.twin.ever_held.add(key)
        return key

    @rule(key=keys, state=st.sampled_from(ReservationState))
    def move(self, key: Key, state: ReservationState) -> None:
        if key in self.admission.reservations:
            self.admission.transition(key, state)
            self.twin.held = [
                (k, o, r, state if k == key else s, e) for k, o, r, s, e in self.twin.held
            ]

    @rule(key=keys)
    def release_builds(self, key: Key) -> None:
        self.admission.release_builds(key)
        self.admission.release_builds(key)
        self.twin.held = [
            (k, o, replace(r, builds=0) if k == key else r, s, e)
            for k, o, r, s, e in self.twin.held
        ]

    @rule(key=consumes(keys))
    def free(self, key: Key) -> None:
        self.admission.free(key)
        self.admission.free(key)
        self.twin.held = [entry for entry in self.twin.held if entry[0] != key]

    @rule(target=keys, attempt=st.sampled_from("abcz"), fence=st.integers(1, 3))
    def left_over(self, attempt: str, fence: int) -> Key:
        key = (f"att-{attempt}", fence)
        if key not in self.admission.reservations:
            resources = ResourceVector(slots=1, memory_bytes=7)
            self.twin.held.append((key, "", resources, ReservationState.DEGRADED, 0))
            self.twin.ever_held.add(key)
            self.twin.seen[key[0]] = max(key[1], self.twin.seen.get(key[0], 0))
            self.admission.hold_degraded(key, resources, Runtime.DOCKER)
        else:
            self.admission.hold_degraded(key, ResourceVector(slots=9), Runtime.DOCKER)
        return key

    @rule(draining=st.booleans())
    def settings_change(self, draining: bool) -> None:
        self.facts = replace(self.facts, draining=draining)

    @rule(wait_ms=st.sampled_from([0, 1, 999, 1_000, 5_000]))
    def time_passes(self, wait_ms: int) -> None:
        self.now_ms += wait_ms

    @invariant()
    def equals_its_twin(self) -> None:
        held = self.admission.reservations
        assert [(r.key, r.offer_id, r.resources, r.state) for r in held.values()] == [
            entry[:4] for entry in self.twin.held
        ]
        for component in COMPONENTS:
            assert getattr(self.admission.used, component) == self.twin.used(component)
        for attempt, fence in self.twin.seen.items():
            assert self.admission.highest_fence(attempt) == fence
        for state in ReservationState:
            assert self.admission.count(state) == sum(e[3] is state for e in self.twin.held)

    @invariant()
    def capacity_is_never_exceeded_by_an_acceptance(self) -> None:
        left_over = [e for e in self.twin.held if e[1] == ""]
        for component in COMPONENTS:
            ceiling = getattr(CAPACITY, component)
            ceiling = MAX_INT if ceiling is None else ceiling
            extra = sum(getattr(entry[2], component) for entry in left_over)
            assert self.twin.used(component) <= ceiling + extra

    @invariant()
    def expiry_is_only_for_what_was_never_started(self) -> None:
        waiting = [e for e in self.twin.held if e[3] is ReservationState.RESERVED]
        due = tuple(e[0] for e in waiting if self.now_ms >= e[4])
        assert self.admission.expired(self.now_ms) == due
        assert self.admission.next_expiry_ms() == min((e[4] for e in waiting), default=None)


AdmissionMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAdmission = pytest.mark.requirement("B-04", "B-10", "B-21", "B-22", "B-86")(
    AdmissionMachine.TestCase
)


@pytest.mark.requirement("B-04")
def test_a_dispatch_is_taken_once_also_when_its_offer_is_long_forgotten() -> None:
    admission = Admission()
    first = offered()
    assert admission.decide(first, FACTS, 0).accepted
    for n in range(REMEMBERED_DECISIONS + 1):
        admission.decide(offered(f"x-{n}", f"x-{n}", trust_domain_id="other"), FACTS, 0)
    assert admission.decide(first, FACTS, 0).accepted
    assert len(admission.reservations) == 1
    admission.free(("a-1", 1))
    assert admission.decide(first, FACTS, 0).code is RejectionCode.STALE_FENCE
    assert not admission.reservations


@pytest.mark.requirement("B-04")
def test_what_was_answered_without_a_run_is_taken_on_by_no_late_offer() -> None:
    admission = Admission()
    admission.spend(("a-1", 2))
    assert admission.was_held(("a-1", 2))
    assert admission.decide(offered(fence=2), FACTS, 0).code is RejectionCode.STALE_FENCE
    assert admission.decide(offered("o-2", fence=3), FACTS, 0).accepted


@pytest.mark.requirement("B-04")
def test_memory_is_bounded_and_keeps_the_fences_of_what_is_held() -> None:
    admission = Admission()
    assert admission.decide(offered("o-1", "live", 9), FACTS, 0).accepted
    for n in range(REMEMBERED_ATTEMPTS + 50):
        admission.decide(offered(f"x-{n}", f"x-{n}", trust_domain_id="other"), FACTS, 0)
    assert len(admission._fences) <= REMEMBERED_ATTEMPTS + 1
    assert len(admission._decided) <= REMEMBERED_DECISIONS
    assert admission.highest_fence("live") == 9
    assert admission.highest_fence("x-0") == 0
    stale = admission.decide(offered("o-2", "live", 8), FACTS, 0)
    assert stale.code is RejectionCode.STALE_FENCE


@pytest.mark.requirement("B-04")
def test_a_higher_fence_counts_though_it_was_rejected() -> None:
    admission = Admission()
    assert not admission.decide(offered("o-1", fence=3, repository="other"), FACTS, 0).accepted
    stale = admission.decide(offered("o-2", fence=2), FACTS, 0)
    assert (stale.code, stale.detail) == (RejectionCode.STALE_FENCE, "attempt a-1 is at fence 3")
    assert admission.decide(offered("o-3", fence=3), FACTS, 0).accepted


@pytest.mark.requirement("B-04")
def test_an_offer_id_that_is_used_again_is_another_question() -> None:
    admission = Admission()
    assert admission.decide(offered("o-1", "a-1"), FACTS, 0).accepted
    assert admission.decide(offered("o-1", "a-2"), FACTS, 0).accepted
    assert set(admission.reservations) == {("a-1", 1), ("a-2", 1)}


def test_a_withdrawn_yes_is_a_no_for_every_copy() -> None:
    admission, offer = Admission(), offered()
    assert admission.decide(offer, FACTS, 0).accepted
    no = admission.withdraw(offer, RejectionCode.DISK_PRESSURE, "the disk is full")
    assert admission.used == ResourceVector()
    assert admission.decide(offer, FACTS, 0) == no


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], RejectionCode]] = [
    ({}, {"stopping": True, "draining": True}, RejectionCode.STOPPING),
    ({}, {"draining": True}, RejectionCode.DRAINING),
    ({"trust_domain_id": "other"}, {}, RejectionCode.TRUST_DOMAIN_MISMATCH),
    ({"repository": "other"}, {}, RejectionCode.UNKNOWN_REPOSITORY),
    ({"policy": Policy.HOST}, {}, RejectionCode.HOST_EXECUTION_DENIED),
    ({}, {"runtimes": frozenset()}, RejectionCode.RUNTIME_UNAVAILABLE),
    (
        {"policy": Policy.SANDBOX_REQUIRED, "approved_commit": "a" * 40},
        {"blockers": ("signatures",)},
        RejectionCode.POLICY_UNSATISFIED,
    ),
    ({"policy": Policy.SANDBOX_REQUIRED}, {}, RejectionCode.POLICY_UNSATISFIED),
    (
        {"requirements": Requirements(network_policy=NetworkPolicy.PUBLIC_ALLOWLIST)},
        {},
        RejectionCode.POLICY_UNSATISFIED,
    ),
    (
        {"requirements": Requirements(services=(Service(name=ServiceName.REDIS),))},
        {},
        RejectionCode.POLICY_UNSATISFIED,
    ),
    (
        {"requirements": Requirements(publication_mode=PublicationMode.BRIDGE_PUSH)},
        {},
        RejectionCode.POLICY_UNSATISFIED,
    ),
    ({}, {"disk_pressure": True}, RejectionCode.DISK_PRESSURE),
]


@pytest.mark.requirement("B-20", "B-51", "B-53", "B-87")
@pytest.mark.parametrize(("offer", "facts", "code"), REFUSALS)
def test_each_refusal_names_its_reason(
    offer: dict[str, Any], facts: dict[str, Any], code: RejectionCode
) -> None:
    admission = Admission()
    verdict = admission.decide(offered(**offer), replace(FACTS, **facts), 0)
    assert (verdict.code, verdict.accepted, verdict.runtime) == (code, False, None)
    assert admission.used == ResourceVector()


NOW = "2026-11-29T14:00:00.000Z"
FALLBACK = HostFallback(reason="migration", expires_at="2026-12-01T00:00:00.000Z")
WILLING = replace(
    FACTS,
    runtimes=frozenset({Runtime.HOST}),
    host_execution_allowed=True,
    host_fallback_enabled=True,
    utc=NOW,
)
"""A runner without a sandbox whose operator has said yes twice."""


@pytest.mark.requirement("B-53")
@pytest.mark.parametrize(
    ("offer", "facts", "runtime"),
    [
        ({"host_fallback": FALLBACK}, {}, Runtime.HOST),
        ({"policy": Policy.HOST}, {}, Runtime.HOST),
        ({"policy": Policy.HOST}, {"host_fallback_enabled": False, "utc": ""}, Runtime.HOST),
        ({"host_fallback": FALLBACK}, {"runtimes": FACTS.runtimes}, Runtime.DOCKER),
    ],
)
def test_the_host_is_taken_where_everybody_has_agreed_and_no_sandbox_is_there(
    offer: dict[str, Any], facts: dict[str, Any], runtime: Runtime
) -> None:
    admission, asked = Admission(), offered(**offer)
    assert admission.decide(asked, replace(WILLING, **facts), 0) == Verdict(runtime=runtime)
    assert admission.reservations["a-1", 1].runtime is runtime
    assert admission.used == DEFAULT_REQUEST
    assert admission.decide(asked, FACTS, 0) == Verdict(runtime=runtime)


@pytest.mark.requirement("B-53", "B-19")
@pytest.mark.parametrize(
    ("offer", "facts", "code"),
    [
        ({"policy": Policy.HOST}, {"host_execution_allowed": False}, "host_execution_denied"),
        ({}, {"host_execution_allowed": False}, "host_execution_denied"),
        ({}, {"host_fallback_enabled": False}, "host_fallback_denied"),
        ({}, {"utc": "2026-12-01T00:00:00.000Z"}, "host_fallback_denied"),
        ({}, {"utc": "2026-10-31T23:54:59.999Z"}, "host_fallback_denied"),
        ({}, {"utc": ""}, "host_fallback_denied"),
        ({"host_fallback": None}, {}, "runtime_unavailable"),
        ({"policy": Policy.SANDBOX_REQUIRED}, {}, "runtime_unavailable"),
        (
            {"requirements": Requirements(services=(Service(name=ServiceName.REDIS),))},
            {"services": frozenset({ServiceName.REDIS})},
            "policy_unsatisfied",
        ),
        ({}, {"publication_modes": frozenset()}, "policy_unsatisfied"),
        ({}, {"disk_pressure": True}, "disk_pressure"),
        ({}, {"draining": True}, "draining"),
        ({}, {"capacity": ResourceCapacity(slots=0)}, "capacity_slots"),
    ],
)
def test_one_no_is_enough_to_stay_off_the_host(
    offer: dict[str, Any], facts: dict[str, Any], code: str
) -> None:
    admission, asked = Admission(), offered(**{"host_fallback": FALLBACK, **offer})
    verdict = admission.decide(asked, replace(WILLING, **facts), 0)
    assert (verdict.code, verdict.runtime) == (code, None)
    assert admission.used == ResourceVector()


@pytest.mark.requirement("B-53")
@given(
    st.sampled_from([None, FALLBACK]),
    st.sampled_from([frozenset[Runtime](), WILLING.runtimes, FACTS.runtimes, frozenset(Runtime)]),
    st.booleans(),
    st.booleans(),
)
def test_sandbox_required_never_falls_back(
    fallback: HostFallback | None, runtimes: frozenset[Runtime], enabled: bool, allowed: bool
) -> None:
    facts = replace(
        WILLING,
        runtimes=runtimes,
        host_fallback_enabled=enabled,
        host_execution_allowed=allowed,
    )
    for approved_commit in (None, "a" * 40):
        asked = offered(
            policy=Policy.SANDBOX_REQUIRED,
            host_fallback=fallback,
            approved_commit=approved_commit,
        )
        verdict = Admission().decide(asked, facts, 0)
        assert verdict.runtime is not Runtime.HOST
        refusal = refuse_host(asked, facts)
        assert refusal is not None
        assert not refusal.accepted


@pytest.mark.requirement("B-39")
def test_an_open_network_is_never_sandbox_required() -> None:
    policies = frozenset(NetworkPolicy)
    open_public = Requirements(network_policy=NetworkPolicy.OPEN_PUBLIC)
    facts = replace(FACTS, network_policies=policies)
    for policy in (Policy.SANDBOX_REQUIRED, Policy.SANDBOX_PREFERRED):
        offer = offered(policy=policy, requirements=open_public, approved_commit="a" * 40)
        verdict = Admission(SubnetPool(POOL)).decide(offer, facts, 0)
        assert verdict.accepted == (policy is Policy.SANDBOX_PREFERRED)
        assert verdict.accepted or verdict.detail == "open_public"


@pytest.mark.requirement("B-19", "B-54")
def test_networks_are_promised_as_long_as_there_are_any() -> None:
    facts = replace(
        FACTS,
        network_policies=frozenset({NetworkPolicy.NONE, NetworkPolicy.PUBLIC_ALLOWLIST}),
    )
    listed = Requirements(network_policy=NetworkPolicy.PUBLIC_ALLOWLIST)
    admission = Admission(SubnetPool(POOL))
    assert admission.decide(offered("o-1", "a-1", requirements=listed), facts, 0).accepted
    refusal = admission.decide(offered("o-2", "a-2", requirements=listed), facts, 0)
    assert refusal.code is RejectionCode.CAPACITY_NETWORKS
    assert "2 asked for, 0 free" in str(refusal.detail)
    assert admission.decide(offered("o-3", "a-3"), facts, 0).accepted
    admission.transition(("a-1", 1), ReservationState.DEGRADED)
    assert admission.subnets.free == 0
    admission.free(("a-1", 1))
    admission.free(("a-1", 1))
    assert admission.subnets.free == 2
    admission.hold_degraded(("a-0", 1), ResourceVector(slots=1), Runtime.HOST)
    assert admission.reservations["a-0", 1].runtime is Runtime.HOST
    assert admission.subnets.free == 2
    admission.free(("a-0", 1))
    admission.hold_degraded(("a-4", 1), ResourceVector(slots=1), Runtime.DOCKER)
    assert admission.subnets.free == 0
    admission.free(("a-4", 1))
    assert admission.decide(offered("o-5", "a-5", requirements=listed), facts, 0).accepted


@pytest.mark.requirement("B-51")
def test_every_blocker_is_named() -> None:
    facts = replace(FACTS, blockers=("signatures", "build_egress"))
    offer = offered(policy=Policy.SANDBOX_REQUIRED)
    verdict = Admission().decide(offer, facts, 0)
    assert verdict.detail == "signatures, build_egress, approved_commit"


@given(st.lists(st.text(min_size=1, max_size=256), max_size=256), st.sampled_from(Policy))
def test_every_decision_fits_into_a_message(blockers: list[str], policy: Policy) -> None:
    for runtimes in (frozenset({Runtime.DOCKER}), frozenset[Runtime]()):
        facts = replace(FACTS, blockers=tuple(blockers), runtimes=runtimes)
        verdict = Admission().decide(offered(policy=policy), facts, 0)
        decision = SubmitOfferDecision(
            offer_id="o" * 128,
            attempt_id="a" * 128,
            fence=MAX_INT,
            runner_id="r" * 128,
            runner_instance_id="i" * 128,
            decision=Decision.ACCEPTED if verdict.accepted else Decision.REJECTED,
            runtime=verdict.runtime,
            reason_code=verdict.code,
            detail=verdict.detail,
            used_resources=ResourceVector(*[MAX_INT] * 6),
            resource_capacity=ResourceCapacity(*[MAX_INT] * 6),
        )
        assert measured_size_bytes(decision.to_wire()) <= MAX_MESSAGE_BYTES


@pytest.mark.requirement("B-21")
def test_what_an_offer_leaves_open_is_never_nothing() -> None:
    admission = Admission()
    admission.decide(offered(resources=ResourceVector()), FACTS, 0)
    assert admission.used == DEFAULT_REQUEST


@pytest.mark.requirement("B-22")
def test_what_an_image_took_to_build_is_free_once_it_is_there() -> None:
    admission = Admission()
    building = ResourceVector(slots=1, builds=1)
    assert admission.decide(offered(resources=building), FACTS, 0).accepted
    second = offered("o-2", "a-2", resources=building)
    assert admission.decide(second, FACTS, 0).code is RejectionCode.CAPACITY_BUILDS
    admission.release_builds(("a-1", 1))
    assert admission.used == replace(DEFAULT_REQUEST, builds=0)
    third = offered("o-3", "a-3", resources=building)
    assert admission.decide(third, FACTS, 0).accepted
    admission.free(("a-1", 1))
    admission.free(("a-3", 1))
    assert admission.used == ResourceVector()


@pytest.mark.requirement("B-10")
def test_sums_stay_within_what_a_heartbeat_can_carry() -> None:
    admission = Admission()
    huge = ResourceVector(slots=1, disk_bytes=MAX_INT)
    assert admission.decide(offered("o-1", "a-1", resources=huge), FACTS, 0).accepted
    second = admission.decide(offered("o-2", "a-2", resources=huge), FACTS, 0)
    assert second.code is RejectionCode.CAPACITY_DISK
    assert second.detail == f"disk_bytes: {MAX_INT} asked for, 0 free"


@pytest.mark.requirement("B-03")
def test_a_v1_dispatch_takes_one_slot_once() -> None:
    admission, facts = Admission(), replace(FACTS, host_execution_allowed=True)
    assert admission.hold_legacy("d-1", FACTS).code is RejectionCode.HOST_EXECUTION_DENIED
    assert admission.hold_legacy("d-1", facts) == Verdict(runtime=Runtime.HOST)
    assert admission.used == ResourceVector(slots=1)
    assert admission.hold_legacy("d-1", facts).code is RejectionCode.STALE_FENCE
    admission.free(("d-1", 0))
    assert admission.hold_legacy("d-1", facts).code is RejectionCode.STALE_FENCE
    draining = replace(facts, draining=True)
    assert admission.hold_legacy("d-2", draining).code is RejectionCode.DRAINING


@pytest.mark.requirement("B-25")
@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([0, 99, 100, 10_000]))))
def test_disk_pressure_has_hysteresis(readings: list[tuple[int, int]]) -> None:
    pressure, latched = DiskPressure(90, 80, 100), False
    for used_percent, free_bytes in readings:
        pressure = pressure.observe(used_percent, free_bytes)
        if used_percent > 90 or free_bytes < 100:
            latched = True
        elif used_percent < 80:
            latched = False
        assert pressure.latched is latched
