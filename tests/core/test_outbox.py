"""Which durable message goes next, against a second implementation that is only naive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core import outbox as core
from forge_core.errors import RefusedError
from forge_core.outbox import (
    MAX_ERRORS,
    MAX_IN_FLIGHT,
    RETRY_MAX_MS,
    RETRY_MIN_MS,
    Entry,
    Lane,
    Outbox,
    OutboxFull,
    entry_of,
)

pytestmark = pytest.mark.requirement("B-07", "B-83", "B-84")


def event(sequence: int, created: int, attempt_id: str = "a1") -> Entry:
    payload = {"attemptId": attempt_id, "fence": 1, "sequence": sequence}
    return entry_of(f"{attempt_id}-e{sequence}", "SubmitDispatchEvent", payload, created)


def result(revision: int, created: int, outcome: str = "succeeded") -> Entry:
    payload = {"attemptId": "a1", "fence": 1, "revision": revision, "outcome": outcome}
    return entry_of(f"a1.1.r{revision}", "SubmitDispatchResult", payload, created)


def publication(created: int) -> Entry:
    payload = {"attemptId": "a1", "fence": 1, "outcome": "pushed"}
    return entry_of("a1.1.publication", "SubmitPublication", payload, created)


def report(created: int) -> Entry:
    return entry_of(f"report-{created}", "SubmitCleanupReport", {}, created)


def filled(*entries: Entry) -> Outbox:
    outbox = Outbox()
    outbox.load(entries)
    return outbox


def ids(entries: tuple[Entry, ...]) -> list[str]:
    return [entry.id for entry in entries]


def test_reports_go_in_the_order_of_creation_32_at_a_time() -> None:
    outbox = filled(*(report(n) for n in range(100, 0, -1)))
    assert ids(outbox.take(0)) == [f"report-{n}" for n in range(1, MAX_IN_FLIGHT + 1)]
    assert outbox.take(0) == ()
    outbox.acknowledged("report-7")
    assert ids(outbox.take(0)) == ["report-33"]
    assert outbox.pending_reports == 99


def test_events_of_one_dispatch_go_by_sequence_one_after_the_other() -> None:
    outbox = filled(event(2, 10), event(1, 11), event(3, 12), event(1, 13, "a2"))
    assert ids(outbox.take(0)) == ["a1-e1", "a2-e1"]
    outbox.lost("a1-e1")
    assert ids(outbox.take(0)) == ["a1-e1"]
    outbox.acknowledged("a1-e1")
    assert ids(outbox.take(0)) == ["a1-e2"]


def test_nothing_is_sent_before_it_is_written() -> None:
    outbox = Outbox()
    outbox.add(event(1, 1))
    outbox.add(event(2, 2))
    outbox.written("a1-e2")
    assert outbox.take(0) == (), "the second waits for the first although only it is on disk"
    outbox.written("a1-e1")
    assert ids(outbox.take(0)) == ["a1-e1"]


def test_what_could_not_be_written_holds_up_nobody() -> None:
    outbox = Outbox()
    outbox.add(event(1, 1))
    outbox.add(event(2, 2))
    outbox.written("a1-e2")
    outbox.not_written("a1-e1")
    assert ids(outbox.take(0)) == ["a1-e2"]


def test_a_lost_connection_brings_everything_back_in_order() -> None:
    outbox = filled(*(report(n) for n in range(40)))
    first = outbox.take(0)
    outbox.acknowledged("report-3")
    outbox.connection_lost()
    again = outbox.take(0)
    assert ids(again) == [each for each in ids(first) if each != "report-3"] + ["report-32"]


def test_a_result_replaces_a_lower_revision_that_tells_the_same() -> None:
    outbox = filled(result(1, 1), result(2, 2))
    assert ids(outbox.take_superfluous()) == ["a1.1.r1"]
    assert outbox.take_superfluous() == ()
    assert ids(outbox.take(0)) == ["a1.1.r2"]


@pytest.mark.requirement("B-64")
def test_a_publication_goes_before_the_result_which_waits_for_its_acknowledgement() -> None:
    outbox = filled(result(1, 1), publication(2), result(2, 3))
    assert ids(outbox.take(0)) == ["a1.1.publication"]
    assert outbox.holds_result("a1", 1)
    outbox.lost("a1.1.publication")
    assert ids(outbox.take(0)) == ["a1.1.publication"]
    outbox.acknowledged("a1.1.publication")
    assert ids(outbox.take(0)) == ["a1.1.r2"]


def test_a_result_that_is_on_its_way_is_replaced_only_when_it_comes_back() -> None:
    outbox = filled(result(1, 1))
    outbox.take(0)
    outbox.add(result(2, 2))
    outbox.written("a1.1.r2")
    assert outbox.take(0) == outbox.take_superfluous() == ()
    outbox.connection_lost()
    assert ids(outbox.take_superfluous()) == ["a1.1.r1"]
    assert ids(outbox.take(0)) == ["a1.1.r2"]


def test_a_result_does_not_replace_one_before_it_is_on_disk_itself() -> None:
    outbox = filled(result(1, 1))
    outbox.add(result(2, 2))
    assert outbox.take_superfluous() == ()
    outbox.not_written("a1.1.r2")
    assert ids(outbox.take(0)) == ["a1.1.r1"]


def test_an_outcome_never_changes_so_another_one_replaces_nothing() -> None:
    outbox = filled(result(1, 1, "failed"), result(2, 2, "succeeded"))
    assert outbox.take_superfluous() == ()
    assert ids(outbox.take(0)) == ["a1.1.r1"]


def test_a_result_does_not_wait_for_an_event_on_which_the_hub_fails() -> None:
    outbox = filled(event(1, 1), event(2, 2), result(1, 3))
    assert ids(outbox.take(0)) == ["a1-e1", "a1.1.r1"]
    outbox.failed("a1-e1", 0, 0.0)
    outbox.acknowledged("a1.1.r1")
    assert outbox.take(0) == ()
    assert outbox.wake_at_ms == RETRY_MIN_MS
    assert ids(outbox.take(RETRY_MIN_MS)) == ["a1-e1"]


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1 - 2**-53])
def test_backoff_grows_and_is_bounded(jitter: float) -> None:
    outbox = filled(report(1))
    now_ms, waits_ms = 1_000_000, []
    for _ in range(40):
        assert ids(outbox.take(now_ms)) == ["report-1"]
        assert not outbox.failed("report-1", now_ms, jitter)
        assert outbox.wake_at_ms is not None
        waits_ms.append(outbox.wake_at_ms - now_ms)
        assert outbox.take(outbox.wake_at_ms - 1) == ()
        now_ms = outbox.wake_at_ms
    assert waits_ms == sorted(waits_ms)
    assert RETRY_MIN_MS <= min(waits_ms) <= max(waits_ms) <= RETRY_MAX_MS
    assert max(waits_ms) >= RETRY_MIN_MS + (RETRY_MAX_MS - RETRY_MIN_MS) * jitter * 0.99


def test_a_backoff_outlasts_the_connection() -> None:
    outbox = filled(report(1))
    outbox.take(0)
    outbox.failed("report-1", 0, 0.0)
    outbox.connection_lost()
    assert outbox.take(RETRY_MIN_MS - 1) == ()


def test_what_meets_nothing_but_errors_is_set_aside_in_the_end() -> None:
    outbox = filled(event(1, 1), event(2, 2))
    now_ms = 0
    for n in range(MAX_ERRORS):
        outbox.take(now_ms)
        assert outbox.failed("a1-e1", now_ms, 0.5) == (n == MAX_ERRORS - 1)
        now_ms += RETRY_MAX_MS
    assert ids(outbox.take(now_ms)) == ["a1-e2"]


def test_events_yield_first_and_outcomes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_BACKLOG", 3)
    monkeypatch.setattr(core, "OUTCOME_RESERVE", 2)
    outbox = filled(*(event(n, n) for n in (1, 2, 3)))
    assert outbox.is_full
    with pytest.raises(OutboxFull):
        outbox.add(event(4, 4))
    outbox.add(result(1, 5))
    outbox.add(report(6))
    with pytest.raises(OutboxFull):
        outbox.add(report(7))
    assert len(outbox) == 5
    outbox.take(0)
    outbox.acknowledged("a1-e1")
    outbox.add(report(7))


def test_more_than_the_bound_on_disk_is_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_BACKLOG", 1)
    monkeypatch.setattr(core, "OUTCOME_RESERVE", 0)
    assert len(filled(report(1), report(2)).take(0)) == 2


def test_the_order_of_creation_survives_a_wall_clock_that_steps_back() -> None:
    outbox = filled(report(20261129140000000))
    assert outbox.next_created(20261128140000000) == 20261129140000001
    assert outbox.next_created(20261130140000000) == 20261130140000000


def test_a_message_that_is_twice_on_disk_is_sent_once() -> None:
    outbox = filled(result(1, 1), result(1, 2))
    assert [entry.created for entry in outbox.take_superfluous()] == [2]
    assert [entry.created for entry in outbox.take(0)] == [1]


@pytest.mark.parametrize(
    ("message_id", "method", "payload"),
    [
        ("e1", "Heartbeat", {}),
        ("../e1", "SubmitCleanupReport", {}),
        ("", "SubmitCleanupReport", {}),
        ("e1", "SubmitDispatchEvent", {"attemptId": "a", "fence": 1}),
        ("e1", "SubmitDispatchEvent", {"attemptId": "a", "fence": "x", "sequence": 1}),
        ("e1", "SubmitDispatchResult", {"attemptId": "a", "fence": 1, "revision": 1}),
    ],
)
def test_only_messages_that_are_replayed_are_kept(
    message_id: str, method: str, payload: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError) as refused:
        entry_of(message_id, method, payload, 1)
    assert refused.value.code == "malformed"


@dataclass
class Naive:
    """What is known of an entry, without any index."""

    entry: Entry
    state: str = "writing"
    errors: int = 0
    retry_at_ms: int = 0


class Twin:
    """The same rules, by looking at everything each time."""

    def __init__(self) -> None:
        self.all: list[Naive] = []

    def one(self, message_id: str) -> Naive:
        (found,) = [each for each in self.all if each.entry.id == message_id]
        return found

    def lane(self, lane: Lane) -> list[Naive]:
        members = [each for each in self.all if each.entry.lane == lane]
        return sorted(members, key=lambda each: (each.entry.position, each.entry.created))

    def supersede(self) -> list[str]:
        gone = []
        for each in list(self.all):
            if each.entry.verdict is None or each.state != "waiting":
                continue
            assert each.entry.lane is not None
            durable = [other for other in self.lane(each.entry.lane) if other.state != "writing"]
            last = durable[-1]
            if last is not each and last.entry.verdict == each.entry.verdict:
                gone.append(each.entry.id)
                self.all.remove(each)
        return gone

    def may_go(self, each: Naive, now_ms: int) -> bool:
        if each.state != "waiting" or each.retry_at_ms > now_ms:
            return False
        if each.entry.lane is None:
            return True
        lane = self.lane(each.entry.lane)
        return lane[0] is each and all(other.state != "in flight" for other in lane)

    def take(self, now_ms: int) -> list[str]:
        going = [each for each in self.all if self.may_go(each, now_ms)]
        room = core.MAX_IN_FLIGHT - sum(each.state == "in flight" for each in self.all)
        taken = sorted(going, key=lambda each: each.entry.created)[:room]
        for each in taken:
            each.state = "in flight"
        return [each.entry.id for each in taken]


@settings(max_examples=200)
@given(st.data())
def test_it_does_what_its_naive_twin_does(data: st.DataObject) -> None:
    outbox, twin = Outbox(), Twin()
    now_ms, created, used = 0, 0, set[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "MAX_IN_FLIGHT", 3)
        for _ in range(data.draw(st.integers(1, 40))):
            in_flight = [each.entry.id for each in twin.all if each.state == "in flight"]
            writing = [each.entry.id for each in twin.all if each.state == "writing"]
            operations = ["add", "wait", "cut"]
            operations += ["ack", "lost", "failed"] * bool(in_flight)
            operations += ["written", "written", "not_written"] * bool(writing)
            match data.draw(st.sampled_from(operations)):
                case "add":
                    created += 1
                    number = data.draw(st.integers(1, 6))
                    entry = data.draw(
                        st.sampled_from(
                            [
                                event(number, created),
                                event(number, created, "a2"),
                                result(number, created, data.draw(st.sampled_from("ab"))),
                                report(created),
                            ]
                        )
                    )
                    if entry.id not in used:
                        used.add(entry.id)
                        outbox.add(entry)
                        twin.all.append(Naive(entry))
                case "written":
                    which = data.draw(st.sampled_from(writing))
                    outbox.written(which)
                    twin.one(which).state = "waiting"
                case "not_written":
                    which = data.draw(st.sampled_from(writing))
                    outbox.not_written(which)
                    twin.all.remove(twin.one(which))
                case "ack":
                    which = data.draw(st.sampled_from(in_flight))
                    outbox.acknowledged(which)
                    twin.all.remove(twin.one(which))
                case "lost":
                    which = data.draw(st.sampled_from(in_flight))
                    outbox.lost(which)
                    twin.one(which).state = "waiting"
                case "failed":
                    which = data.draw(st.sampled_from(in_flight))
                    each = twin.one(which)
                    assert not outbox.failed(which, now_ms, 0.0)
                    each.state, each.retry_at_ms = "waiting", now_ms + RETRY_MIN_MS
                case "cut":
                    outbox.connection_lost()
                    for each in twin.all:
                        each.state = "waiting" if each.state == "in flight" else each.state
                case "wait":
                    now_ms += data.draw(st.sampled_from([1, RETRY_MIN_MS]))
            assert sorted(ids(outbox.take_superfluous())) == sorted(twin.supersede())
            if data.draw(st.booleans()):
                assert ids(outbox.take(now_ms)) == twin.take(now_ms)
            assert len(outbox) == len(twin.all)
            assert {each.entry.id for each in twin.all} == {m for m in used if m in outbox}
