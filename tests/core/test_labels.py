"""Ownership of what the engine holds: labels and the name derived from them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.labels import (
    ATTEMPT_ID,
    FENCE,
    MANAGED,
    ROLE,
    RUNNER_ID,
    Owner,
    attempt_filter,
    is_ours,
    name_from_labels,
    runner_filter,
)

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}", fullmatch=True)
owners = st.builds(Owner, ids, ids, ids, st.integers(1, 2**63 - 1), ids, ids)
OWNER = Owner("runner-1", "instance-1", "attempt-1", 7, "project-1", "domain-1")


@pytest.mark.requirement("B-84")
def test_labels_are_exactly_those_of_the_design() -> None:
    assert OWNER.labels("agent") == {
        "dev.forge.managed": "bridge",
        "dev.forge.runner-id": "runner-1",
        "dev.forge.runner-instance-id": "instance-1",
        "dev.forge.attempt-id": "attempt-1",
        "dev.forge.fence": "7",
        "dev.forge.role": "agent",
        "dev.forge.project-id": "project-1",
        "dev.forge.trust-domain-id": "domain-1",
    }


@given(owners)
def test_labels_read_back_to_the_same_owner(owner: Owner) -> None:
    assert Owner.from_labels(owner.labels("agent")) == owner


@given(owners, st.sampled_from(["agent", "helper", "agent-network"]))
def test_a_name_is_one_the_engine_takes_and_says_its_role(owner: Owner, role: str) -> None:
    name = owner.name(role)
    assert re.fullmatch(rf"forge-{role}-[0-9a-f]{{24}}", name)
    assert is_ours(name, owner.labels(role))


@given(owners, owners)
def test_different_owners_have_different_names(one: Owner, other: Owner) -> None:
    assert (one == other) == (one.name("agent") == other.name("agent"))


def test_values_that_run_together_do_not_share_a_name() -> None:
    labels = OWNER.labels("agent")
    one = {**labels, RUNNER_ID: "a\0b", "dev.forge.runner-instance-id": "c"}
    other = {**labels, RUNNER_ID: "a", "dev.forge.runner-instance-id": "b\0c"}
    assert name_from_labels(one) != name_from_labels(other)


@pytest.mark.parametrize(
    "fence", ["", "0", "0x7", "07", "+7", "-7", "7.0", "\u0667", " 7", "9" * 5000]
)
def test_an_ill_formed_fence_is_nobodys(fence: str) -> None:
    assert Owner.from_labels({**OWNER.labels("agent"), FENCE: fence}) is None


@pytest.mark.requirement("B-84")
@pytest.mark.parametrize("missing", sorted(OWNER.labels("agent")))
def test_a_missing_label_makes_it_somebody_elses(missing: str) -> None:
    labels = OWNER.labels("agent")
    del labels[missing]
    assert not is_ours(OWNER.name("agent"), labels)


@pytest.mark.requirement("B-84")
def test_labels_without_the_name_prove_nothing() -> None:
    labels = OWNER.labels("agent")
    assert not is_ours("somebodys-container", labels)
    assert not is_ours(OWNER.name("helper"), labels)
    assert not is_ours(OWNER.name("agent"), {**labels, ATTEMPT_ID: "attempt-2"})
    assert not is_ours(OWNER.name("agent"), {**labels, MANAGED: "executor"})


def test_filters_select_a_runner_and_one_dispatch() -> None:
    labels = OWNER.labels("agent")
    assert runner_filter("runner-1").items() <= labels.items()
    assert attempt_filter(OWNER).items() <= labels.items()
    assert ROLE not in attempt_filter(OWNER)
    assert attempt_filter(OWNER)[FENCE] == "7"
