"""``forge-bridge sandbox reap``: clean up while the bridge is down (B-42).

The boot's own cleanup with a runner that takes no work: same locks, ledgers, outbox and labels.
Messages stay on disk; the bridge sends them after its next connect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forge_bridge.command_options import Json, SettingsFile, load
from forge_bridge.terminal import (
    EXIT_FAILURE,
    EXIT_TEMPORARY,
    complain,
    print_json,
    print_table,
    say,
    waiting,
)

if TYPE_CHECKING:
    from forge_bridge.cleanup import Cleanup, CleanupPlan
    from forge_bridge.settings import LoadedSettings
    from forge_core.labels import Owner
    from forge_core.teardown import Removal
    from forge_core.wire.shapes import RemovedResource


def reap(
    context: typer.Context,
    settings_file: SettingsFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; list what would be removed.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Say nothing when there was nothing to do.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove what a bridge that is down has left behind.

    Ends its dispatches, removes everything that carries the labels of this runner, and keeps the
    reports until the bridge has sent them. Safe at any moment: it never works beside the bridge,
    and may be interrupted.

    Exit status: 0 nothing is left, 1 something resisted or the engine did not answer, 75 the
    bridge runs (nothing was touched).
    """
    from forge_bridge.state_root.locks import EngineLockHeld, probe_locks

    loaded = load(context, settings_file)
    try:
        # A timer asks every minute, and mostly the bridge runs: nothing more is loaded then.
        probe_locks(loaded.settings.sandbox_state_root)
        if dry_run:
            _show_plan(_plan(loaded), quiet=quiet, json=json)
            return
        done = _clean_up(loaded)
    except EngineLockHeld as error:
        if not quiet:
            complain(f"nothing was touched: {error}")
        raise typer.Exit(EXIT_TEMPORARY) from None
    _show(done, quiet=quiet, json=json)
    raise typer.Exit(0 if done.outcome.is_clean else EXIT_FAILURE)


def _clean_up(loaded: LoadedSettings) -> Cleanup:
    import anyio

    from forge_bridge.cleanup import clean_up

    _log_warnings(loaded)
    with waiting("cleaning up"):
        return anyio.run(clean_up, loaded)


def _plan(loaded: LoadedSettings) -> CleanupPlan:
    import anyio

    from forge_bridge.cleanup import plan_cleanup

    _log_warnings(loaded)
    return anyio.run(plan_cleanup, loaded.settings)


def _log_warnings(loaded: LoadedSettings) -> None:
    from forge_bridge.logs import configure_command_logging

    configure_command_logging(loaded.settings.log_format, loaded.settings.log_level)


def _show(done: Cleanup, *, quiet: bool, json: bool) -> None:
    from forge_core.wire.codes import RemovalOutcome

    outcome = done.outcome
    counts = {kind.value: outcome.count(kind) for kind in RemovalOutcome}
    if json:
        resources = [
            _as_json(one.owner, one.resource)
            | {"outcome": one.resource.outcome.value, "detail": one.resource.detail}
            for one in outcome.reaped
        ]
        heading = {"dryRun": False, "runnerId": done.runner_id, **counts}
        print_json({**heading, "unlisted": outcome.unlisted, "resources": resources})
        return
    rows = [
        (one.resource.outcome.value, *_row(one.owner, one.resource), one.resource.detail or "")
        for one in outcome.reaped
    ]
    if rows:
        print_table(("outcome", "kind", "name", "attempt", "fence", "detail"), rows)
    if outcome.unlisted is not None:
        complain(f"error: there may be more: {outcome.unlisted}")
    if rows or not quiet:
        say(", ".join(f"{count} {kind}" for kind, count in counts.items()))


def _show_plan(plan: CleanupPlan, *, quiet: bool, json: bool) -> None:
    if json:
        resources = [
            _as_json(owner, removal) | {"listed": removal.id in plan.listed}
            for owner, removal in plan.removals
        ]
        dispatches = [{"attemptId": key[0], "fence": key[1]} for key in plan.dispatches]
        heading = {"dryRun": True, "runnerId": plan.runner_id}
        print_json({**heading, "dispatches": dispatches, "resources": resources})
        return
    rows = [
        (*_row(owner, removal), "a look" if removal.id in plan.listed else "ledger only")
        for owner, removal in plan.removals
    ]
    if rows:
        print_table(("kind", "name", "attempt", "fence", "known from"), rows)
    if rows or plan.dispatches or not quiet:
        say(f"dispatches to end: {len(plan.dispatches)}; resources to remove: {len(rows)}")


def _row(owner: Owner, thing: Removal | RemovedResource) -> tuple[str, str, str, str]:
    return thing.kind.value, thing.name, owner.attempt_id, str(owner.fence)


def _as_json(owner: Owner, thing: Removal | RemovedResource) -> dict[str, object]:
    return {
        "kind": thing.kind.value,
        "id": thing.id,
        "name": thing.name,
        "role": thing.role,
        "attemptId": owner.attempt_id,
        "fence": owner.fence,
        "runnerInstanceId": owner.runner_instance_id,
    }
