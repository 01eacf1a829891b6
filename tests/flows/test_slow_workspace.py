"""A workspace that takes longer to unpack than PID 1 waits for its orders: on real engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import Bridge, real_bridge, wait_for

import processes
from engines import Engine
from forge_bridge.programs import source
from forge_bridge.sandbox import agent
from forge_edges.git_stores import GitStores

WAIT_MS = 3_000
"""Of PID 1; far longer than the bridge may have to wait for a core."""

IMPATIENT = source("supervisor").replace("INIT_WAIT_MS = 60_000", f"INIT_WAIT_MS = {WAIT_MS}")
PIECE_BYTES = 512

pytestmark = pytest.mark.engine("d26", "r26")


def unpack_slowly(
    monkeypatch: pytest.MonkeyPatch, between_pieces: Callable[[], Awaitable[None]]
) -> None:
    """Hand the archive over in small pieces, with this between every two."""
    whole = GitStores.workspace_archive

    async def slowly(*arguments: Any, **more: Any) -> AsyncGenerator[bytes]:
        async with aclosing(whole(*arguments, **more)) as chunks:
            async for chunk in chunks:
                for start in range(0, len(chunk), PIECE_BYTES):
                    yield chunk[start : start + PIECE_BYTES]
                    await between_pieces()

    monkeypatch.setattr(GitStores, "workspace_archive", slowly)


async def run(bridge: Bridge, mark: str, *argv: str) -> dict[str, Any]:
    """The result of an attempt whose PID 1 has the mark in its command line."""
    sandbox = {"supervisor_source": f"{IMPATIENT}\n# {mark}\n"}
    attempt_id = await bridge.run(*argv, sandbox=sandbox)
    return await bridge.hub.over(attempt_id)


@pytest.mark.requirement("B-70")
async def test_pid_1_waits_for_as_long_as_the_workspace_takes(
    tmp_path: Path, engine: Engine, runner_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "PREPARING_MS", WAIT_MS // 10)
    waited = False

    async def a_while_at_first() -> None:
        nonlocal waited
        if not waited:
            waited = True
            await anyio.sleep(2 * WAIT_MS / 1000)  # what is slow here is the project

    unpack_slowly(monkeypatch, a_while_at_first)
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        result = await run(bridge, runner_id, "sh", "-c", "git status && git fsck")
        assert result["outcome"] == "succeeded", result
        assert result["timings"]["workspace"]["durationMs"] > 2 * WAIT_MS
        await bridge.until_idle()


@pytest.mark.requirement("B-70")
async def test_a_pid_1_that_ends_while_the_workspace_is_unpacked_ends_the_attempt_at_once(
    tmp_path: Path, engine: Engine, runner_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "PREPARING_MS", WAIT_MS // 10)
    unpack_slowly(monkeypatch, anyio.sleep_forever)
    answer = '                self._outbox.control(type="ready", version=1, pid=os.getpid())\n'
    ends_at_once = IMPATIENT.replace(answer, "                os._exit(9)\n")
    assert ends_at_once != IMPATIENT
    sandbox = {"supervisor_source": ends_at_once, "supervisor_ready_ms": 2 * WAIT_MS}
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        attempt_id = await bridge.run("true", sandbox=sandbox)
        result = await bridge.hub.over(attempt_id)
        assert result["failureCode"] == "supervisor_lost"
        assert "ended with 9" in result["summary"]
        await bridge.until_idle()


@pytest.mark.requirement("B-70")
async def test_pid_1_does_not_wait_for_a_bridge_that_says_nothing(
    tmp_path: Path, engine: Engine, runner_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that died or stands still; here it goes on, so that it can be asked."""
    monkeypatch.setattr(agent, "PREPARING_MS", 600_000)
    went = False

    async def until_pid_1_has_gone() -> None:
        # The engine says nothing of a container into which it unpacks; the kernel does.
        nonlocal went
        if went:
            return
        await wait_for(lambda: processes.saying(runner_id))
        await wait_for(lambda: not processes.saying(runner_id))
        went = True

    unpack_slowly(monkeypatch, until_pid_1_has_gone)
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        result = await run(bridge, runner_id, "true")
        assert went
        assert result["failureCode"] == "supervisor_lost"
        assert "ended with 75" in result["summary"]
        await bridge.until_idle()
