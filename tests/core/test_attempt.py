"""One dispatch, event by event: which is allowed when, and what it leads to."""

from __future__ import annotations

from typing import Any

import pytest
from attempt_parts import (
    OWNER,
    RESOURCES,
    now_at,
    removed,
    renewal,
    require_sendable,
    run,
    started,
)

from forge_core import attempt as core
from forge_core.attempt import Attempt, Phase
from forge_core.attempt_events import (
    AgentEnded,
    AgentStarted,
    DegradeReservation,
    EndRequested,
    Event,
    Happened,
    OutputAccepted,
    OutputSeen,
    RenewalArrived,
    ResourceCreated,
    ResourceIntended,
    ResourcesRemoved,
    StageEntered,
    StagesEnded,
    StopStages,
    Tick,
)
from forge_core.ledger import encode_body
from forge_core.ports import ImportedOutput
from forge_core.ready import Ready, RecordKind
from forge_core.wire.codes import (
    CleanupTrigger,
    EventType,
    FailureCode,
    OutputStream,
    RemovalOutcome,
    ResourceKind,
    Stage,
)
from forge_core.wire.events import (
    EMPTY,
    Log,
    SecretsRedeemed,
    Warning_,
)

TEARDOWN = CleanupTrigger.TEARDOWN


def reserved() -> Attempt:
    return core.reserve(OWNER, "offer-1", RESOURCES, now_at(0))[0]


def in_phase(phase: Phase) -> Attempt:
    """A dispatch that got there the shortest way."""
    attempt = reserved()
    if phase is Phase.RESERVED:
        return attempt
    outcome = RemovalOutcome.FAILED if phase is Phase.DEGRADED else RemovalOutcome.REMOVED
    path: list[Event] = [started(0), StagesEnded(), ResourcesRemoved(TEARDOWN, (removed(outcome),))]
    lengths = {Phase.RUNNING: 1, Phase.ENDING: 2}
    return run(attempt, *path[: lengths.get(phase, 3)])[0]


ALLOWED: dict[type[Any], set[Phase]] = {
    StagesEnded: {Phase.RUNNING},
    StageEntered: {Phase.RUNNING},
    ResourceIntended: {Phase.RUNNING},
    ResourceCreated: {Phase.RUNNING, Phase.ENDING, Phase.DEGRADED},
    AgentStarted: {Phase.RUNNING},
    AgentEnded: {Phase.RUNNING},
    OutputAccepted: {Phase.RUNNING},
    Happened: set(Phase) - {Phase.RESERVED},
    OutputSeen: set(Phase) - {Phase.RESERVED},
    Tick: set(Phase),
    EndRequested: set(Phase),
    RenewalArrived: set(Phase),
    ResourcesRemoved: {Phase.ENDING, Phase.DEGRADED},
}
EXAMPLES: list[Event] = [
    StagesEnded(),
    StageEntered(Stage.AGENT),
    ResourceIntended(ResourceKind.VOLUME, "v", "workspace"),
    ResourceCreated(ResourceKind.VOLUME, "v", "v", "workspace"),
    AgentStarted(),
    AgentEnded(exit_code=0),
    OutputAccepted(ImportedOutput(None, 0, 0)),
    Happened(EventType.BUILD_STARTED),
    OutputSeen(),
    Tick(),
    EndRequested(FailureCode.CANCELLED),
    RenewalArrived(renewal(1), 0),
    ResourcesRemoved(TEARDOWN, ()),
]


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_every_pair_is_a_step_or_an_assertion(phase: Phase, event: Event) -> None:
    attempt = in_phase(phase)
    assert attempt.phase is phase
    if phase in ALLOWED[type(event)]:
        core.step(attempt, event, now_at(1))
    else:
        with pytest.raises(AssertionError, match=f"in phase {phase}"):
            core.step(attempt, event, now_at(1))


@pytest.mark.requirement("B-71", "B-72")
@pytest.mark.parametrize(
    ("events", "at_ms", "code"),
    [
        ([], 10_000, FailureCode.LEASE_EXPIRED),
        ([AgentStarted()], 5_000, FailureCode.IDLE_EXPIRED),
        (
            [AgentStarted(), *[x for _ in range(5) for x in (OutputSeen(),)]],
            30_000,
            FailureCode.HARD_WALL_EXPIRED,
        ),
    ],
)
def test_the_three_deadlines_end_it_with_three_codes(
    events: list[Event], at_ms: int, code: FailureCode
) -> None:
    attempt, _ = run(reserved(), started(0, ttl_ms=60_000 if events else 10_000), *events)
    if code is FailureCode.HARD_WALL_EXPIRED:
        for spoken_ms in range(4_000, 30_000, 4_000):
            attempt, _ = run(attempt, OutputSeen(), at_ms=spoken_ms)
    assert core.next_wake_ms(attempt) == at_ms
    early, (nothing,) = run(attempt, Tick(), at_ms=at_ms - 1)
    assert (early, nothing) == (attempt, Ready())
    ended, (ready,) = run(attempt, Tick(), at_ms=at_ms)
    assert (ended.failure, ready.actions) == (code, (StopStages(),))


