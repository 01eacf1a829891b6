"""A status as people read it."""

from __future__ import annotations

from typing import Final

from forge_bridge.status import BridgeStatus, Liveness, Side
from forge_core.resources import COMPONENTS
from forge_core.units import format_size

_SIDES: Final = {
    Side.HOST: "this host (forge-bridge undrain ends it)",
    Side.HUB: "the hub",
}


def headline(status: BridgeStatus, alive: str, age_ms: int) -> str:
    """The one line that says how it is."""
    age = duration(age_ms)
    if alive == Liveness.RUNNING:
        return f"running: {status.state}, hub {status.connection}"
    if alive == Liveness.STALE:
        return (
            f"stale: process {status.pid} is there and has told nothing for {age}; "
            "look at its logs. What it told last:"
        )
    return f"not running: process {status.pid} is gone. What it told last, {age} ago:"


def status_rows(status: BridgeStatus) -> list[tuple[str, str]]:
    """Everything but the attempts."""
    attempts = (
        f"{status.reserved_count} reserved, {status.starting_count} starting, "
        f"{status.active_count} active, {status.degraded_reservation_count} degraded"
    )
    drained_by = " and ".join(_SIDES[side] for side in status.drained_by)
    rows = [
        ("version", status.version),
        ("process", f"{status.pid}, since {status.started_at}"),
        ("runner", status.runner_id),
        ("instance", status.runner_instance_id),
        ("drained by", drained_by or "nobody"),
        ("hub", f"{status.connection}, since {status.connection_since}"),
        ("attempts", attempts),
        *_resource_rows(status),
    ]
    if status.disk is not None:
        latched = ", offers refused" if status.disk.latched else ""
        free = format_size(status.disk.free_bytes)
        rows.append(("disk", f"{status.disk.used_percent} % used, {free} free{latched}"))
    rows.append(("unacknowledged", str(status.pending_reports)))
    rows.append(("engine", status.engine_away or "answers"))
    unseen = sorted(status.parts_unseen.items())
    rows += [("not seen yet", f"{part}: {why}") for part, why in unseen]
    rows.append(("last error", status.last_error or "none"))
    return rows


def attempt_rows(status: BridgeStatus) -> list[tuple[str, str, str]]:
    """The attempts, as the heartbeat lists them."""
    return [(a.attempt_id, str(a.fence), a.state.value) for a in status.attempts]


def duration(milliseconds: int) -> str:
    """A duration for people, in its two largest units."""
    seconds = milliseconds // 1000
    for name, size, part, part_size in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            return f"{seconds // size} {name} {seconds % size // part_size} {part}"
    return f"{seconds} s"


def _resource_rows(status: BridgeStatus) -> list[tuple[str, str]]:
    rows = []
    for component in COMPONENTS:
        used = getattr(status.used_resources, component)
        ceiling = getattr(status.resource_capacity, component)
        if used == 0 and ceiling is None:
            continue
        show = format_size if component.endswith("_bytes") else str
        most = ", no ceiling" if ceiling is None else f" of {show(ceiling)}"
        rows.append((component.replace("_", " "), show(used) + most))
    return rows
