"""Whose is it? A pass removes what has ended and never touches what is somebody else's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.admission import Key, Reservation
from forge_core.labels import BUILDER, PREFLIGHT, TOOLING, Owner, build_cache
from forge_core.ports import EngineResource
from forge_core.reap import Claim, claim_of
from forge_core.resources import ResourceVector
from forge_core.wire.codes import ReservationState, ResourceKind

OWNER = Owner("runner-1", "instance-1", "att-1", 7, "project-1", "domain-1")
KEY: Key = ("att-1", 7)


def resource(owner: Owner = OWNER, role: str = "agent", **labels: str) -> EngineResource:
    found = {**owner.labels(role), **labels}
    return EngineResource(ResourceKind.CONTAINER, "c1", owner.name(role), found, "")


def claim(
    found: EngineResource, state: ReservationState | None = None
) -> tuple[Claim, Owner | None]:
    reservations = {}
    if state is not None:
        reservations[KEY] = Reservation(KEY, "o-1", ResourceVector(slots=1), state, 0)
    return claim_of(
        found, runner_id="runner-1", runner_instance_id="instance-1", reservations=reservations
    )


@pytest.mark.requirement("B-80", "B-86")
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (None, Claim.ENDED),
        (ReservationState.RESERVED, Claim.LIVE),
        (ReservationState.STARTING, Claim.LIVE),
        (ReservationState.ACTIVE, Claim.LIVE),
        (ReservationState.RELEASING, Claim.LIVE),
        (ReservationState.DEGRADED, Claim.ENDED),
    ],
)
def test_of_this_instance(state: ReservationState | None, expected: Claim) -> None:
    assert claim(resource(), state) == (expected, OWNER)


@pytest.mark.parametrize("purpose", [TOOLING, BUILDER])
def test_what_a_runner_works_with_lives_as_long_as_its_instance(purpose: str) -> None:
    mine = Owner.of_runner(purpose, "runner-1", "instance-1", "domain-1")
    assert claim(resource(mine, role=purpose)) == (Claim.LIVE, mine)
    old = replace(mine, runner_instance_id="instance-0")
    assert claim(resource(old, role=purpose)) == (Claim.OLD_INSTANCE, old)
    probe = Owner.of_runner(PREFLIGHT, "runner-1", "instance-1", "domain-1")
    assert claim(resource(probe, role="helper")) == (Claim.ENDED, probe)


@pytest.mark.parametrize("purpose", [PREFLIGHT, TOOLING, BUILDER])
def test_no_dispatch_passes_for_what_the_runner_works_with(purpose: str) -> None:
    posing = replace(OWNER, attempt_id=purpose, project_id=purpose, fence=1)
    assert claim(resource(posing, role=purpose)) == (Claim.ENDED, posing)


def test_the_build_cache_outlives_every_instance() -> None:
    name, labels = build_cache("runner-1", "domain-1")
    volume = EngineResource(ResourceKind.VOLUME, name, name, labels, "")
    assert claim(volume) == (Claim.FOREIGN, None)
    assert build_cache("runner-1", "domain-2")[0] != name != build_cache("runner-2", "domain-1")[0]


@pytest.mark.requirement("B-82")
@pytest.mark.parametrize("state", [None, *ReservationState])
def test_an_old_instance_is_never_adopted(state: ReservationState | None) -> None:
    old = replace(OWNER, runner_instance_id="instance-0")
    assert claim(resource(old), state) == (Claim.OLD_INSTANCE, old)


@pytest.mark.requirement("B-80")
def test_another_fence_of_a_live_attempt_has_ended() -> None:
    other = replace(OWNER, fence=6)
    assert claim(resource(other), ReservationState.ACTIVE) == (Claim.ENDED, other)


@pytest.mark.requirement("B-80")
@given(st.dictionaries(st.sampled_from(sorted(OWNER.labels("agent"))), st.text(max_size=6)))
def test_changed_labels_are_never_ours(changes: dict[str, str]) -> None:
    found = resource(OWNER, "agent", **changes)
    if found.labels == OWNER.labels("agent"):
        return
    assert claim(found) in ((Claim.FOREIGN, None), (Claim.DISAGREES, None))


@pytest.mark.requirement("B-80")
@pytest.mark.parametrize(
    ("owner", "role"),
    [
        (replace(OWNER, attempt_id="not an id"), "agent"),
        (replace(OWNER, attempt_id="a\n"), "agent"),
        (replace(OWNER, attempt_id="../x"), "agent"),
        (replace(OWNER, fence=0), "agent"),
        (replace(OWNER, fence=2**63), "agent"),
        (OWNER, ""),
        (OWNER, "a" * 65),
        (OWNER, "a b"),
    ],
)
def test_what_we_could_not_have_written_is_not_ours_though_its_name_agrees(
    owner: Owner, role: str
) -> None:
    assert claim(resource(owner, role))[0] in (Claim.FOREIGN, Claim.DISAGREES)
    assert claim(resource(owner, role))[1] is None


@pytest.mark.requirement("B-80")
def test_another_runners_resources_are_foreign() -> None:
    assert claim(resource(replace(OWNER, runner_id="runner-2"))) == (Claim.FOREIGN, None)
