"""A dispatch read back from its ledger, and what is refused there."""

from __future__ import annotations

from typing import Any

import pytest
from attempt_parts import OWNER, RESOURCES, now_at, removed, run, started, stored
from hypothesis import given
from hypothesis import strategies as st

from forge_core import attempt as core
from forge_core.attempt import Phase
from forge_core.attempt_events import (
    AgentEnded,
    OutputAccepted,
    Published,
    PushIntended,
    ResourceCreated,
    ResourceIntended,
    ResourcesRemoved,
    StageEntered,
    StagesEnded,
)
from forge_core.errors import RefusedError
from forge_core.ports import ImportedOutput
from forge_core.ready import Record, RecordKind, messages_of
from forge_core.recovery import restore
from forge_core.teardown import removal_plan
from forge_core.wire.codes import (
    CleanupTrigger,
    FailureCode,
    PublicationOutcome,
    RemovalOutcome,
    ResourceKind,
    Runtime,
    Stage,
)


def whole_life() -> list[Record]:
    attempt, ready = core.reserve(OWNER, "offer-1", RESOURCES, now_at(0))
    records = list(ready.records)
    trigger = CleanupTrigger.TEARDOWN
    _, all_ready = run(
        attempt,
        started(0),
        StageEntered(Stage.AGENT),
        ResourceIntended(ResourceKind.CONTAINER, "forge-agent-1", "agent"),
        ResourceCreated(ResourceKind.CONTAINER, "4f1d", "forge-agent-1", "agent"),
        AgentEnded(exit_code=0),
        OutputAccepted(ImportedOutput("c" * 40, 1, 10)),
        PushIntended("main", "c" * 40),
        Published("main", "c" * 40, PublicationOutcome.PUSHED),
        StagesEnded(),
        ResourcesRemoved(trigger, (removed(RemovalOutcome.FAILED, "busy"),)),
        ResourcesRemoved(trigger, (removed(RemovalOutcome.REMOVED),)),
    )
    return stored([*records, *(record for ready in all_ready for record in ready.records)])


LIFE = whole_life()


def remains(cleanup_id: str) -> list[Record]:
    """The ledger of a dispatch of which only a container was found, which resisted at first."""
    found = ResourceCreated(ResourceKind.CONTAINER, "4f1d", "forge-agent-1", "agent")
    attempt, ready = core.orphaned(OWNER, cleanup_id, [found])
    trigger = CleanupTrigger.STARTUP
    _, all_ready = run(
        attempt,
        ResourcesRemoved(trigger, (removed(RemovalOutcome.FAILED, "busy"),)),
        ResourcesRemoved(trigger, (removed(RemovalOutcome.REMOVED),)),
    )
    return stored([*ready.records, *(r for ready in all_ready for r in ready.records)])


REMAINS = remains("cleanup-1")


def test_every_kind_of_record_is_in_what_is_tried_here() -> None:
    assert {record.kind for record in (*LIFE, *REMAINS)} == set(RecordKind)


@pytest.mark.requirement("B-82", "B-83")
@pytest.mark.parametrize("count", range(1, len(REMAINS) + 1))
def test_what_was_found_without_a_ledger_is_removed_and_reported_and_nothing_else(
    count: int,
) -> None:
    attempt, resources = restore(REMAINS[:count])
    assert (attempt.owner, attempt.cleanup_id, resources) == (OWNER, "cleanup-1", None)
    released = REMAINS[count - 1].kind is RecordKind.RELEASED
    if released:
        assert attempt.phase is Phase.ENDED
        return
    gone = removed(RemovalOutcome.ABSENT)
    attempt, ready = core.step(
        attempt, ResourcesRemoved(CleanupTrigger.STARTUP, (gone,)), now_at(9)
    )
    assert attempt.phase is Phase.ENDED
    (message,) = ready.messages
    assert message.method == "SubmitCleanupReport"
    told, ids = ([m.id for m in messages_of(records)] for records in (REMAINS[:count], REMAINS))
    # What a crash kept from being recorded comes again under the id that it had.
    assert message.id not in told
    assert len(told) == len(ids) or message.id == ids[len(told)]


@pytest.mark.requirement("B-83")
def test_no_two_reports_of_one_dispatch_have_one_id() -> None:
    reports = [m.id for m in messages_of(LIFE) if m.method == "SubmitCleanupReport"]
    for number in range(2):
        reports += [m.id for m in messages_of(remains(f"cleanup-{number}"))]
    assert len(reports) == len(set(reports)) == 6


