"""Bridges on which attempts run on the host, and what is to be seen of them there."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bridge_parts import (
    Bridge,
    HastyClock,
    memory_bridge,
    wait_for,
)

from forge_core.labels import runner_filter
from forge_core.wire.codes import Runtime
from forge_edges.host_processes import marks

DAEMON = "setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' >/dev/null 2>&1 & "
STUBBORN = f"trap '' TERM HUP INT; {DAEMON} echo up; while :; do sleep 1; done"


class WallClock(HastyClock):
    """A wall clock that a test steps."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = timedelta()

    def utc(self) -> str:
        now = datetime.fromisoformat(super().utc()) + self.offset
        return now.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def on_host(directory: Path, **more: Any) -> AbstractAsyncContextManager[Bridge]:
    """A bridge without a sandbox, whose operator allows the host."""
    chosen = {"runtimes": (Runtime.HOST,), "allow_host_execution": True, **more}
    return memory_bridge(directory, **chosen)


def permission(ahead: timedelta = timedelta(days=1)) -> dict[str, str]:
    expires_at = (datetime.now(UTC) + ahead).isoformat(timespec="milliseconds")
    return {"reason": "the engine is being replaced", "expiresAt": expires_at}


async def set_fallback(bridge: Bridge, enabled: bool = True) -> None:
    """The operator says so at the hub."""
    settings = {"draining": False, "hostFallbackEnabled": enabled}
    bridge.hub.send("RunnerSettings", {"settings": settings})
    await wait_for(lambda: bridge.runner.hub_settings.host_fallback_enabled is enabled)


async def run(bridge: Bridge, *argv: str, **more: Any) -> str:
    """Start an attempt whose policy is the host; its id."""
    offer = await bridge.accept(policy="host")
    bridge.hub.send("Start", bridge.start(offer, *argv, **more))
    return str(offer["attemptId"])


async def held(bridge: Bridge) -> list[str]:
    """What is on the host for this runner, by role, as anybody may see it."""
    runner = bridge.runner
    listed = await runner.host.list_resources(runner_filter(runner.identity.runner_id))
    return sorted(found.labels["dev.forge.role"] for found in listed)


async def nothing_is_left(bridge: Bridge, attempt_id: str) -> list[tuple[str, str]]:
    """The capacity is whole, nothing is there, and the report says so; its roles and outcomes."""
    await bridge.until_idle()
    assert await held(bridge) == []
    assert list((bridge.state_root / "host").iterdir()) == []
    report = await bridge.hub.next("SubmitCleanupReport", attemptId=attempt_id)
    assert {item["outcome"] for item in report["resources"]} <= {"removed", "absent"}
    return sorted((item["kind"], item["role"]) for item in report["resources"])


def output(bridge: Bridge, attempt_id: str, stream: str = "stdout") -> str:
    logs = bridge.hub.of("SubmitDispatchEvent", attemptId=attempt_id, type="log")
    return "".join(log["payload"]["text"] for log in logs if log["payload"]["stream"] == stream)


def alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def require_nothing_marked(directory: Path) -> None:
    """No process of an attempt below this directory is left."""
    marked = marks("FORGE_HOST_RESOURCE")
    assert [mark for mark in marked if str(directory) in mark] == []
