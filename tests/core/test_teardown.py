"""What is removed, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.labels import Owner
from forge_core.ports import EngineResource
from forge_core.ready import Record, RecordKind
from forge_core.teardown import REMOVAL_ORDER, Removal, removal_plan
from forge_core.wire.codes import ResourceKind

OWNER = Owner("runner-1", "instance-1", "att-1", 7, "project-1", "domain-1")
CONTAINER, NETWORK, VOLUME = ResourceKind.CONTAINER, ResourceKind.NETWORK, ResourceKind.VOLUME


def intent(kind: ResourceKind, role: str) -> Record:
    data = {"kind": kind.value, "name": OWNER.name(role), "role": role}
    return Record(RecordKind.INTENT, data)


def fact(kind: ResourceKind, role: str, identity: str) -> Record:
    return Record(RecordKind.FACT, {**intent(kind, role).data, "id": identity})


def listed(kind: ResourceKind, role: str, identity: str, **changes: str) -> EngineResource:
    labels = {**OWNER.labels(role), **changes}
    return EngineResource(kind, identity, OWNER.name(role), labels, "2026-11-29T14:00:00.000Z")


def removal(kind: ResourceKind, role: str, identity: str) -> Removal:
    return Removal(kind, identity, OWNER.name(role), role)


@pytest.mark.requirement("B-80")
def test_an_intent_is_removed_by_its_name_and_a_fact_by_its_id() -> None:
    records = [
        intent(VOLUME, "workspace"),
        intent(CONTAINER, "agent"),
        fact(CONTAINER, "agent", "c1"),
    ]
    assert removal_plan(records, ()) == (
        removal(CONTAINER, "agent", "c1"),
        removal(VOLUME, "workspace", OWNER.name("workspace")),
    )


@pytest.mark.requirement("B-80")
def test_what_the_engine_lists_wins_over_what_was_recorded() -> None:
    records = [intent(CONTAINER, "agent"), fact(CONTAINER, "agent", "c1")]
    plan = removal_plan(records, [listed(CONTAINER, "agent", "c2")])
    assert plan == (removal(CONTAINER, "agent", "c2"),)


@pytest.mark.requirement("B-80")
def test_networks_that_share_a_name_are_all_removed() -> None:
    two = [listed(NETWORK, "agent-network", "n2"), listed(NETWORK, "agent-network", "n1")]
    assert removal_plan([intent(NETWORK, "agent-network")], two) == (
        removal(NETWORK, "agent-network", "n1"),
        removal(NETWORK, "agent-network", "n2"),
    )


@pytest.mark.requirement("B-80")
def test_labels_alone_justify_no_removal() -> None:
    foreign = EngineResource(CONTAINER, "c9", "their-database", OWNER.labels("agent"), "")
    assert removal_plan((), [foreign]) == ()


def test_nothing_recorded_and_nothing_listed_is_nothing_to_do() -> None:
    assert removal_plan((), ()) == ()


kinds_and_roles = st.lists(
    st.tuples(st.sampled_from(ResourceKind), st.sampled_from(["agent", "helper", "db"]))
)


@pytest.mark.requirement("B-80")
@given(kinds_and_roles, kinds_and_roles)
def test_everything_once_and_containers_first(
    recorded: list[tuple[ResourceKind, str]], seen: list[tuple[ResourceKind, str]]
) -> None:
    records = [intent(kind, role) for kind, role in recorded]
    resources = [listed(kind, role, f"{kind}-{role}") for kind, role in seen]
    plan = removal_plan(records, resources)
    assert plan == removal_plan(reversed(records), reversed(resources))
    assert {(r.kind, r.role) for r in plan} == set(recorded) | set(seen)
    assert len({(r.kind, r.name) for r in plan}) == len(plan)
    order = [REMOVAL_ORDER.index(r.kind) for r in plan]
    assert order == sorted(order)
