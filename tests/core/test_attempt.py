"""One dispatch, under any sequence of events: what is recorded, told and done for it."""

from __future__ import annotations

from typing import Any

import pytest
from attempt_parts import (
    COMMIT,
    KEY,
    OWNER,
    RESOURCES,
    STOPPED,
    STOPPED_RUNNING,
    hostile_names,
    hostile_texts,
    now_at,
    removed,
    renewal,
    run,
    started,
    stored,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pysignalr.messages import InvocationMessage

from forge_core import attempt as core
from forge_core.attempt import Attempt, Phase
from forge_core.attempt_events import (
    AgentEnded,
    AgentStarted,
    DegradeReservation,
    EndRequested,
    Event,
    ForwardRenewal,
    FreeReservation,
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
    TearDown,
    Tick,
)
from forge_core.ledger import encode_body
from forge_core.ports import ImportedOutput
from forge_core.ready import Message, Ready, Record, RecordKind, messages_of
from forge_core.recovery import restore
from forge_core.wire.base import parse
from forge_core.wire.codes import (
    CleanupTrigger,
    EventType,
    FailureCode,
    OutputStream,
    RemovalOutcome,
    ResourceKind,
    Stage,
    outcome_of,
)
from forge_core.wire.events import (
    EMPTY,
    ImageResolved,
    Inventory,
    Log,
    SecretsRedeemed,
    Warning_,
)
from forge_core.wire.from_bridge import HUB_METHODS, SubmitCleanupReport
from forge_core.wire.limits import (
    MAX_MESSAGE_BYTES,
    measured_size_bytes,
    split_cleanup_report,
)
from forge_core.wire.shapes import InventoryItem
from forge_edges import signalr_codec

TEARDOWN = CleanupTrigger.TEARDOWN
UNFIT = (OutputAccepted, StageEntered, AgentStarted, AgentEnded, ResourceIntended)

payloads = st.one_of(
    st.builds(Warning_, code=hostile_names, detail=hostile_texts),
    st.builds(SecretsRedeemed, names=st.lists(hostile_names, max_size=400).map(tuple)),
    st.builds(
        ImageResolved,
        image_key=hostile_names,
        digest=hostile_names,
        cache=st.sampled_from(["hit", "miss"]),
    ),
    st.integers(0, 300).map(
        lambda count: Inventory(
            volumes=tuple(
                InventoryItem(
                    kind=ResourceKind.VOLUME,
                    id=f"{n}-" + "\x01" * 200,
                    name=f"volume-{n}",
                    role="workspace",
                    created_at="2026-11-29T14:00:00Z",
                )
                for n in range(count)
            )
        )
    ),
)
TYPES = {
    Warning_: EventType.WARNING,
    SecretsRedeemed: EventType.SECRETS_REDEEMED,
    ImageResolved: EventType.IMAGE_RESOLVED,
    Inventory: EventType.INVENTORY,
}
failures = st.sampled_from(FailureCode)
outcomes = st.lists(
    st.builds(
        removed,
        st.sampled_from(RemovalOutcome),
        st.none() | hostile_texts,
        st.sampled_from(["forge-agent-1", "forge-helper-1"]),
    ),
    max_size=3,
    unique_by=lambda resource: resource.name,
).map(tuple)


def require_sendable(message: Message) -> None:
    """It parses at the hub, fits, and the encoder takes it."""
    request = HUB_METHODS[message.method].request
    payload: Any = message.payload
    assert parse(request, payload, what=message.method).to_wire() == payload
    parts = [payload]
    if message.method == "SubmitCleanupReport":
        report = SubmitCleanupReport.model_validate(payload)
        parts = [part.to_wire() for part in split_cleanup_report(report)]
    for part in parts:
        assert measured_size_bytes(part) <= MAX_MESSAGE_BYTES
        record = signalr_codec.encode(InvocationMessage("1234567890", message.method, [part]))
        assert len(record) <= measured_size_bytes(part)


def what_matters(attempt: Attempt) -> dict[str, object]:
    """What a restart must not forget."""
    decided = attempt.revision > 0
    return {
        "owner": attempt.owner,
        "offer": attempt.offer_id,
        "phase": attempt.phase,
        "events": attempt.sequence,
        "result": attempt.revision,
        "failure": attempt.failure if decided else None,
        "status": (attempt.exit_code, attempt.signal),
        "commit": attempt.result_commit if not decided or attempt.failure is None else None,
        "timings": dict(attempt.timings) if decided else {},
        "reports": attempt.reports,
        "resisting": attempt.resisting if attempt.phase is Phase.DEGRADED else None,
    }


def require_true_to_itself(records: list[Record]) -> None:
    """What holds of every ledger, whatever was crashed in between."""
    events = [r.data for r in records if r.kind is RecordKind.EVENT]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    ids = [m.id for m in messages_of(records)]
    assert len(set(ids)) == len(ids)
    results = [r.data for r in records if r.kind is RecordKind.RESULT]
    assert len({(result["outcome"], result.get("failureCode")) for result in results}) <= 1
    revisions = [result["revision"] for result in results]
    assert revisions in ([], [1], [2], [1, 2])
    released = [n for n, r in enumerate(records) if r.kind is RecordKind.RELEASED]
    assert released in ([], [len(records) - 1])
    assert not released or revisions[-1] == 2
    final = next((n for n, r in enumerate(records) if r.data.get("revision") == 2), None)
    assert final is None or all(r.kind is not RecordKind.EVENT for r in records[final:])


def reboot(records: list[Record]) -> list[Record]:
    """What a restart makes of a ledger that ends here; everything turns out to be gone."""
    attempt, resources = restore(stored(records))
    assert resources == RESOURCES
    events: list[Event] = []
    if attempt.phase is Phase.RESERVED:
        events.append(STOPPED)
    elif attempt.phase is not Phase.ENDED:
        gone = (removed(RemovalOutcome.ABSENT),)
        events += [STOPPED_RUNNING] if attempt.phase is Phase.RUNNING else []
        events.append(ResourcesRemoved(CleanupTrigger.STARTUP, gone))
    attempt, all_ready = run(attempt, *events, at_ms=999_000)
    assert attempt.phase is Phase.ENDED
    return [*records, *(record for ready in all_ready for record in ready.records)]


class AttemptMachine(RuleBasedStateMachine):
    """Whatever may happen to a dispatch, in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.records: list[Record] = []
        self.first_reason: FailureCode | None = None

    @initialize(goes=st.sampled_from([0, 1, 1, 1, 1, 2, 2, 3]))
    def begin(self, goes: int) -> None:
        """Reserved, running, running with output, or ending already."""
        self.attempt, ready = core.reserve(OWNER, "offer-1", RESOURCES, now_at(0))
        self.check(ready)
        output = OutputAccepted(ImportedOutput(COMMIT, 3, 2_048))
        for event in (started(0), output, StagesEnded())[:goes]:
            self.feed(event)

    def is_in(self, *phases: Phase) -> bool:
        return self.attempt.phase in phases

    def feed(self, event: Event) -> Ready:
        before = self.attempt
        self.attempt, ready = core.step(before, event, now_at(self.now_ms))
        if before.failure is not None:
            assert self.attempt.failure is before.failure
            assert self.attempt.failure_detail == before.failure_detail
        if before.revision:
            assert (self.attempt.failure, self.attempt.result_commit) == (
                before.failure,
                before.result_commit,
            )
        self.check(ready)
        return ready

    def check(self, ready: Ready) -> None:
        assert ready.messages == messages_of(ready.records)
        for message in ready.messages:
            require_sendable(message)
        kinds = [record.kind for record in (*self.records, *ready.records)]
        for action in ready.actions:
            if isinstance(action, TearDown | DegradeReservation):
                assert RecordKind.RESULT in kinds
            if isinstance(action, FreeReservation):
                assert kinds[-1] is RecordKind.RELEASED
        assert (self.attempt.phase is Phase.ENDED) == (kinds[-1] is RecordKind.RELEASED)
        for count in range(1, len(ready.records) + 1):
            crashed = [*self.records, *ready.records[:count]]
            require_true_to_itself(crashed)
            require_true_to_itself(reboot(crashed))
        self.records += ready.records

    @invariant()
    def a_restart_forgets_nothing_that_matters(self) -> None:
        if self.records:
            restored, _ = restore(stored(self.records))
            assert what_matters(restored) == what_matters(self.attempt)
            wakes_at_ms = core.next_wake_ms(self.attempt)
            running = self.attempt.phase is Phase.RUNNING and self.attempt.failure is None
            assert (wakes_at_ms is not None) == running

    @rule(wait_ms=st.sampled_from([0, 1, 4_999, 5_000, 10_000, 60_000]))
    def time_passes(self, wait_ms: int) -> None:
        self.now_ms += wait_ms
        wakes_at_ms = core.next_wake_ms(self.attempt)
        ready = self.feed(Tick())
        if wakes_at_ms is not None:
            due = self.now_ms >= wakes_at_ms
            assert ready == Ready(actions=(StopStages(),) if due else ())

    @precondition(lambda self: self.is_in(Phase.RESERVED, Phase.ENDED))
    @rule()
    def start(self) -> None:
        self.feed(started(self.now_ms))

    @rule(failure=failures, detail=st.none() | hostile_texts)
    def end(self, failure: FailureCode, detail: str | None) -> None:
        self.feed(EndRequested(failure, detail))

    @rule(sequence=st.integers(0, 5), forged=st.booleans())
    def renew(self, sequence: int, forged: bool) -> None:
        ready = self.feed(RenewalArrived(renewal(sequence, key=bytes(32) if forged else KEY)))
        assert not (forged and any(isinstance(a, ForwardRenewal) for a in ready.actions))

    @precondition(lambda self: not self.is_in(Phase.RESERVED))
    @rule(payload=payloads)
    def happen(self, payload: Any) -> None:
        self.feed(Happened(TYPES[type(payload)], payload))

    @rule(
        event=st.one_of(
            st.builds(StageEntered, st.sampled_from([s for s in Stage if s is not Stage.TEARDOWN])),
            st.just(ResourceIntended(ResourceKind.CONTAINER, "forge-agent-1", "agent")),
            st.just(AgentStarted()),
            st.just(OutputSeen()),
            st.builds(AgentEnded, exit_code=st.integers(0, 255)),
            st.builds(AgentEnded, signal=st.integers(1, 64)),
            st.just(OutputAccepted(ImportedOutput(COMMIT, 3, 2_048))),
            st.just(OutputAccepted(ImportedOutput(None, 0, 0))),
        )
    )
    def run_on(self, event: Event) -> None:
        if self.attempt.phase is Phase.RUNNING:
            self.feed(event)
        elif isinstance(event, UNFIT):
            with pytest.raises(AssertionError, match="in phase"):
                core.step(self.attempt, event, now_at(self.now_ms))

    @precondition(lambda self: not self.is_in(Phase.RESERVED, Phase.ENDED))
    @rule()
    def create(self) -> None:
        self.feed(ResourceCreated(ResourceKind.CONTAINER, "4f1d", "forge-agent-1", "agent"))

    @precondition(lambda self: self.is_in(Phase.RUNNING))
    @rule(failure=st.none() | failures, detail=st.none() | hostile_texts)
    def stages_end(self, failure: FailureCode | None, detail: str | None) -> None:
        reason, lease = self.attempt.failure, self.attempt.lease
        assert lease is not None
        expired = lease.expired(self.now_ms)
        self.feed(StagesEnded(failure, detail))
        first = reason or (expired.failure_code if expired else None) or failure
        result = self.records[-1].data
        assert (result["revision"], result["cleanup"]) == (1, "pending")
        assert result["outcome"] == outcome_of(first)
        assert result.get("failureCode") == first
        assert first is None or "resultCommit" not in result

    @precondition(lambda self: self.is_in(Phase.ENDING, Phase.DEGRADED))
    @rule(resources=outcomes, trigger=st.sampled_from(CleanupTrigger))
    def teardown_is_through(self, resources: Any, trigger: CleanupTrigger) -> None:
        self.feed(ResourcesRemoved(trigger, resources))
        resists = any(r.outcome is RemovalOutcome.FAILED for r in resources)
        assert self.attempt.phase is (Phase.DEGRADED if resists else Phase.ENDED)


AttemptMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=20)
TestAttempt = pytest.mark.requirement("B-04", "B-70", "B-71", "B-83", "B-84", "B-86")(
    AttemptMachine.TestCase
)


def reserved() -> Attempt:
    return core.reserve(OWNER, "offer-1", RESOURCES, now_at(0))[0]


def in_phase(phase: Phase) -> Attempt:
    """A dispatch that got there the shortest way."""
    attempt = reserved()
    if phase is Phase.RESERVED:
        return attempt
    outcome = RemovalOutcome.FAILED if phase is Phase.DEGRADED else RemovalOutcome.REMOVED
    path = [started(0), StagesEnded(), ResourcesRemoved(TEARDOWN, (removed(outcome),))]
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
    RenewalArrived(renewal(1)),
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
        RenewalArrived(renewal(1)),
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
    forged = RenewalArrived(renewal(1, key=bytes(32)))
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
def test_reports_and_events_never_share_an_id() -> None:
    seen: set[str] = set()
    for attempt_id, fence in (("1", 11), ("11", 1), ("1", 1)):
        for instance in ("i", "i1"):
            owner = type(OWNER)("r", instance, attempt_id, fence, "p", "t")
            attempt, ready = core.reserve(owner, "o", RESOURCES, now_at(0))
            all_ready = [ready]
            events = [started(0), *[Happened(EventType.BUILD_STARTED)] * 12, StagesEnded()]
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
