"""Durable messages reach the hub, whatever is cut or lost, and stop when it has answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from forge_bridge.flows.replay import Replay
from forge_bridge.state_root import StateRoot
from forge_bridge.state_root.messages import MessageStore
from forge_core.errors import (
    DiskUnusable,
    HubConnectionLost,
    HubError,
    HubUnavailable,
    RefusedError,
)
from forge_core.outbox import MAX_IN_FLIGHT, Entry
from forge_core.ready import Message
from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes
from forge_edges.clock import SystemClock

PERSISTED = {"accepted": True, "disposition": "persisted"}
REJECTED = {"accepted": False, "disposition": "rejected", "reason": "stale_fence"}


class Hub:
    """Answers as told; remembers what arrived, and how much was under way at once."""

    def __init__(self, answer: Callable[[str, Mapping[str, Any]], object] | None = None) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.answer = answer or (lambda method, payload: PERSISTED)
        self.gate = anyio.Event()
        self.gate.set()
        self.arrived = anyio.Event()
        self.under_way = 0
        self.most_under_way = 0

    async def invoke(self, method: str, payload: Mapping[str, Any]) -> object:
        self.calls.append((method, payload))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.arrived.set()
        self.arrived = anyio.Event()
        try:
            await self.gate.wait()
            answer = self.answer(method, payload)
        finally:
            self.under_way -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.arrived.wait()


class ImpatientClock(SystemClock):
    """Backoffs are over at once."""

    async def sleep_until_ms(self, deadline_ms: int) -> None:
        self.skipped_ms = getattr(self, "skipped_ms", 0) + max(0, deadline_ms - self.now_ms())
        await anyio.lowlevel.checkpoint()

    def now_ms(self) -> int:
        return super().now_ms() + getattr(self, "skipped_ms", 0)


@pytest.fixture
async def root(tmp_path: Path) -> StateRoot:
    return await StateRoot.open(tmp_path / "state", clock=SystemClock())


@pytest.fixture
async def replay(root: StateRoot) -> Replay:
    return await opened(root)


async def opened(root: StateRoot, *, instance_id: str = "instance-1") -> Replay:
    replay = Replay(
        root.messages, ImpatientClock(), runner_id="runner-1", runner_instance_id=instance_id
    )
    await replay.load()
    return replay


def event(sequence: int, attempt_id: str = "a1") -> Message:
    payload: dict[str, Any] = {
        "eventId": f"event-{attempt_id}-{sequence}",
        "attemptId": attempt_id,
        "fence": 1,
        "resourceRunnerInstanceId": "instance-1",
        "sequence": sequence,
        "at": "2026-11-29T14:00:00.000Z",
        "type": "build.started",
        "payload": {},
    }
    return Message(payload["eventId"], "SubmitDispatchEvent", payload)


def result(revision: int, outcome: str = "succeeded") -> Message:
    payload = {
        "attemptId": "a1",
        "fence": 1,
        "resourceRunnerInstanceId": "instance-1",
        "revision": revision,
        "outcome": outcome,
        "cleanup": "pending" if revision == 1 else "complete",
        "timings": {},
    }
    return Message(f"a1.1.r{revision}", "SubmitDispatchResult", payload)


def report(report_id: str = "report-1", resources: int = 1) -> Message:
    payload = {
        "reportId": report_id,
        "attemptId": "a1",
        "fence": 1,
        "resourceRunnerInstanceId": "instance-0",
        "runnerId": "not-this-one",
        "runnerInstanceId": "instance-0",
        "part": 1,
        "parts": 1,
        "createdAt": "2026-11-29T14:00:00.000Z",
        "trigger": "startup",
        "resources": [
            {"kind": "volume", "id": f"v{n}", "name": "n" * 200, "role": "workspace"}
            | {"outcome": "removed"}
            for n in range(resources)
        ],
    }
    return Message(report_id, "SubmitCleanupReport", payload)


async def drain(replay: Replay, hub: Hub) -> None:
    """One connection, until everything is acknowledged."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay.run, hub.invoke)
        await replay.wait_empty()
        tasks.cancel_scope.cancel()


def files(root: StateRoot, part: str = "outbox") -> list[str]:
    return sorted(path.name for path in (root.path / part).iterdir() if path.is_file())


