"""What stays under the size bound of the wire, whatever the texts in it are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pysignalr.messages import InvocationMessage

from forge_core.errors import RefusedError
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.base import MAX_INT, well_formed
from forge_core.wire.codes import (
    CleanupTrigger,
    EventType,
    OutputStream,
    RemovalOutcome,
    ReservationState,
    ResourceKind,
    RunnerState,
)
from forge_core.wire.events import Inventory, Log, SecretsRedeemed, Warning_
from forge_core.wire.from_bridge import (
    Heartbeat,
    SubmitCleanupReport,
    SubmitDispatchEvent,
    SubmitLegacyResult,
)
from forge_core.wire.limits import (
    MAX_LOG_TEXT_BYTES,
    MAX_MESSAGE_BYTES,
    cut_text,
    fit_heartbeat,
    fitting_payloads,
    measured_size_bytes,
    require_fits,
    split_cleanup_report,
    split_inventory,
    split_text,
)
from forge_core.wire.shapes import (
    DiskState,
    HeartbeatAttempt,
    InventoryItem,
    PublishedPort,
    RemovedResource,
)
from forge_edges import signalr_codec

pytestmark = pytest.mark.requirement("B-07", "B-08", "B-83", "B-84")

NOW = "2026-11-29T14:00:00.000Z"
WORST = ["\x00", "\x1f", "\x7f", '"', "\\", "\u2028", "é", "\uffff", "\U0001f600", "\U0010ffff"]
good_texts = st.text(st.one_of(st.sampled_from(WORST), st.characters(exclude_categories=["Cs"])))
any_texts = st.text(st.one_of(st.sampled_from([*WORST, "\ud800", "\udfff"]), st.characters()))
long_texts = st.builds(lambda piece, times: piece * times, any_texts, st.integers(0, 4_000))
worst_names = st.sampled_from(WORST).map(lambda character: character * 256)
names = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), worst_names)
names = names.map(lambda name: name[:256])


def encoded_bytes(method: str, payload: dict[str, Any]) -> int:
    """What really goes over the wire."""
    return len(signalr_codec.encode(InvocationMessage("18446744073709551615", method, [payload])))


json_objects = st.dictionaries(
    good_texts,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | good_texts,
        lambda inner: st.lists(inner) | st.dictionaries(good_texts, inner),
        max_leaves=10,
    ),
)


@given(json_objects)
def test_what_is_measured_is_never_less_than_what_is_sent(payload: dict[str, Any]) -> None:
    sent = encoded_bytes("RedeemPublishGrantOrLonger", payload)
    assert sent <= measured_size_bytes(payload) <= sent + 160


def test_every_character_has_the_size_that_is_sent() -> None:
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    for start in range(0, len(every), 4096):
        payload = {"t": "".join(every[start : start + 4096])}
        assert encoded_bytes("M", payload) <= measured_size_bytes(payload)
        assert measured_size_bytes(payload) - encoded_bytes("M", payload) < 160


def test_what_does_not_fit_is_refused_by_name() -> None:
    room = MAX_MESSAGE_BYTES - measured_size_bytes({"output": ""})
    require_fits("SubmitLegacyResult", {"output": "x" * room})
    with pytest.raises(RefusedError, match="cannot send SubmitLegacyResult") as refused:
        require_fits("SubmitLegacyResult", {"output": "x" * (room + 1)})
    assert refused.value.code == "message_too_large"


def text_bytes(text: str) -> int:
    return measured_size_bytes({"t": text}) - measured_size_bytes({"t": ""})


@given(long_texts, st.integers(0, 40_000))
@example("\ud800" * 10, 5)
@example("a\ud83d\ude00", 100)
def test_a_text_is_cut_to_the_longest_prefix_that_fits(text: str, max_bytes: int) -> None:
    cut, was_cut = cut_text(text, max_bytes)
    clean = well_formed(text)
    assert was_cut == (text_bytes(clean) > max_bytes)
    assert text_bytes(cut) <= max_bytes
    cut.encode()
    if not was_cut:
        assert cut == clean
    elif clean == text:
        assert text.startswith(cut)
        longer = text[: len(cut) + 1]
        assert text_bytes(longer) > max_bytes


@given(long_texts, st.sampled_from([8, 100, MAX_LOG_TEXT_BYTES]))
def test_a_text_that_is_split_loses_nothing(text: str, max_bytes: int) -> None:
    pieces = split_text(text[:20_000], max_bytes)
    assert "".join(pieces) == well_formed(text[:20_000])
    assert all(measured_size_bytes({"": piece}) <= max_bytes + 170 for piece in pieces)
    assert all(pieces)


@given(long_texts.map(well_formed), st.sampled_from(OutputStream))
def test_every_piece_of_a_log_is_a_message(text: str, stream: OutputStream) -> None:
    for piece in split_text(text):
        log = Log(stream=stream, text=piece, truncated=True, dropped_bytes=MAX_INT)
        require_event_fits(EventType.LOG, log)


def require_event_fits(event_type: EventType, payload: Any) -> None:
    event = SubmitDispatchEvent(
        event_id="e" * 128,
        attempt_id="a" * 128,
        fence=MAX_INT,
        resource_runner_instance_id="i" * 128,
        sequence=MAX_INT,
        stream_sequence=MAX_INT,
        at=NOW,
        type=event_type,
        payload=payload.to_wire(),
    )
    require_fits("SubmitDispatchEvent", event.to_wire())
    assert encoded_bytes("SubmitDispatchEvent", event.to_wire()) <= MAX_MESSAGE_BYTES


@given(names, long_texts)
def test_a_warning_always_fits(code: str, detail: str) -> None:
    (fitting,) = fitting_payloads(Warning_(code=code, detail=detail[:16_384]))
    require_event_fits(EventType.WARNING, fitting)


@given(st.lists(names, max_size=200))
@example(["\x01" * 256] * 100)
@example(["x"] * 1_024)
def test_the_names_of_secrets_are_split_and_none_is_lost(secrets: list[str]) -> None:
    parts = fitting_payloads(SecretsRedeemed(names=tuple(secrets)))
    told: list[str] = []
    for part in parts:
        assert isinstance(part, SecretsRedeemed)
        require_event_fits(EventType.SECRETS_REDEEMED, part)
        told += part.names
    assert told == secrets


inventory_items = st.builds(
    lambda **properties: InventoryItem(**properties),
    kind=st.sampled_from(ResourceKind),
    id=names,
    name=names,
    role=st.sampled_from(WORST).map(lambda character: character * 64),
    created_at=st.just(NOW),
)
ports = st.builds(
    lambda **properties: PublishedPort(**properties),
    container=names,
    container_port=st.integers(1, 65_535),
    host_address=st.just("::1"),
    host_port=st.integers(1, 65_535),
)


@given(
    st.lists(inventory_items, max_size=30),
    st.lists(inventory_items, max_size=30),
    st.lists(ports, max_size=30),
)
def test_an_inventory_is_split_and_nothing_is_lost(
    containers: list[InventoryItem], volumes: list[InventoryItem], published: list[PublishedPort]
) -> None:
    whole = Inventory(containers=tuple(containers), volumes=tuple(volumes), ports=tuple(published))
    parts = split_inventory(whole)
    assert [(p.part, p.parts) for p in parts] == [(n, len(parts)) for n in range(1, len(parts) + 1)]
    for part in parts:
        require_event_fits(EventType.INVENTORY, part)
    for kind in ("containers", "networks", "volumes", "ports"):
        assert sum((getattr(p, kind) for p in parts), ()) == getattr(whole, kind)


removed_resources = st.builds(
    RemovedResource,
    kind=st.sampled_from(ResourceKind),
    id=names,
    name=names,
    role=st.sampled_from(WORST).map(lambda character: character * 64),
    outcome=st.sampled_from(RemovalOutcome),
    detail=st.none() | long_texts.map(lambda text: text[:16_384]),
)


@given(st.lists(removed_resources, max_size=60))
def test_a_report_is_split_and_no_resource_is_lost(resources: list[RemovedResource]) -> None:
    report = SubmitCleanupReport(
        report_id="r" * 128,
        attempt_id="a" * 128,
        fence=MAX_INT,
        resource_runner_instance_id="i" * 128,
        runner_id="r" * 128,
        runner_instance_id="i" * 128,
        part=1,
        parts=1,
        created_at=NOW,
        trigger=CleanupTrigger.REAP_ACTION,
        resources=tuple(resources),
    )
    parts = split_cleanup_report(report)
    assert [(p.part, p.parts) for p in parts] == [(n, len(parts)) for n in range(1, len(parts) + 1)]
    for part in parts:
        require_fits("SubmitCleanupReport", part.to_wire())
        assert encoded_bytes("SubmitCleanupReport", part.to_wire()) <= MAX_MESSAGE_BYTES
    told = [(r.id, r.outcome) for part in parts for r in part.resources]
    assert told == [(r.id, r.outcome) for r in resources]


@pytest.mark.parametrize("count", [0, 1, 100, 10_000])
def test_a_heartbeat_keeps_the_newest_and_says_so(count: int) -> None:
    attempts = tuple(
        HeartbeatAttempt(
            attempt_id=f"{n}-" + "a" * 120, fence=MAX_INT, state=ReservationState.RELEASING
        )
        for n in range(count)
    )
    whole = Heartbeat(
        runner_id="r" * 128,
        runner_instance_id="i" * 128,
        sequence=MAX_INT,
        sent_at=NOW,
        state=RunnerState.STOPPING,
        used_resources=ResourceVector(*[MAX_INT] * 6),
        resource_capacity=ResourceCapacity(*[MAX_INT] * 6),
        reserved_count=MAX_INT,
        starting_count=MAX_INT,
        active_count=MAX_INT,
        degraded_reservation_count=MAX_INT,
        disk=DiskState(latched=True, used_percent=100, free_bytes=MAX_INT),
        pending_reports=MAX_INT,
        attempts=attempts,
        attempts_truncated=False,
    )
    fitting = fit_heartbeat(whole)
    require_fits("Heartbeat", fitting.to_wire())
    assert encoded_bytes("Heartbeat", fitting.to_wire()) <= MAX_MESSAGE_BYTES
    kept = len(fitting.attempts)
    assert fitting.attempts == attempts[count - kept :]
    assert fitting.attempts_truncated == (kept < count)
    if kept < count:
        one_more = fitting.model_copy(update={"attempts": attempts[count - kept - 1 :]})
        assert measured_size_bytes(one_more.to_wire()) > MAX_MESSAGE_BYTES


@pytest.mark.requirement("B-03")
@given(long_texts, long_texts)
def test_a_v1_result_fits_with_both_of_its_texts(output: str, error: str) -> None:
    result = SubmitLegacyResult(
        dispatch_id="d" * 128,
        succeeded=False,
        exit_code=-MAX_INT,
        output=cut_text(output, MAX_MESSAGE_BYTES - 6_000)[0],
        truncated=True,
        error=cut_text(error, 2_000)[0],
    )
    require_fits("SubmitLegacyResult", result.to_wire())
