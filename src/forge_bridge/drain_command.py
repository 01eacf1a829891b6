"""``forge-bridge drain`` and ``undrain``: this host takes no new work, then does again (B-87)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forge_bridge.command_options import SettingsFile, writable_state_root
from forge_bridge.terminal import EXIT_FAILURE, complain, say, waiting

if TYPE_CHECKING:
    from forge_bridge.status import BridgeStatus

LOOK_EVERY_S: Final = 0.25


def drain(
    context: typer.Context,
    settings_file: SettingsFile = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once nothing is reserved, starting or running.")
    ] = False,
    timeout_s: Annotated[
        int | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1,
            help="Wait no longer than this; else for as long as it takes.",
        ),
    ] = None,
) -> None:
    """Take no new work; what was taken goes on.

    Holds across restarts, with or without a hub, until undrain. A running bridge notices within
    two seconds.

    Exit status with --wait: 0 nothing runs any more, 1 something still does after the timeout.
    """
    from forge_bridge.state_root import drain as state
    from forge_edges.clock import SystemClock

    root = writable_state_root(context, settings_file)
    changed = state.drain(root, SystemClock().utc())
    say("draining" if changed else "draining already")
    if not wait:
        return
    with waiting("waiting for what runs to end"):
        last = _wait(root, None if timeout_s is None else time.monotonic() + timeout_s)
    if last is None:
        say("no bridge runs; the next start finds this host drained")
    elif not last.is_drained:
        complain(
            f"error: after {timeout_s} s there are still {_counts(last)}; this host stays drained"
        )
        raise typer.Exit(EXIT_FAILURE)
    else:
        say(
            f"drained: nothing runs, {last.degraded_reservation_count} degraded,"
            f" {last.pending_reports} cleanup reports unacknowledged"
        )


def undrain(context: typer.Context, settings_file: SettingsFile = None) -> None:
    """Take new work on this host again.

    Does not end a drain that the hub has asked for.
    """
    from forge_bridge.state_root import drain as state

    changed = state.undrain(writable_state_root(context, settings_file))
    say("taking work again" if changed else "was not drained by this host")


def _wait(root: Path, deadline_s: float | None) -> BridgeStatus | None:
    """What the bridge told last; None when none runs.

    The bridge writes its status whenever it changes; another process has no way to be woken by
    that, so it looks again and again.
    """
    from forge_bridge.status import Liveness, liveness, read_status

    while True:
        found = read_status(root)
        if found is None or liveness(found)[0] is Liveness.NOT_RUNNING:
            return None
        if found.is_drained or (deadline_s is not None and time.monotonic() >= deadline_s):
            return found
        time.sleep(LOOK_EVERY_S)


def _counts(status: BridgeStatus) -> str:
    releasing = len(status.attempts) - sum(
        (
            status.reserved_count,
            status.starting_count,
            status.active_count,
            status.degraded_reservation_count,
        )
    )
    return (
        f"{status.reserved_count} reserved, {status.starting_count} starting,"
        f" {status.active_count} active, {max(0, releasing)} being removed"
    )
