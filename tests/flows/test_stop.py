"""Stopping in order: what runs ends, is removed, and the hub hears of it first (B-01, B-87)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from bridge_parts import git, make_repository, memory_bridge, real_bridge, settings_for, wait_for
from memory_engine import Container, MemoryEngine
from scripted_hub import ScriptedHub
from test_legacy import dispatch

from engines import Engine
from forge_bridge.app import open_bridge
from forge_bridge.repositories import add_repository
from forge_core.errors import DiskUnusable
from forge_edges.ledger_file import LedgerFile


async def deaf_agent(container: Container) -> int:
    """Takes its whole grace, so that there is time to see how the bridge stops."""
    container.frame("ready")
    await container.read_line()
    container.frame("started")
    await anyio.sleep_forever()
    return 0


@pytest.mark.requirement("B-01", "B-83")
async def test_what_runs_ends_and_is_reported_before_the_connection_goes(tmp_path: Path) -> None:
    engine = MemoryEngine()
    engine.programs["agent"] = deaf_agent
    async with memory_bridge(
        tmp_path, engine=engine, max_concurrent_sandboxes=4, allow_host_execution=True
    ) as bridge:
        hub = bridge.hub
        running = await bridge.run("wait")
        await hub.event(running, "agent.started")
        reserved = (await bridge.accept())["attemptId"]
        begun = tmp_path / "begun"
        script = f"touch {begun}; exec sleep 60"
        hub.send("Dispatch", dispatch("legacy", "sh", "-c", script))
        await wait_for(begun.exists)
        bridge.stop.set()
        late = bridge.offer()
        await hub.next("Heartbeat", state="stopping")
        hub.send("Offer", late)
        with anyio.fail_after(15):
            await bridge.stopped.wait()
        for attempt_id in (running, reserved):
            (result,) = hub.of("SubmitDispatchResult", attemptId=attempt_id, cleanup="complete")
            assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
        (legacy,) = hub.of("SubmitLegacyResult", dispatchId="legacy")
        assert not legacy["succeeded"]
        (report,) = hub.of("SubmitCleanupReport", attemptId=running)
        assert {r["outcome"] for r in report["resources"]} == {"removed"}
        assert engine.is_empty
        assert bridge.is_idle
        (decision,) = hub.of("SubmitOfferDecision", offerId=late["offerId"])
        assert decision["reasonCode"] == "stopping"
        assert not hub.is_connected


@pytest.mark.requirement("B-01", "B-83")
@pytest.mark.parametrize("how", ["away", pytest.param("silent", marks=pytest.mark.slow)])
async def test_a_hub_that_is_not_there_holds_up_no_stop(tmp_path: Path, how: str) -> None:
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("wait")
        await hub.event(attempt_id, "agent.started")
        if how == "away":
            hub.answers["RegisterRunner"] = hub.never
            hub.drop()
            await wait_for(lambda: not bridge.runner.hub.is_online)
        else:
            hub.fall_silent()
        bridge.stop.set()
        with anyio.fail_after(3 if how == "away" else 14):
            await bridge.stopped.wait()
        assert engine.is_empty
        assert bridge.is_idle
    outbox = list((tmp_path / "state" / "outbox").glob("*.json"))
    assert outbox, "what the hub has not acknowledged waits for the next start"
    async with memory_bridge(tmp_path) as bridge:
        result = await bridge.hub.over(attempt_id)
        assert result["failureCode"] == "bridge_stopped"
        assert (await bridge.hub.next("SubmitCleanupReport"))["attemptId"] == attempt_id


@pytest.mark.requirement("B-01", "B-03")
async def test_a_v1_command_ends_and_is_answered_before_the_connection_goes(
    tmp_path: Path,
) -> None:
    async with memory_bridge(tmp_path, allow_host_execution=True) as bridge:
        begun = tmp_path / "begun"
        script = f"touch {begun}; exec sleep 60"
        bridge.hub.send("Dispatch", dispatch("legacy", "sh", "-c", script))
        await wait_for(begun.exists)
        bridge.stop.set()
        with anyio.fail_after(15):
            await bridge.stopped.wait()
        (result,) = bridge.hub.of("SubmitLegacyResult")
        assert (result["succeeded"], result["error"]) == (False, "cancelled")


@pytest.mark.requirement("B-01", "B-24")
async def test_a_disk_that_cannot_be_written_holds_up_no_stop_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tried = LedgerFile._write, 0

    def fail(ledger: LedgerFile, bodies: list[bytes]) -> None:
        nonlocal tried
        tried += 1
        if tried <= 5:
            raise DiskUnusable("cannot write: no space left")
        write(ledger, bodies)

    async with (
        memory_bridge(tmp_path, attend=False) as bridge,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(bridge.service.connect_once)
        await bridge.hub.online()
        attempt_id = await bridge.run("wait")
        await bridge.hub.event(attempt_id, "agent.started")
        monkeypatch.setattr(LedgerFile, "_write", fail)
        bridge.runner.tasks.cancel_scope.cancel()
        await anyio.sleep_forever()
    assert tried == 1, "the outcome is the next start's to record"
    monkeypatch.undo()
    async with memory_bridge(tmp_path) as bridge:
        assert (await bridge.hub.over(attempt_id))["failureCode"] == "bridge_stopped"


@pytest.mark.requirement("B-01")
async def test_no_grace_holds_up_a_stop_at_once(tmp_path: Path) -> None:
    asked = anyio.Event()

    async def stubborn_agent(container: Container) -> int:
        container.frame("ready")
        await container.read_line()
        container.frame("started")
        while b"cancel" not in await container.read_line():
            pass
        asked.set()
        await anyio.sleep_forever()
        return 0

    engine = MemoryEngine()
    engine.programs["agent"] = stubborn_agent
    async with (
        memory_bridge(
            tmp_path, engine=engine, attend=False, sandbox_kill_grace_seconds=60
        ) as bridge,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(bridge.service.connect_once)
        await bridge.hub.online()
        attempt_id = await bridge.run("wait")
        await bridge.hub.event(attempt_id, "agent.started")
        bridge.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1})
        await asked.wait()
        bridge.runner.tasks.cancel_scope.cancel()
        await anyio.sleep_forever()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        assert (await bridge.hub.over(attempt_id))["cleanup"] == "complete"
        assert engine.is_empty


@pytest.mark.requirement("B-01", "B-82", "B-83")
async def test_no_teardown_holds_up_a_stop_at_once(tmp_path: Path) -> None:
    engine, asked = MemoryEngine(), anyio.Event()
    remove_container = engine.remove_container

    async def never(_container: str) -> None:
        asked.set()
        await anyio.sleep_forever()

    engine.remove_container = never  # type: ignore[assignment, method-assign]
    with anyio.fail_after(20):
        async with (
            memory_bridge(tmp_path, engine=engine, attend=False) as bridge,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(bridge.service.connect_once)
            await bridge.hub.online()
            attempt_id = await bridge.run("true")
            await asked.wait()
            bridge.runner.tasks.cancel_scope.cancel()
            await anyio.sleep_forever()
    engine.remove_container = remove_container  # type: ignore[method-assign]
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        result = await bridge.hub.over(attempt_id)
        assert result["outcome"] == "succeeded"
        report = await bridge.hub.next("SubmitCleanupReport", attemptId=attempt_id)
        assert "forge-agent" in str(report)
        assert engine.is_empty


SLOW_TO_STOP = """
import contextlib, os, sys, threading
import anyio
from forge_bridge import app
from forge_bridge.settings import default_bridge_service_config