@pytest.mark.requirement("B-83", "B-07")
async def test_a_message_is_on_disk_before_it_is_sent_and_gone_when_acknowledged(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(report())
    (name,) = files(root, "cleanup-reports")
    assert name == "report-1.json"
    path = root.path / "cleanup-reports" / name
    assert path.stat().st_mode & 0o777 == 0o600
    assert replay.pending_reports == 1

    hub = Hub()
    await drain(replay, hub)

    assert [method for method, _ in hub.calls] == ["SubmitCleanupReport"]
    assert files(root, "cleanup-reports") == []
    assert replay.pending_reports == 0


@pytest.mark.requirement("B-83")
async def test_the_reporting_instance_is_stamped_at_each_send_and_never_stored(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(report())
    stored = json.loads((root.path / "cleanup-reports" / "report-1.json").read_text())
    assert not {"runnerId", "runnerInstanceId", "part", "parts"} & stored["payload"].keys()

    hub = Hub()
    await drain(await opened(root, instance_id="instance-2"), hub)

    ((_, sent),) = hub.calls
    assert (sent["runnerId"], sent["runnerInstanceId"]) == ("runner-1", "instance-2")
    assert sent["resourceRunnerInstanceId"] == "instance-0"
    assert (sent["part"], sent["parts"]) == (1, 1)


@pytest.mark.requirement("B-83")
async def test_a_large_report_goes_in_parts_and_its_file_when_all_are_acknowledged(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(report(resources=400))
    lost_once: list[bool] = []

    def answer(method: str, payload: Mapping[str, Any]) -> object:
        if payload["part"] == 3 and not lost_once:
            lost_once.append(True)
            assert files(root, "cleanup-reports") == ["report-1.json"]
            return HubConnectionLost("cannot tell")
        return PERSISTED

    hub = Hub(answer)
    await drain(replay, hub)

    parts = [payload["part"] for _, payload in hub.calls]
    last = hub.calls[-1][1]["parts"]
    assert parts == [1, 2, 3, *range(1, last + 1)]
    assert all(measured_size_bytes(dict(payload)) <= MAX_MESSAGE_BYTES for _, payload in hub.calls)
    assert sum(len(payload["resources"]) for _, payload in hub.calls[3:]) == 400
    assert files(root, "cleanup-reports") == []


@pytest.mark.requirement("B-07")
async def test_a_lost_acknowledgement_is_sent_again_on_the_next_connection(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(result(1))
    first = Hub(lambda method, payload: HubConnectionLost("cannot tell whether it arrived"))

    def gone(method: str, payload: Mapping[str, Any]) -> object:
        return HubUnavailable("no connection") if len(first.calls) > 1 else HubConnectionLost("cut")

    first.answer = gone
    await replay.run(first.invoke)
    assert replay.pending == 1

    second = Hub(lambda method, payload: {"accepted": True, "disposition": "duplicate"})
    await drain(replay, second)
    assert second.calls == first.calls[:1]
    assert files(root) == []


@pytest.mark.requirement("B-07")
async def test_a_restart_sends_what_is_left_in_the_order_of_creation(root: StateRoot) -> None:
    replay = await opened(root)
    for n in (1, 2, 3):
        await replay.put(event(n))
    await replay.put(result(1))
    await replay.put(report())

    hub = Hub()
    again = await opened(root)
    assert again.pending == 5
    await drain(again, hub)

    events = [payload["sequence"] for method, payload in hub.calls if "sequence" in payload]
    assert events == [1, 2, 3]
    assert {method for method, _ in hub.calls[:3]} == {
        "SubmitDispatchEvent",
        "SubmitDispatchResult",
        "SubmitCleanupReport",
    }


@pytest.mark.requirement("B-84")
async def test_an_event_is_sent_only_after_the_acknowledgement_of_the_one_before(
    replay: Replay,
) -> None:
    for n in (1, 2):
        await replay.put(event(n))
        await replay.put(event(n, "a2"))
    hub = Hub()
    hub.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay.run, hub.invoke)
        await hub.until(lambda: len(hub.calls) == 2)
        await anyio.wait_all_tasks_blocked()
        assert {payload["sequence"] for _, payload in hub.calls} == {1}
        hub.gate.set()
        await replay.wait_empty()
        tasks.cancel_scope.cancel()
    assert [payload["sequence"] for _, payload in hub.calls[2:]] == [2, 2]


@pytest.mark.requirement("B-07")
async def test_at_most_32_are_in_flight(replay: Replay) -> None:
    async with anyio.create_task_group() as puts:
        for n in range(MAX_IN_FLIGHT + 10):
            puts.start_soon(replay.put, report(f"report-{n}"))
    hub = Hub()
    hub.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay.run, hub.invoke)
        await hub.until(lambda: hub.under_way == MAX_IN_FLIGHT)
        await anyio.wait_all_tasks_blocked()
        hub.gate.set()
        await replay.wait_empty()
        tasks.cancel_scope.cancel()
    assert hub.most_under_way == MAX_IN_FLIGHT
    assert len(hub.calls) == MAX_IN_FLIGHT + 10


@pytest.mark.requirement("B-07")
async def test_what_the_hub_rejects_is_kept_for_the_operator_with_the_reason(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(report())
    await replay.put(event(1))
    await drain(replay, Hub(lambda method, payload: REJECTED))
    assert files(root) == files(root, "cleanup-reports") == []
    kept = json.loads((root.path / "cleanup-reports/rejected/report-1.json").read_text())
    assert kept["rejection"] == {"reason": "stale_fence", "detail": ""}
    assert kept["payload"]["reportId"] == "report-1"
    assert len(files(root, "outbox/rejected")) == 1
    assert (await opened(root)).pending == 0


@pytest.mark.requirement("B-07")
@pytest.mark.parametrize(
    "first", [HubError("its database is away"), {"accepted": True}, "nonsense", None]
)
async def test_an_error_is_no_acknowledgement(
    root: StateRoot, replay: Replay, first: object
) -> None:
    await replay.put(result(1))
    answers = [first, PERSISTED]
    hub = Hub(lambda method, payload: answers.pop(0))
    await drain(replay, hub)
    assert len(hub.calls) == 2
    assert files(root) == []


@pytest.mark.requirement("B-84")
async def test_an_event_that_the_hub_fails_on_does_not_hold_up_the_result(replay: Replay) -> None:
    await replay.put(event(1))
    await replay.put(result(1))
    told = anyio.Event()

    def answer(method: str, payload: Mapping[str, Any]) -> object:
        if method == "SubmitDispatchEvent":
            return HubError("cannot store events")
        told.set()
        return PERSISTED

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay.run, Hub(answer).invoke)
        await told.wait()
        tasks.cancel_scope.cancel()
    assert replay.pending >= 1


@pytest.mark.requirement("B-07")
async def test_the_same_message_put_again_is_one(root: StateRoot, replay: Replay) -> None:
    async with anyio.create_task_group() as puts:
        for _ in range(5):
            puts.start_soon(replay.put, result(1))
    again = await opened(root)
    await again.put(result(1))
    assert again.pending == 1
    assert len(files(root)) == 1


@pytest.mark.requirement("B-07")
async def test_a_later_revision_replaces_an_unsent_one_that_tells_the_same(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(result(1))
    await replay.put(result(2))
    assert len(files(root)) == 1
    hub = Hub()
    await drain(replay, hub)
    assert [payload["revision"] for _, payload in hub.calls] == [2]


@pytest.mark.requirement("B-07")
async def test_a_revision_that_tells_another_outcome_replaces_nothing(replay: Replay) -> None:
    await replay.put(result(1, "failed"))
    await replay.put(result(2, "succeeded"))
    hub = Hub()
    await drain(replay, hub)
    assert [payload["revision"] for _, payload in hub.calls] == [1, 2]


async def test_a_message_damaged_on_disk_is_set_aside_and_the_others_go(
    root: StateRoot, replay: Replay
) -> None:
    await replay.put(event(1))
    await replay.put(result(1))
    for path in (root.path / "outbox").glob("*event*.json"):
        path.write_bytes(b"\0" * 200)
    hub = Hub()
    await drain(replay, hub)
    assert [method for method, _ in hub.calls] == ["SubmitDispatchResult"]
    (left,) = files(root)
    assert left.endswith(".suspect")


@pytest.mark.requirement("B-24")
async def test_a_message_that_cannot_be_written_was_never_put(
    root: StateRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(MessageStore):
        async def write(self, entry: Entry, payload: Mapping[str, Any]) -> None:
            raise DiskUnusable("cannot write: no space left")

    full = FullDisk(root.path / "outbox", root.path / "cleanup-reports")
    replay = Replay(full, SystemClock(), runner_id="runner-1", runner_instance_id="i")
    with pytest.raises(DiskUnusable):
        await replay.put(event(1))
    assert replay.pending == 0
    await replay.wait_empty()


async def test_a_message_too_large_for_the_hub_is_refused_when_it_is_put(replay: Replay) -> None:
    payload = {"dispatchId": "d1", "succeeded": True, "truncated": False, "output": "x" * 40_000}
    with pytest.raises(RefusedError) as refused:
        await replay.put(Message("d1", "SubmitLegacyResult", payload))
    assert refused.value.code == "message_too_large"
    assert replay.pending == 0


@pytest.mark.requirement("B-01")
async def test_a_connection_that_is_cancelled_leaves_everything_to_the_next(
    root: StateRoot, replay: Replay
) -> None:
    for n in range(40):
        await replay.put(report(f"report-{n}"))
    hub = Hub()
    hub.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replay.run, hub.invoke)
        await hub.until(lambda: hub.under_way == MAX_IN_FLIGHT)
        tasks.cancel_scope.cancel()
    assert replay.pending == 40
    second = Hub()
    await drain(replay, second)
    assert len({payload["reportId"] for _, payload in second.calls}) == 40
    assert files(root, "cleanup-reports") == []
