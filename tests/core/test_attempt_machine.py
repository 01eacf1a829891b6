"""One dispatch, under any sequence of events, with a crash at every record."""

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
    require_sendable,
    run,
    started,
    stored,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    Published,
    PushIntended,
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
from forge_core.ports import ImportedOutput
from forge_core.ready import Ready, Record, RecordKind, messages_of
from forge_core.recovery import restore
from forge_core.wire.codes import (
    CleanupTrigger,
    EventType,
    FailureCode,
    PublicationOutcome,
    RemovalOutcome,
    ResourceKind,
    Stage,
    outcome_of,
)
from forge_core.wire.events import (
    ImageResolved,
    Inventory,
    SecretsRedeemed,
    Warning_,
)
from forge_core.wire.shapes import InventoryItem

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
TYPES: dict[type[Any], EventType] = {
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
        "push": attempt.push,
        "published": attempt.published,
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
    kinds = [r.kind for r in records]
    assert kinds.count(RecordKind.PUBLICATION) <= 1
    if RecordKind.RESULT in kinds and RecordKind.PUSH_INTENT in kinds:
        # Whoever signs off on a result knows what became of a push.
        assert kinds.index(RecordKind.PUBLICATION) < kinds.index(RecordKind.RESULT)
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
        update = renewal(sequence, key=bytes(32) if forged else KEY)
        ready = self.feed(RenewalArrived(update, self.now_ms))
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

    @precondition(lambda self: self.is_in(Phase.RUNNING) and self.attempt.published is None)
    @rule(outcome=st.none() | st.sampled_from(PublicationOutcome))
    def publish(self, outcome: PublicationOutcome | None) -> None:
        """None: only the intent."""
        if outcome is None:
            self.feed(PushIntended("main", COMMIT))
            assert self.attempt.push is not None
        else:
            self.feed(Published("main", COMMIT, outcome))
            assert self.attempt.push is None

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
