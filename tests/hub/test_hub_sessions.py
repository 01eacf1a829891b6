"""The life of a session, from the API to a scripted bridge and back."""

from __future__ import annotations

import pytest
from scripted_bridge import NOW, PERSISTED, on_stage, removed


@pytest.mark.requirement("B-04", "B-84", "B-85", "B-95")
async def test_a_session_runs_from_dispatch_to_a_clean_end(database_url: str) -> None:
    async with on_stage(database_url) as stage:
        bridge = await stage.bridge()
        session_id = await stage.dispatch()
        offer = await bridge.next("Offer")
        assert (offer["sessionId"], offer["fence"]) == (session_id, 1)
        assert offer["runnerInstanceId"] == "i1"
        assert (await stage.session(session_id))["state"] == "offered"

        assert await bridge.decide(offer, "accepted", runtime="docker") == {"accepted": True}
        start = await bridge.next("Start")
        assert start["inputCommit"] == "a" * 40
        assert start["lease"]["ttlMs"] == 60_000
        assert (await stage.session(session_id))["state"] == "running"

        item = {"kind": "container", "id": "c1", "name": "n", "role": "agent", "createdAt": NOW}
        inventory = {"containers": [item]}
        assert await bridge.event(start, "e1", "inventory", inventory, sequence=1) == PERSISTED
        assert await bridge.event(start, "e2", "agent.started", sequence=2) == PERSISTED
        chunk = {"stream": "stdout", "text": "hello\n"}
        assert await bridge.event(start, "s1", "log", chunk, streamSequence=1) == PERSISTED
        assert await bridge.result(start) == PERSISTED

        shown = await stage.session(session_id)
        assert (shown["state"], shown["cleanup"]) == ("succeeded", "pending")
        assert await bridge.cleanup_report(start, resources=[removed("c1")]) == PERSISTED
        assert await bridge.result(start, revision=2) == PERSISTED

        shown = (await stage.api.get(f"/api/v1/sessions/{session_id}/diagnostics")).json()
        assert (shown["session"]["state"], shown["session"]["cleanup"]) == ("succeeded", "complete")
        assert shown["session"]["result"]["revision"] == 2
        assert shown["session"]["result"]["resultCommit"] == "b" * 40
        assert not shown["cleanupPending"]
        assert [e["type"] for e in shown["timeline"]] == ["inventory", "agent.started"]
        assert [i["id"] for i in shown["inventory"]["containers"]] == ["c1"]
        assert shown["cleanupReports"][0]["complete"]
        assert shown["logTail"] == "hello\n"