@pytest.mark.requirement("B-82")
@pytest.mark.parametrize("count", range(1, len(LIFE) + 1))
def test_every_beginning_of_a_ledger_can_be_restored(count: int) -> None:
    attempt, resources = restore(LIFE[:count])
    assert (attempt.owner, resources) == (OWNER, RESOURCES)
    kinds = [record.kind for record in LIFE[:count]]
    assert (attempt.phase is Phase.ENDED) == (RecordKind.RELEASED in kinds)
    assert (attempt.revision > 0) == (RecordKind.RESULT in kinds)


@pytest.mark.requirement("B-82")
def test_what_the_agent_did_is_not_lost_with_the_process() -> None:
    upto = next(n for n, r in enumerate(LIFE) if r.data.get("type") == "teardown.started")
    attempt, _ = restore(LIFE[:upto])
    assert (attempt.phase, attempt.exit_code) == (Phase.RUNNING, 0)
    assert attempt.result_commit == "c" * 40


@pytest.mark.requirement("B-63", "B-64")
def test_a_push_whose_end_was_not_recorded_is_told_as_unknown_before_the_result() -> None:
    upto = next(n for n, r in enumerate(LIFE) if r.kind is RecordKind.PUBLICATION)
    attempt, _ = restore(LIFE[:upto])
    ended = StagesEnded(FailureCode.BRIDGE_STOPPED)
    _, ready = core.step(attempt, ended, now_at(9))
    told = [m for m in ready.messages if m.method != "SubmitDispatchEvent"]
    assert [m.method for m in told] == ["SubmitPublication", "SubmitDispatchResult"]
    publication = told[0].payload
    assert (publication["outcome"], publication["branch"]) == ("unknown", "main")
    assert publication["resultCommit"] == "c" * 40
    attempt, _ = restore(LIFE[: upto + 1])
    _, ready = core.step(attempt, ended, now_at(9))
    assert "SubmitPublication" not in {m.method for m in ready.messages}
    (known,) = [m for m in messages_of(LIFE[: upto + 1]) if m.method == "SubmitPublication"]
    assert known.id == told[0].id


@pytest.mark.requirement("B-53", "B-82")
@pytest.mark.parametrize("runtime", Runtime)
def test_where_it_ran_decides_who_is_asked_to_give_it_up(runtime: Runtime) -> None:
    begun = core.reserve(OWNER, "offer-1", RESOURCES, now_at(0), runtime)
    found = core.orphaned(OWNER, "cleanup-1", (), runtime)
    for attempt, ready in (begun, found):
        assert attempt.runtime is runtime
        assert restore(stored(ready.records))[0].runtime is runtime


@pytest.mark.requirement("B-83")
def test_the_messages_of_a_ledger_are_the_same_when_they_are_made_again() -> None:
    assert [m.id for m in messages_of(LIFE)] == [m.id for m in messages_of(whole_life())]


@pytest.mark.parametrize(
    "records",
    [[], LIFE[1:], [LIFE[0], *LIFE], REMAINS[1:], [LIFE[0], *REMAINS], [REMAINS[0], *LIFE]],
)
def test_a_ledger_begins_once(records: list[Record]) -> None:
    with pytest.raises(RefusedError) as refused:
        restore(records)
    assert refused.value.code == "ledger_suspect"


PROPERTIES = [
    (ledger, n, name)
    for ledger in (LIFE, REMAINS)
    for n, record in enumerate(ledger)
    for name in record.data
]


@pytest.mark.parametrize(("ledger", "line", "name"), PROPERTIES)
def test_a_record_that_lacks_something_is_refused_or_does_without(
    ledger: list[Record], line: int, name: str
) -> None:
    data = {key: value for key, value in ledger[line].data.items() if key != name}
    outcome = restored([*ledger[:line], Record(ledger[line].kind, data), *ledger[line + 1 :]])
    assert outcome == "ledger_suspect" or name in {
        "exitCode",
        "failureCode",
        "resultCommit",
        "summary",
        "timings",
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@given(st.sampled_from(PROPERTIES), json_values)
def test_no_value_in_a_ledger_makes_a_start_fail(
    place: tuple[list[Record], int, str], value: Any
) -> None:
    ledger, line, name = place
    bad = Record(ledger[line].kind, {**ledger[line].data, name: value})
    restored([*ledger[:line], bad, *ledger[line + 1 :]])


def restored(records: list[Record]) -> str:
    """Whether it can be restored; what can be can be torn down and told."""
    try:
        attempt, _ = restore(records)
    except RefusedError as error:
        return error.code
    removal_plan(records, ())
    messages_of(records)
    return str(attempt.phase)
