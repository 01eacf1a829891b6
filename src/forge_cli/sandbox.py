"""``forge sandbox``: whether sandboxes are what they should be (B-41, B-51)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from forge_bridge.command_options import Json, SettingsFile
from forge_bridge.terminal import (
    complain,
    print_json,
    print_table,
    reported,
    say,
    waiting,
)

if TYPE_CHECKING:
    from forge_bridge.doctor import Preflight
    from forge_bridge.settings import BridgeSettings

app = typer.Typer(
    help="Sandboxes of this machine.", no_args_is_help=True, pretty_exceptions_enable=False
)

DOCTOR = "doctor"
"""The runner id of the probe: never a bridge's own, which would take it for a remainder."""


@app.callback()
def _group() -> None:
    """Keep ``doctor`` a command of its own, though it is the only one."""


@app.command()
@reported
def doctor(settings_file: SettingsFile = None, json: Json = False) -> None:
    """Check whether this machine can contain what it runs.

    Everything is tried in a probe container; a setting alone proves nothing. The bridge
    advertises from the same checks.

    Exit status: 0 ready for sandbox_required, 1 something stands in the way, 2 it could not be
    looked at.
    """
    import anyio

    from forge_bridge.settings import load_settings

    loaded = load_settings(settings_file)
    with waiting("running a probe container"):
        found = anyio.run(_preflight, loaded.settings)
    if json:
        print_json(_as_json(found))
    else:
        _show(found)
        for warning in loaded.warnings:
            complain(f"warning: {warning}")
    raise typer.Exit(found.exit_code)


async def _preflight(settings: BridgeSettings) -> Preflight:
    from forge_bridge.doctor import preflight, read_hardening
    from forge_edges.docker_context import resolve_endpoint
    from forge_edges.docker_engine import DockerEngine

    endpoint = resolve_endpoint(settings.docker_context, os.environ)
    async with DockerEngine.connect(endpoint) as engine:
        instance_id = f"{DOCTOR}-{os.getpid()}"
        hardening = await read_hardening(settings)
        return await preflight(
            engine, settings, hardening, runner_id=DOCTOR, instance_id=instance_id
        )


def _show(found: Preflight) -> None:
    rows = [(r.verdict.value.replace("_", " "), r.title, r.evidence) for r in found.results]
    print_table(("verdict", "check", "what was seen"), rows)
    remedies = [(r.title, r.remedy) for r in found.results if r.remedy is not None]
    if remedies:
        say("")
        print_table(("to mend", "do this"), remedies)
    readiness = found.capabilities.sandbox_required
    runtimes = ", ".join(found.capabilities.runtimes) or "none"
    say("")
    say(f"runtimes that can be offered: {runtimes}")
    blockers = ", ".join(readiness.blockers)
    say(f"sandbox_required: {'ready' if readiness.ready else f'not ready ({blockers})'}")


def _as_json(found: Preflight) -> dict[str, Any]:
    return {
        "exitCode": found.exit_code,
        "capabilities": found.capabilities.to_wire(),
        "checks": [
            {
                "id": result.id,
                "title": result.title,
                "lookedAt": result.looked_at,
                "verdict": result.verdict.value,
                "evidence": result.evidence,
                "remedy": result.remedy,
                "looked": result.looked,
            }
            for result in found.results
        ],
    }