@pytest.mark.requirement("B-71")
@pytest.mark.parametrize(
    "event",
    [
        EndRequested(FailureCode.CANCELLED),
        AgentEnded(exit_code=0),
        OutputSeen(),
        Happened(EventType.BUILD_STARTED),
        RenewalArrived(renewal(1), 0),
        StagesEnded(FailureCode.AGENT_FAILED),
        StagesEnded(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_deadline_that_came_first_is_the_first_reason(event: Event) -> None:
    attempt, _ = run(reserved(), started(0))
    late, _ = run(attempt, event, at_ms=10_000)
    assert late.failure is FailureCode.LEASE_EXPIRED
    in_time, _ = run(attempt, event, at_ms=9_999)
    assert in_time.failure is not FailureCode.LEASE_EXPIRED


@pytest.mark.requirement("B-70")
def test_refused_renewals_are_counted_and_told_once() -> None:
    attempt, _ = run(reserved(), started(0))
    forged = RenewalArrived(renewal(1, key=bytes(32)), 0)
    attempt, all_ready = run(attempt, forged, forged, forged)
    assert attempt.refused_renewals == 3
    assert [len(ready.records) for ready in all_ready] == [1, 0, 0]
    assert attempt.lease == started(0).lease


@pytest.mark.requirement("B-86")
def test_a_pass_without_news_does_not_make_the_ledger_grow() -> None:
    attempt = in_phase(Phase.DEGRADED)
    again = ResourcesRemoved(CleanupTrigger.PERIODIC, (removed(RemovalOutcome.FAILED, "busy"),))
    for _ in range(100):
        attempt, (ready,) = run(attempt, again)
        assert ready == Ready(actions=(DegradeReservation(),))
    attempt, (ready,) = run(
        attempt, ResourcesRemoved(CleanupTrigger.PERIODIC, (removed(RemovalOutcome.ABSENT),))
    )
    assert attempt.phase is Phase.ENDED
    assert RecordKind.CLEANUP_REPORT in [record.kind for record in ready.records]


@pytest.mark.requirement("B-83")
def test_a_teardown_that_found_nothing_is_reported_too() -> None:
    """The result's second revision is stale at the hub once another fence was given out."""
    attempt, (ready,) = run(in_phase(Phase.ENDING), ResourcesRemoved(CleanupTrigger.TEARDOWN, ()))
    assert attempt.phase is Phase.ENDED
    methods = [message.method for message in ready.messages]
    assert methods.count("SubmitCleanupReport") == 1
    assert methods.index("SubmitCleanupReport") < methods.index("SubmitDispatchResult")


@pytest.mark.requirement("B-83")
def test_reports_and_events_never_share_an_id() -> None:
    seen: set[str] = set()
    for attempt_id, fence in (("1", 11), ("11", 1), ("1", 1)):
        for instance in ("i", "i1"):
            owner = type(OWNER)("r", instance, attempt_id, fence, "p", "t")
            attempt, ready = core.reserve(owner, "o", RESOURCES, now_at(0))
            all_ready = [ready]
            events: list[Event] = [
                started(0),
                *[Happened(EventType.BUILD_STARTED)] * 12,
                StagesEnded(),
            ]
            names = [f"forge-{n}" for n in range(12)]
            events += [
                ResourcesRemoved(TEARDOWN, (removed(RemovalOutcome.FAILED, name=name),))
                for name in names
            ]
            attempt, more = run(attempt, *events)
            messages = [m for ready in (*all_ready, *more) for m in ready.messages]
            for _ in range(12):
                log = Log(stream=OutputStream.STDOUT, text="x")
                attempt, message = core.stream_event(attempt, EventType.LOG, log, now_at(0))
                assert not message.durable
                messages.append(message)
            ids = [m.id for m in messages if m.method != "SubmitDispatchResult"]
            assert len(ids) == 14 + 12 + 12
            assert len(set(ids)) == len(ids)
            assert not seen & set(ids)
            seen |= set(ids)


def test_ids_come_from_what_happened_and_not_from_the_clock() -> None:
    events: list[Event] = [started(0), Happened(EventType.BUILD_STARTED), StagesEnded()]
    ids = []
    for at_ms in (0, 7_000):
        _, all_ready = run(reserved(), *events, at_ms=at_ms)
        ids.append([m.id for ready in all_ready for m in ready.messages])
    assert ids[0] == ids[1]


def test_an_event_of_the_wrong_kind_is_a_bug() -> None:
    attempt, _ = run(reserved(), started(0))
    with pytest.raises(AssertionError):
        run(attempt, Happened(EventType.LOG, Log(stream=OutputStream.STDOUT, text="x")))
    with pytest.raises(AssertionError):
        run(attempt, Happened(EventType.WARNING, EMPTY))
    with pytest.raises(AssertionError):
        core.stream_event(attempt, EventType.WARNING, Warning_(code="x", detail=""), now_at(0))


@pytest.mark.requirement("B-83")
def test_a_thousand_resisting_resources_fit_into_one_record() -> None:
    attempt, _ = run(reserved(), started(0), StagesEnded())
    resources = tuple(
        removed(RemovalOutcome.FAILED, "\U0001f600" * 16_000, f"forge-{n}-" + "x" * 240)
        for n in range(1_000)
    )
    _, (ready,) = run(attempt, ResourcesRemoved(TEARDOWN, resources))
    for record in ready.records:
        assert encode_body("2026-11-29T14:00:00.000Z", record.kind, record.data)


@pytest.mark.requirement("B-84")
def test_an_event_that_is_too_large_is_told_in_parts() -> None:
    attempt, _ = run(reserved(), started(0))
    names = tuple(f"{n:04}" + "\U0001f600" * 60 for n in range(1_000))
    redeemed = Happened(EventType.SECRETS_REDEEMED, SecretsRedeemed(names=names))
    attempt, (ready,) = run(attempt, redeemed)
    assert len(ready.messages) > 1
    for message in ready.messages:
        require_sendable(message)
    told = [name for m in ready.messages for name in m.payload["payload"]["names"]]
    assert tuple(told) == names
    assert attempt.sequence == 1 + len(ready.messages)
