"""What the tests of the attempt machine share: one dispatch, its events, and hostile texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from pysignalr.messages import InvocationMessage

from forge_core import lease as leases
from forge_core.attempt import Attempt, Now, step
from forge_core.attempt_events import EndRequested, Event, StagesEnded, Started
from forge_core.labels import Owner
from forge_core.ready import Message, Ready, Record
from forge_core.resources import ResourceVector
from forge_core.wire.base import parse
from forge_core.wire.codes import FailureCode, RemovalOutcome, ResourceKind
from forge_core.wire.from_bridge import HUB_METHODS, SubmitCleanupReport
from forge_core.wire.from_hub import LeaseUpdate
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes, split_cleanup_report
from forge_core.wire.shapes import RemovedResource
from forge_edges import signalr_codec

KEY = bytes(range(32))
OWNER = Owner("runner-1", "instance-1", "a" * 128, 2**63 - 1, "project-1", "domain-1")
RESOURCES = ResourceVector(slots=1, pids=256, memory_bytes=1 << 30, cpu_millis=1000)
COMMIT = "c" * 40

hostile_texts = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["\x00", "\U0001f600", "\ud800", '"', "\\", "\u2028"]).map(
        lambda character: character * 16_000
    ),
)
hostile_names = st.one_of(
    st.text(min_size=1, max_size=20),
    st.sampled_from(["\x01", "\U0001f600", '"']).map(lambda character: character * 256),
)


def now_at(at_ms: int) -> Now:
    return Now(at_ms, f"2026-11-29T14:00:{at_ms // 1000 % 60:02}.{at_ms % 1000:03}Z")


def started(at_ms: int, *, ttl_ms: int = 10_000) -> Started:
    lease = leases.grant(
        attempt_id=OWNER.attempt_id,
        fence=OWNER.fence,
        key=KEY,
        sequence=0,
        ttl_ms=ttl_ms,
        hard_wall_ms=30_000,
        idle_ms=5_000,
        now_ms=at_ms,
    )
    return Started(lease)


def renewal(sequence: int, *, key: bytes = KEY) -> LeaseUpdate:
    issued_at = "2026-11-29T14:00:00.000Z"
    message = lease_message(OWNER.attempt_id, OWNER.fence, sequence, 10_000, issued_at)
    return LeaseUpdate(
        attempt_id=OWNER.attempt_id,
        fence=OWNER.fence,
        sequence=sequence,
        ttl_ms=10_000,
        issued_at=issued_at,
        mac=sign_lease(key, message),
    )


def removed(
    outcome: RemovalOutcome, detail: str | None = None, name: str = "forge-agent-1"
) -> RemovedResource:
    return RemovedResource(
        kind=ResourceKind.CONTAINER,
        id=name,
        name=name,
        role="agent",
        outcome=outcome,
        detail=detail,
    )


def stored(records: Iterable[Record]) -> list[Record]:
    """The records as a ledger gives them back."""
    return [Record(r.kind, json.loads(json.dumps(r.data))) for r in records]


def run(attempt: Attempt, *events: Event, at_ms: int = 0) -> tuple[Attempt, list[Ready]]:
    """Feed events one after the other."""
    all_ready = []
    for event in events:
        attempt, ready = step(attempt, event, now_at(at_ms))
        all_ready.append(ready)
    return attempt, all_ready


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


STOPPED = EndRequested(FailureCode.BRIDGE_STOPPED, "the bridge stopped while it ran")
STOPPED_RUNNING = StagesEnded(FailureCode.BRIDGE_STOPPED, "the bridge stopped while it ran")
