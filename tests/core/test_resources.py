"""Weighted resource vectors: exact arithmetic, and nothing else than counts gets in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.resources import (
    COMPONENTS,
    ResourceCapacity,
    ResourceVector,
    can_reserve_sandbox_resources,
    exceeded_component,
)
from forge_core.wire.base import MAX_INT

counts = st.one_of(st.integers(0, 8), st.integers(0, MAX_INT), st.sampled_from([MAX_INT]))
vectors = st.builds(ResourceVector, *[counts for _ in COMPONENTS])
capacities = st.builds(ResourceCapacity, counts, *[st.none() | counts for _ in COMPONENTS[1:]])
NO_COUNTS: list[Any] = [-1, MAX_INT + 1, True, False, 1.0, float("nan"), "1", None, [1]]


@pytest.mark.requirement("B-10", "B-21", "B-22")
@given(vectors, vectors, capacities)
def test_every_component_weighs_exactly(
    used: ResourceVector, requested: ResourceVector, capacity: ResourceCapacity
) -> None:
    too_much = [
        name
        for name in COMPONENTS
        if getattr(used, name) + getattr(requested, name)
        > (MAX_INT if getattr(capacity, name) is None else getattr(capacity, name))
    ]
    assert can_reserve_sandbox_resources(used, requested, capacity) is not bool(too_much)
    assert exceeded_component(used, requested, capacity) == next(iter(too_much), None)


@pytest.mark.requirement("B-10")
def test_the_last_unit_fits_and_the_next_does_not() -> None:
    capacity = ResourceCapacity(slots=MAX_INT)
    used = ResourceVector(slots=MAX_INT - 1)
    assert can_reserve_sandbox_resources(used, ResourceVector(slots=1), capacity)
    assert not can_reserve_sandbox_resources(used, ResourceVector(slots=2), capacity)


@pytest.mark.requirement("B-10")
def test_no_ceiling_is_not_a_way_past_what_a_message_can_carry() -> None:
    half = ResourceVector(slots=1, memory_bytes=MAX_INT)
    capacity = ResourceCapacity(slots=8)
    assert can_reserve_sandbox_resources(ResourceVector(), half, capacity)
    assert exceeded_component(half, half, capacity) == "memory_bytes"


@pytest.mark.requirement("B-10")
@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("value", NO_COUNTS)
def test_what_is_no_count_is_refused_by_name(component: str, value: Any) -> None:
    good, room = ResourceVector(slots=1), ResourceCapacity(slots=1)
    calls = [
        (replace(good, **{component: value}), good, room),
        (good, replace(good, **{component: value}), room),
    ]
    if value is not None or component == "slots":
        calls.append((good, good, replace(room, **{component: value})))
    for used, requested, capacity in calls:
        with pytest.raises(RefusedError, match=component) as refused:
            can_reserve_sandbox_resources(used, requested, capacity)
        assert (refused.value.code, refused.value.field) == ("malformed", component)


@given(vectors, vectors)
def test_what_is_added_can_be_taken_away(one: ResourceVector, other: ResourceVector) -> None:
    assert one + other == other + one
    assert one + other - other == one
