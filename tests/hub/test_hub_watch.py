"""The event stream: one shape live and later, no gap and no duplicate, and when it ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
from scripted_bridge import PATIENCE_S, ScriptedBridge, Stage, on_stage, removed

from forge_hub.api import event_stream
from forge_hub.api.event_stream import Cursor
from forge_hub.api.models import CleanupReportView, EventView

CHUNK = {"stream": "stdout", "text": "before\n"}
LAST_WORDS = ("teardown.finished", "report", "revision 2")


class Told(NamedTuple):
    kind: str
    id: str | None
    data: dict[str, Any]

    @property
    def brief(self) -> str:
        """What it is about, in a word."""
        if self.kind == "cleanup":
            return "cleanup"
        return str(self.data.get("type") or self.data.get("revision") or self.data.get("state"))


class Watch:
    """A reader of one server-sent event stream."""

    def __init__(self, stage: Stage, session_id: str, after: str | None = None) -> None:
        headers = {"Last-Event-ID": after} if after else {}
        path = f"/api/v1/sessions/{session_id}/events"
        self._stream = stage.api.stream("GET", path, headers=headers)

    async def __aenter__(self) -> Watch:
        response = await self._stream.__aenter__()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        self._lines = response.aiter_lines()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    async def next(self, kind: str) -> Told:
        """The next item of a kind."""
        with anyio.fail_after(PATIENCE_S):
            while (item := await self._item()) is not None:
                if item.kind == kind:
                    return item
        raise AssertionError(f"the stream ended before a {kind}")

    async def rest(self) -> list[Told]:
        """What comes until the stream ends."""
        told = []
        with anyio.fail_after(PATIENCE_S):
            while (item := await self._item()) is not None:
                told.append(item)
        return told

    async def _item(self) -> Told | None:
        fields: dict[str, str] = {}
        async for line in self._lines:
            if not line and fields:
                data = httpx.Response(200, content=fields["data"]).json()
                return Told(fields["event"], fields.get("id"), data)
            name, _, value = line.partition(": ")
            fields |= {name: value} if name else {}
        return None


async def all_of(stage: Stage, session_id: str, after: str | None = None) -> list[Told]:
    async with Watch(stage, session_id, after) as watch:
        return await watch.rest()


def kept(told: list[Told]) -> list[tuple[str, int, dict[str, Any]]]:
    """What must come exactly once: the items that move the cursor, in an order of their own."""
    moving = [item for item in told if item.id is not None]
    return sorted((item.kind, item.data["ordinal"], item.data) for item in moving)


async def say(bridge: ScriptedBridge, start: dict[str, Any], word: str, sequence: int) -> None:
    """One of the last words of a runner."""
    match word:
        case "report":
            answer = await bridge.cleanup_report(start)
        case "revision 2":
            answer = await bridge.result(start, revision=2)
        case _:
            answer = await bridge.event(start, f"e-{sequence}", word, sequence=sequence)
    assert answer["disposition"] == "persisted", answer


async def ended(stage: Stage, *last_words: str) -> tuple[str, ScriptedBridge, dict[str, Any]]:
    """A session whose agent has ended, and what its runner has said after that."""
    bridge = await stage.bridge()
    session_id = await stage.dispatch()
    start = await bridge.take_attempt()
    await say(bridge, start, "agent.started", 1)
    await say(bridge, start, "teardown.started", 2)
    await bridge.result(start)
    for word in last_words:
        await say(bridge, start, word, 3)
    return session_id, bridge, start


@pytest.mark.requirement("B-84", "B-85")
async def test_watchers_see_what_was_and_what_happens(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        start = await bridge.take_attempt()
        await say(bridge, start, "agent.started", 1)
        await bridge.event(start, "s1", "log", CHUNK, streamSequence=1)
        async with Watch(stage, session_id) as watch:
            chunk = await watch.next("log")
            assert (chunk.id, chunk.data["payload"]["text"]) == (None, "before\n")
            assert (await watch.next("event")).brief == "agent.started"
            assert (await watch.next("state")).data == {"state": "running", "cleanup": "pending"}
            await bridge.event(start, "s2", "log", {**CHUNK, "text": "after\n"}, streamSequence=2)
            assert (await watch.next("log")).data["streamSequence"] == 2
            await say(bridge, start, "teardown.started", 2)
            assert (await watch.next("event")).brief == "teardown.started"
            await bridge.result(start)
            first = await watch.next("result")
            assert (first.data["attemptId"], first.data["revision"]) == (start["attemptId"], 1)
            assert (await watch.next("state")).data["state"] == "succeeded"
            for word in LAST_WORDS:
                await say(bridge, start, word, 3)
            told = [item.brief for item in await watch.rest()]
        assert sorted(told) == sorted(
            ["teardown.finished", "cleanup", "succeeded", "2", "succeeded"]
        )


@pytest.mark.requirement("B-84", "B-85")
@pytest.mark.parametrize("order", [*itertools.permutations(LAST_WORDS)], ids=" ".join)
async def test_the_stream_ends_when_the_last_word_has_come_whichever_it_is(
    sqlite_url: str, order: tuple[str, ...]
) -> None:
    async with on_stage(sqlite_url) as stage:
        session_id, bridge, start = await ended(stage)
        async with Watch(stage, session_id) as watch:
            await watch.next("state")
            for word in order:
                await say(bridge, start, word, 3)
            told = await watch.rest()
        assert told[-1] == ("end", None, {"state": "succeeded", "cleanup": "complete"})
        briefs = [item.brief for item in told[:-1]]
        assert (
            briefs.count("teardown.finished") == briefs.count("cleanup") == briefs.count("2") == 1
        )
        later = await all_of(stage, session_id)
        assert later[-1] == told[-1]


@pytest.mark.requirement("B-84", "B-85")
async def test_what_is_told_live_is_what_is_told_later(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        async with Watch(stage, session_id) as watch:
            await watch.next("state")
            start = await bridge.take_attempt()
            item = {"exitCode": 0}
            await bridge.event(start, "e1", "agent.exited", item, sequence=1)
            halves = [removed("c1")], [removed("c2")]
            for part, resources in enumerate(halves, 1):
                await bridge.cleanup_report(start, part=part, parts=2, resources=resources)
            await say(bridge, start, "teardown.finished", 2)
            await bridge.result(start, revision=2)
            live = kept(await watch.rest())
        later = kept(await all_of(stage, session_id))
        assert live == later
        assert [kind for kind, _, _ in later] == ["cleanup", "event", "event"]
        for kind, _, data in later:
            model = CleanupReportView if kind == "cleanup" else EventView
            assert model.model_validate(data).to_wire() == data
        assert [r["id"] for r in later[0][2]["resources"]] == ["c1", "c2"]


@pytest.mark.requirement("B-85")
async def test_who_comes_back_with_a_cursor_misses_nothing_and_hears_nothing_twice(
    database_url: str,
) -> None:
    async with on_stage(database_url) as stage:
        session_id, bridge, start = await ended(stage, "report")
        await bridge.cleanup_report(start, reportId="report-2")
        async with Watch(stage, session_id) as watch:
            first = [await watch.next("event") for _ in range(2)]
            first += [await watch.next("cleanup") for _ in range(2)]
        for word in LAST_WORDS[::2]:
            await say(bridge, start, word, 3)
        whole = kept(await all_of(stage, session_id))
        assert len(whole) == 5
        for cut, item in enumerate(first, 1):
            told = await all_of(stage, session_id, after=item.id)
            assert kept(first[:cut] + told) == whole
            assert {"result", "state"} <= {one.kind for one in told}
        assert await all_of(stage, session_id, after="nonsense") == await all_of(stage, session_id)


@pytest.mark.requirement("B-85")
async def test_a_crowd_of_events_is_told_once_and_in_order(database_url: str) -> None:
    count = 600
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        start = await bridge.take_attempt()
        async with Watch(stage, session_id) as watch, anyio.create_task_group() as tasks:
            await watch.next("state")
            for number in range(1, count + 1):
                tasks.start_soon(say, bridge, start, "agent.started", number)
            live = [await watch.next("event") for _ in range(count)]
        assert {item.data["sequence"] for item in live} == set(range(1, count + 1))
        ordinals = [item.data["ordinal"] for item in live]
        assert ordinals == sorted(set(ordinals))
        async with Watch(stage, session_id) as watch:
            assert [await watch.next("event") for _ in range(count)] == live


@pytest.mark.requirement("B-85")
async def test_a_runner_that_never_says_its_last_word_is_not_waited_for_for_ever(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "GRACE_S", 0.05)
    async with on_stage(sqlite_url) as stage:
        session_id, _, _ = await ended(stage, "report")
        told = await all_of(stage, session_id)
        assert (told[-1].kind, told[-1].data["cleanup"]) == ("end", "complete")


async def test_what_never_started_ends_at_once(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        session_id = await stage.dispatch()
        async with Watch(stage, session_id) as watch:
            await watch.next("state")
            await stage.api.post(f"/api/v1/sessions/{session_id}/cancel")
            told = await watch.rest()
        state = {"state": "cancelled", "failureCode": "cancelled"}
        assert told == [("state", None, state), ("end", None, state)]


@pytest.mark.requirement("B-85")
async def test_while_the_cleanup_is_pending_there_is_no_end(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        session_id, bridge, start = await ended(stage, "teardown.finished")
        async with Watch(stage, session_id) as watch:
            assert (await watch.next("state")).data["cleanup"] == "pending"
            stage.hub.board.feed.close()
            assert await watch.rest() == []
        assert (await bridge.cleanup_report(start))["accepted"]


async def test_a_stop_of_the_hub_ends_watchers_at_once(sqlite_url: str) -> None:
    async with on_stage(sqlite_url) as stage:
        await stage.bridge()
        session_id = await stage.dispatch()
        async with Watch(stage, session_id) as watch:
            await watch.next("state")
            stage.hub.board.feed.close()
            assert "end" not in [item.kind for item in await watch.rest()]
            answer = await stage.api.get(f"/api/v1/sessions/{session_id}/events")
            assert answer.status_code == 503
            assert answer.json()["code"] == "unavailable"
            assert answer.headers["Retry-After"] == "5"


async def test_a_stopped_hub_leaves_no_task_and_no_thread(sqlite_url: str) -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    async with on_stage(sqlite_url) as stage:
        await stage.bridge()
        async with Watch(stage, await stage.dispatch()) as watch:
            await watch.next("state")
    assert asyncio.all_tasks() == tasks
    assert {t for t in threading.enumerate() if "AnyIO worker" not in t.name} <= threads


@pytest.mark.parametrize(
    ("text", "cursor"),
    [
        ("7.3", Cursor(7, 3)),
        ("7", Cursor(7, 0)),
        (None, Cursor()),
        ("-1.2", Cursor()),
        ("1.2.3", Cursor()),
        ("9" * 40, Cursor()),
        ("\N{ARABIC-INDIC DIGIT ONE}", Cursor()),
    ],
)
def test_a_cursor_that_is_none_is_the_beginning(text: str | None, cursor: Cursor) -> None:
    assert Cursor.parse(text) == cursor
    assert Cursor.parse(str(cursor)) == cursor