class Bridge:
    async def run(self, stop):
        print("open", flush=True)
        await stop.wait()
        print("stopping", flush=True)
        if sys.argv[1] == "obliging":
            await anyio.sleep_forever()
        if sys.argv[1] == "shielded":
            with anyio.CancelScope(shield=True):
                await anyio.sleep_forever()
        if sys.argv[1] == "threaded":
            wait = threading.Event().wait
            await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)

@contextlib.asynccontextmanager
async def open_bridge(settings, **_):
    if sys.argv[1] == "opening":
        print("open", flush=True)
        await anyio.sleep_forever()
    yield Bridge()

app.open_bridge = open_bridge
sys.exit(app.run_bridge(default_bridge_service_config()))
"""


@pytest.mark.requirement("B-01")
@pytest.mark.parametrize(
    ("manner", "signals", "status"),
    [
        ("prompt", 1, 0),
        ("opening", 1, 0),
        ("obliging", 2, 1),
        ("shielded", 2, 1),
        ("threaded", 2, 1),
    ],
)
def test_the_second_signal_ends_the_process_whatever_it_is_doing(
    manner: str, signals: int, status: int
) -> None:
    command = [sys.executable, "-c", SLOW_TO_STOP, manner]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for said in (b"open\n", b"stopping\n")[:signals]:
                assert process.stdout.readline() == said
                process.send_signal(signal.SIGTERM)
            assert process.wait(10) == status
        finally:
            process.kill()


@pytest.mark.engine("d26")
@pytest.mark.requirement("B-01", "B-05", "B-80")
async def test_a_real_bridge_from_open_to_stop(
    tmp_path: Path, engine: Engine, runner_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.base_url)
    async with ScriptedHub().running() as hub:
        settings = settings_for(
            tmp_path, hub, runner_id=runner_id, agent_tooling_image=engine.tooling_image
        )
        settings.sandbox_state_root.mkdir(mode=0o700)
        commit = make_repository(tmp_path / "clone")
        add_repository(settings.sandbox_state_root, "sample", tmp_path / "clone")
        stop = anyio.Event()
        async with open_bridge(settings) as service, anyio.create_task_group() as tasks:
            tasks.start_soon(service.run, stop)
            registered = await hub.next("RegisterRunner")
            assert registered["capabilities"]["runtimes"] == ["docker"]
            assert registered["capabilities"]["engine"]["version"] == engine.version
            await hub.online()
            stop.set()
        assert not hub.is_connected
        assert git(tmp_path / "clone", "rev-parse", "HEAD") == commit
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        hub = bridge.hub
        attempt_id = await bridge.run("sh", "-c", "echo on; sleep 60")
        await hub.event(attempt_id, "log")
        bridge.stop.set()
        with anyio.fail_after(15):
            await bridge.stopped.wait()
        (result,) = hub.of("SubmitDispatchResult", cleanup="complete")
        assert (result["outcome"], result["failureCode"]) == ("failed", "bridge_stopped")
        wanted = json.dumps({"label": [f"dev.forge.runner-id={runner_id}"]})
        assert engine.api.get("/containers/json", {"all": "1", "filters": wanted}) == []
