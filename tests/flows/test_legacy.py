"""Protocol v1: one command on the host, one answer, and only where it is allowed (B-03)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from bridge_parts import Bridge, memory_bridge, wait_for

from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes

ALLOWED: dict[str, Any] = {"allow_host_execution": True}


def dispatch(dispatch_id: str, *command: str, **more: Any) -> dict[str, Any]:
    return {
        "dispatchId": dispatch_id,
        "repository": "sample",
        "command": list(command),
        "env": {},
        "timeoutMs": 20_000,
        **more,
    }


async def result_of(bridge: Bridge, *command: str, **more: Any) -> dict[str, Any]:
    """Dispatch, and the answer."""
    message = dispatch(f"d{len(bridge.hub.calls)}", *command, **more)
    bridge.hub.send("Dispatch", message)
    return await bridge.hub.next("SubmitLegacyResult", dispatchId=message["dispatchId"])


def is_alive(pid_file: Path) -> bool:
    """Whether the process that wrote its id there still is one."""
    try:
        os.kill(int(pid_file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


@pytest.mark.requirement("B-03", "B-19")
async def test_nothing_runs_on_the_host_unless_the_operator_says_so(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    async with memory_bridge(tmp_path) as bridge:
        result = await result_of(bridge, "touch", str(trace))
        assert not result["succeeded"]
        assert "host_execution_denied" in result["error"]
        assert "FORGE_ALLOW_HOST_EXECUTION" in result["error"]
        assert not trace.exists()


@pytest.mark.requirement("B-03")
async def test_a_command_runs_in_the_repository_and_says_how_it_ended(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, **ALLOWED) as bridge:
        script = "cat README; echo $GREETING; echo $FORGE_API_TOKEN >&2; exit 3"
        result = await result_of(bridge, "sh", "-c", script, env={"GREETING": "hello"})
        assert (result["succeeded"], result["exitCode"]) == (False, 3)
        assert result["output"] == "A sample.\nhello\n\n"
        result = await result_of(bridge, "true")
        assert (result["succeeded"], result["exitCode"], result["output"]) == (True, 0, "")
        result = await result_of(bridge, "no-such-program")
        assert not result["succeeded"]
        result = await result_of(bridge, "true", repository="unheard-of")
        assert "unknown_repository" in result["error"]
        bridge.drain(True)
        assert "draining" in (await result_of(bridge, "true"))["error"]
        await bridge.until_idle()


@pytest.mark.requirement("B-03", "B-21")
async def test_it_takes_one_slot(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, max_concurrent_sandboxes=1, **ALLOWED) as bridge:
        hub, pid = bridge.hub, tmp_path / "pid"
        hub.send("Dispatch", dispatch("first", "sh", "-c", f"echo $$ > {pid}; exec sleep 30"))
        await wait_for(lambda: is_alive(pid))
        assert "capacity_slots" in (await result_of(bridge, "true"))["error"]
        offer = bridge.offer()
        hub.send("Offer", offer)
        assert (await hub.decision(offer))["reasonCode"] == "capacity_slots"
        hub.send("Cancel", {"attemptId": "first", "fence": 0})
        result = await hub.next("SubmitLegacyResult", dispatchId="first")
        assert (result["succeeded"], result["error"]) == (False, "cancelled")
        await bridge.until_idle()
        assert not is_alive(pid)
        assert (await result_of(bridge, "true"))["succeeded"]


@pytest.mark.requirement("B-03")
async def test_the_same_dispatch_again_changes_nothing(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, **ALLOWED) as bridge:
        hub, runs, gate = bridge.hub, tmp_path / "runs", tmp_path / "gate"
        script = f"echo x >> {runs}; until test -e {gate}; do sleep 0.02; done"
        message = dispatch("again", "sh", "-c", script)
        hub.send("Dispatch", message)
        await wait_for(runs.exists)
        hub.send("Dispatch", message)
        hub.send("Dispatch", {**message, "command": "not a list"})
        gate.touch()
        result = await hub.next("SubmitLegacyResult", dispatchId="again")
        assert result["succeeded"]
        await bridge.until_idle()
        hub.send("Dispatch", message)
        hub.send("Dispatch", {**message, "timeoutMs": 0})
        await result_of(bridge, "true")
        assert len(hub.of("SubmitLegacyResult", dispatchId="again")) == 1
        assert runs.read_text() == "x\n"


@pytest.mark.requirement("B-03")
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"command": "true"}, "command"),
        ({"command": []}, "command"),
        ({"command": ["true\0"]}, "command"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"timeoutMs": 0}, "timeoutMs"),
        ({"timeoutMs": "soon"}, "timeoutMs"),
        ({"repository": None}, "repository"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_malformed_dispatch_is_reported_back(
    tmp_path: Path, wrong: dict[str, Any], named: str
) -> None:
    async with memory_bridge(tmp_path, **ALLOWED) as bridge:
        result = await result_of(bridge, "true", **wrong)
        assert not result["succeeded"]
        assert result["error"].startswith(f"malformed: cannot read Dispatch: {named}")
        bridge.hub.send("Dispatch", {"dispatchId": "../x"})
        bridge.hub.send("Dispatch", [])
        assert (await result_of(bridge, "true"))["succeeded"]
        assert len(bridge.hub.of("SubmitLegacyResult")) == 2


@pytest.mark.requirement("B-03")
async def test_a_timeout_ends_the_whole_tree(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, **ALLOWED) as bridge:
        pid = tmp_path / "pid"
        script = f"(setsid sh -c 'echo $$ > {pid}; exec sleep 60' &) ; sleep 60"
        result = await result_of(bridge, "sh", "-c", script, timeoutMs=700)
        assert (result["succeeded"], result.get("exitCode")) == (False, None)
        assert result["error"] == "timed out after 700 ms"
        assert pid.exists()
        assert not is_alive(pid)


@pytest.mark.requirement("B-03")
@pytest.mark.parametrize(
    "text",
    ["plain ", r"\u00e9\n\"\x01", r"\udcff"],
    ids=["plain", "escaped", "no UTF-8"],
)
async def test_output_is_cut_to_what_a_message_may_hold(tmp_path: Path, text: str) -> None:
    async with memory_bridge(tmp_path, **ALLOWED) as bridge:
        write = f'sys.stdout.buffer.write("{text}".encode("utf-8", "surrogateescape") * 100000)'
        result = await result_of(bridge, sys.executable, "-c", f"import sys; {write}")
        assert result["succeeded"]
        assert result["truncated"]
        assert len(result["output"]) > 4_000
        assert measured_size_bytes(result) <= MAX_MESSAGE_BYTES


@pytest.mark.requirement("B-03")
async def test_a_lost_hub_lets_it_run_and_gets_the_answer_later(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, **ALLOWED) as bridge:
        hub, gate, begun = bridge.hub, tmp_path / "gate", tmp_path / "begun"
        script = f"touch {begun}; until test -e {gate}; do sleep 0.02; done"
        hub.send("Dispatch", dispatch("patient", "sh", "-c", script))
        await wait_for(begun.exists)
        hub.answers["RegisterRunner"] = hub.never
        hub.drop()
        await wait_for(lambda: not bridge.runner.hub.is_online)
        gate.touch()
        await bridge.until_idle()
        assert not hub.of("SubmitLegacyResult")
        hub.answers.clear()
        hub.drop()
        assert (await hub.next("SubmitLegacyResult", dispatchId="patient"))["succeeded"]
