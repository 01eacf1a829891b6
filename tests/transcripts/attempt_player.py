"""Plays the life of one dispatch: events in; records, messages and actions out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transcript import Words

from forge_core import attempt as core
from forge_core import lease as leases
from forge_core.attempt import Attempt, Now
from forge_core.attempt_events import (
    AgentEnded,
    AgentStarted,
    EndRequested,
    Event,
    ForwardRenewal,
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
    Started,
    Tick,
)
from forge_core.labels import Owner
from forge_core.ports import ImportedOutput
from forge_core.ready import Action, Ready, Record, RecordKind, messages_of
from forge_core.recovery import restore
from forge_core.resources import ResourceVector
from forge_core.wire.codes import (
    CleanupTrigger,
    EventType,
    FailureCode,
    PublicationOutcome,
    RemovalOutcome,
    ResourceKind,
    Stage,
)
from forge_core.wire.events import PAYLOADS
from forge_core.wire.from_hub import LeaseUpdate
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_core.wire.shapes import RemovedResource

KEY = bytes(range(32))
OWNER = Owner("runner-1", "instance-1", "att-1", 7, "project-1", "domain-1")
COMMIT = "c" * 40


class AttemptPlayer:
    """One dispatch under fence 7."""

    def __init__(self) -> None:
        self.state: Attempt | None = None
        self.records: list[Record] = []

    def __call__(self, at_ms: int, command: str, words: Words) -> Iterator[str]:
        now = Now(at_ms, utc(at_ms))
        if command == "reserve":
            resources = ResourceVector(slots=1, pids=256, memory_bytes=1 << 30, cpu_millis=1000)
            self.state, ready = core.reserve(OWNER, "offer-1", resources, now)
            yield from self._shown(ready)
        elif command == "restart":
            self.state, _ = restore(self.records)
            yield f"is      {self._state()}"
        else:
            assert self.state is not None, "a life begins with reserve"
            before = self.state
            self.state, ready = core.step(before, EVENTS[command](at_ms, words), now)
            yield from self._shown(ready)
            if self.state.phase is not before.phase or self.state.failure != before.failure:
                yield f"is      {self._state()}"

    def _shown(self, ready: Ready) -> Iterator[str]:
        self.records += ready.records
        assert ready.messages == messages_of(ready.records)
        for record in ready.records:
            yield f"record  {shown_record(record)}"
        for message in ready.messages:
            number = message.payload.get("sequence") or message.payload.get("revision") or ""
            yield f"tell    {message.method} {number}".rstrip()
        for action in ready.actions:
            yield f"do      {shown_action(action)}"
        if not ready:
            yield "nothing"

    def _state(self) -> str:
        assert self.state is not None
        state = self.state
        reason = f", because {state.failure}" if state.failure else ""
        return f"{state.phase} (event {state.sequence}, result {state.revision}{reason})"


def utc(at_ms: int) -> str:
    minutes, ms = divmod(at_ms, 60_000)
    return f"2026-11-29T{minutes // 60:02}:{minutes % 60:02}:{ms / 1000:06.3f}Z"


def shown_record(record: Record) -> str:
    data: Mapping[str, Any] = record.data
    match record.kind:
        case RecordKind.EVENT:
            payload = json.dumps(data["payload"]) if data["payload"] else ""
            return f"event {data['sequence']} {data['type']} {payload}".rstrip()
        case RecordKind.RESULT:
            optional = ("failureCode", "exitCode", "signal", "resultCommit", "summary")
            rest = " ".join(f"{name}={data[name]}" for name in optional if name in data)
            timings = ",".join(f"{k}:{v['durationMs']}" for k, v in data["timings"].items())
            head = f"result {data['revision']} {data['outcome']} cleanup={data['cleanup']}"
            return f"{head} {rest} {timings}".replace("  ", " ").rstrip()
        case RecordKind.REMOVAL | RecordKind.CLEANUP_REPORT:
            done = ", ".join(f"{r['kind']} {r['name']} {r['outcome']}" for r in data["resources"])
            return f"{record.kind} {data.get('trigger', '')} {done}".replace("  ", " ")
        case RecordKind.INTENT | RecordKind.FACT:
            return f"{record.kind} {data['kind']} {data['name']} {data.get('id', '')}".rstrip()
        case RecordKind.PUSH_INTENT | RecordKind.PUBLICATION:
            return f"{record.kind} {data['branch']} {data.get('outcome', '')}".rstrip()
        case RecordKind.RESERVED:
            return f"reserved {data['attemptId']} under fence {data['fence']}"
        case _:
            return str(record.kind)


def shown_action(action: Action) -> str:
    if isinstance(action, ForwardRenewal):
        return f"ForwardRenewal {action.update.sequence}"
    return type(action).__name__


def _started(at_ms: int, words: Words) -> Event:
    lease = leases.grant(
        attempt_id=OWNER.attempt_id,
        fence=OWNER.fence,
        key=KEY,
        sequence=0,
        ttl_ms=words.number("ttl", 60_000),
        hard_wall_ms=words.number("wall", 3_600_000),
        idle_ms=words.number("idle", 600_000),
        now_ms=at_ms,
    )
    return Started(lease)


def _renewal(at_ms: int, words: Words) -> Event:
    fence, sequence = words.number("fence", OWNER.fence), words.number("sequence")
    ttl_ms, issued_at = words.number("ttl", 60_000), utc(at_ms)
    signed = lease_message(OWNER.attempt_id, fence, sequence, ttl_ms, issued_at)
    key = bytes(32) if "forged" in words.bare else KEY
    return RenewalArrived(
        LeaseUpdate(
            attempt_id=OWNER.attempt_id,
            fence=fence,
            sequence=sequence,
            ttl_ms=ttl_ms,
            issued_at=issued_at,
            mac=sign_lease(key, signed),
        ),
        at_ms,
    )


def _happened(_at_ms: int, words: Words) -> Event:
    event_type = EventType(words.bare[0])
    return Happened(event_type, PAYLOADS[event_type].model_validate(words.named))


def _removed(_at_ms: int, words: Words) -> Event:
    resources = []
    for word in words.bare[1:]:
        kind, name, outcome = word.split(":")
        resources.append(
            RemovedResource(
                kind=ResourceKind(kind),
                id=name,
                name=name,
                role="agent",
                outcome=RemovalOutcome(outcome),
            )
        )
    return ResourcesRemoved(CleanupTrigger(words.bare[0]), tuple(resources))


def _ended(_at_ms: int, words: Words) -> Event:
    if "signal" in words.named:
        return AgentEnded(signal=words.number("signal"))
    return AgentEnded(exit_code=words.number("code"))


EVENTS: dict[str, Callable[[int, Words], Event]] = {
    "start": _started,
    "renew": _renewal,
    "happened": _happened,
    "removed": _removed,
    "agent-ended": _ended,
    "agent-started": lambda _, words: AgentStarted(),
    "output": lambda _, words: OutputSeen(),
    "tick": lambda _, words: Tick(),
    "stage": lambda _, words: StageEntered(Stage(words.bare[0])),
    "intend": lambda _, words: ResourceIntended(
        ResourceKind(words.bare[0]), words.bare[1], "agent"
    ),
    "created": lambda _, words: ResourceCreated(
        ResourceKind(words.bare[0]), words.bare[2], words.bare[1], "agent"
    ),
    "accepted": lambda _, words: OutputAccepted(
        ImportedOutput(
            None if "unchanged" in words.bare else COMMIT,
            words.number("files", 0),
            words.number("bytes", 0),
        )
    ),
    "push": lambda _, words: PushIntended(words.bare[0], COMMIT),
    "published": lambda _, words: Published(
        words.bare[0], COMMIT, PublicationOutcome(words.bare[1])
    ),
    "end": lambda _, words: EndRequested(FailureCode(words.bare[0]), words.text(1)),
    "stages-ended": lambda _, words: StagesEnded(
        FailureCode(words.bare[0]) if words.bare else None, words.text(1)
    ),
}
