"""A host command is bounded, filtered, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from forge_core.errors import RefusedError
from forge_core.ports import HostResult
from forge_edges.host_commands import ProcessHostCommands

pytestmark = pytest.mark.requirement("B-03")

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, f"daemon {os.getpid()} ".encode())
        time.sleep(600)
    os._exit(0)
os.wait()
%s
"""


async def run(*argv: str, timeout_ms: int = 20_000, **more: object) -> HostResult:
    options: dict[str, object] = {"directory": "/", "environment": {}, "max_output_bytes": 10_000}
    return await ProcessHostCommands().run(argv, timeout_ms=timeout_ms, **(options | more))  # type: ignore[arg-type]


async def test_status_and_both_streams_come_back() -> None:
    result = await run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.output, result.timed_out) == (7, b"out\nerr\n", False)


async def test_a_signal_is_told_as_shells_do() -> None:
    assert (await run("sh", "-c", "kill -9 $$")).exit_code == 137


async def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_API_TOKEN", "canary-7f3a")
    monkeypatch.setenv("SOME_SECRET", "canary-7f3a")
    result = await run("env", environment={"WANTED": "yes"})
    assert b"WANTED=yes" in result.output
    assert b"PATH=" in result.output
    assert b"canary-7f3a" not in result.output


async def test_output_beyond_the_cap_is_dropped_and_said() -> None:
    result = await run("sh", "-c", "head -c 3000000 /dev/zero", max_output_bytes=1000)
    assert (len(result.output), result.truncated, result.exit_code) == (1000, True, 0)


@pytest.mark.parametrize(("ending", "timed_out"), [("", False), ("time.sleep(600)", True)])
async def test_a_daemonised_child_dies_with_the_command(ending: str, *, timed_out: bool) -> None:
    result = await run("python3", "-c", DAEMON % ending, timeout_ms=3_000)
    assert result.timed_out is timed_out
    daemon = int(result.output.split()[1])
    assert not Path(f"/proc/{daemon}").exists()


async def test_a_daemon_that_holds_the_pipe_open_does_not_hold_the_result() -> None:
    with anyio.fail_after(10):
        result = await run("sh", "-c", "sleep 600 & echo started")
    assert (result.exit_code, result.output) == (0, b"started\n")


async def test_cancellation_kills_the_tree(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel_when_started() -> None:
                while not pid_file.exists() or not pid_file.read_text().strip():
                    await anyio.sleep(0.01)
                scope.cancel()

            tasks.start_soon(cancel_when_started)
            await run("sh", "-c", f"trap '' TERM; echo $$ > {pid_file}; sleep 600")
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


async def test_a_missing_command_and_a_missing_directory_are_told_apart() -> None:
    result = await run("no-such-command-here")
    assert result.exit_code == 127
    assert b"cannot run no-such-command-here" in result.output
    with pytest.raises(RefusedError, match="cannot run"):
        await run("true", directory="/no/such/directory")
