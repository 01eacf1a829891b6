"""``forge sandbox``: whether sandboxes are what they should be (B-41, B-51)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge_bridge.command_options import Json, SettingsFile
from forge_bridge.images.verify_command import verify_provenance
from forge_bridge.starter import Kind
from forge_bridge.terminal import (
    EXIT_USAGE,
    complain,
    fail,
    print_json,
    print_table,
    reported,
    say,
    waiting,
)

if TYPE_CHECKING:
    from forge_bridge.doctor import Preflight
    from forge_bridge.doctor.repository_checks import Diagnosis
    from forge_bridge.settings import BridgeSettings

app = typer.Typer(
    help="Sandboxes of this machine.", no_args_is_help=True, pretty_exceptions_enable=False
)

DOCTOR = "doctor"
"""The runner id of the probe: never a bridge's own, which would take it for a remainder."""


Directory = Annotated[
    Path, typer.Argument(help="A directory of the repository.", show_default="the current one")
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="IMAGE",
        help="Write a Dockerfile too, on this image: repository@sha256:…, or the name of an image "
        "that the engine has, whose digest is then looked up.",
        show_default=False,
    ),
]
ProjectKind = Annotated[
    Kind | None,
    typer.Option(
        "--kind",
        help="What to write it for: python, node, php or plain. Default: by the files at the top.",
        show_default=False,
    ),
]


@app.command()
@reported
def init(
    directory: Directory = Path(),
    base: Base = None,
    kind: ProjectKind = None,
    settings_file: SettingsFile = None,
) -> None:
    """Begin a contract, and with --base a Dockerfile.

    They are .forge/forge.sandbox.yml and .forge/Dockerfile, at the top of the repository. Nothing
    is ever overwritten, and either all files are written or none. Without --base no engine and no
    network is needed; agents then work in the tooling image of the runner.
    """
    from forge_bridge.starter.begin import begin

    pinned = None if base is None else _pinned(base, settings_file)
    begun = begin(directory, base=pinned, kind=kind)
    for path in begun.paths:
        say(str(path))
    for note in begun.notes:
        complain(note)


def _pinned(image: str, settings_file: Path | None) -> str:
    import anyio

    from forge_bridge.settings import load_settings
    from forge_bridge.starter.base_image import is_pinned, pinned_base
    from forge_edges.docker_context import resolve_endpoint
    from forge_edges.docker_engine import DockerEngine

    async def look() -> str:
        endpoint = resolve_endpoint(
            load_settings(settings_file).settings.docker_context, os.environ
        )
        async with DockerEngine.connect(endpoint) as engine:
            return await pinned_base(engine, image)

    return image if is_pinned(image) else anyio.run(look)


Repository = Annotated[
    Path | None,
    typer.Option(
        "--repository",
        metavar="PATH",
        help="Check the contract of this repository too. Default: the one around the current "
        "directory, when it has a .forge.",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--commit",
        metavar="REVISION",
        help="Read the contract from this commit, as a runner would. Default: HEAD.",
        show_default=False,
    ),
]


@app.command()
@reported
def doctor(
    settings_file: SettingsFile = None,
    repository: Repository = None,
    commit: Revision = None,
    json: Json = False,
) -> None:
    """Check this machine, and the contract of a repository.

    Whether the one can contain what it runs, and whether the other can be used. Everything is
    tried in a probe container; a setting alone proves nothing. The bridge advertises from the same
    checks. A contract is read from a commit, never from the working tree.

    Exit status: 0 ready for sandbox_required, 1 something stands in the way, 2 it could not be
    looked at.
    """
    import anyio

    from forge_bridge.doctor.repository_checks import default_repository
    from forge_bridge.logs import configure_command_logging
    from forge_bridge.settings import load_settings

    loaded = load_settings(settings_file)
    clone = repository or default_repository(Path.cwd())
    if clone is None and commit is not None:
        fail("cannot find a repository here: name one with --repository", EXIT_USAGE)
    with waiting("running a probe container"):
        configure_command_logging(loaded.settings.log_format, loaded.settings.log_level)
        found = anyio.run(_diagnosis, loaded.settings, clone, commit)
    if json:
        print_json(_as_json(found))
    else:
        _show(found)
        for warning in loaded.warnings:
            complain(f"warning: {warning}")
    raise typer.Exit(found.exit_code)


async def _diagnosis(
    settings: BridgeSettings, clone: Path | None, revision: str | None
) -> Diagnosis:
    from forge_bridge.doctor.repository_checks import Diagnosis, check_repository

    project = None if clone is None else await check_repository(clone, revision)
    return Diagnosis(await _preflight(settings), project)


async def _preflight(settings: BridgeSettings) -> Preflight:
    from forge_bridge.doctor import preflight, read_hardening
    from forge_bridge.doctor.image_checks import passing_prover
    from forge_bridge.egress.from_settings import egress_trial
    from forge_bridge.images.doors import passing_builder
    from forge_bridge.services.from_settings import service_images
    from forge_edges.docker_context import resolve_endpoint
    from forge_edges.docker_engine import DockerEngine

    endpoint = resolve_endpoint(settings.docker_context, os.environ)
    hardening = await read_hardening(settings)
    instance_id = f"{DOCTOR}-{os.getpid()}"
    async with (
        DockerEngine.connect(endpoint) as engine,
        passing_prover(settings, endpoint, os.environ) as prover,
        passing_builder(settings, engine, endpoint, instance_id) as builder,
    ):
        return await preflight(
            engine,
            settings,
            hardening,
            runner_id=DOCTOR,
            instance_id=instance_id,
            prover=prover,
            builder=builder,
            services=service_images(settings, prover.check_signatures),
            egress=await egress_trial(settings, prover.check_signatures),
        )


def _show(found: Diagnosis) -> None:
    results, capabilities = found.results, found.preflight.capabilities
    rows = [(r.verdict.value.replace("_", " "), r.id, r.title, r.evidence) for r in results]
    print_table(("verdict", "name", "check", "what was seen"), rows)
    remedies = [(r.id, r.remedy) for r in results if r.remedy is not None]
    if remedies:
        say("")
        print_table(("to mend", "do this"), remedies)
    readiness = capabilities.sandbox_required
    runtimes = ", ".join(capabilities.runtimes) or "none"
    say("")
    say(f"runtimes that can be offered: {runtimes}")
    blockers = ", ".join(readiness.blockers)
    say(f"sandbox_required: {'ready' if readiness.ready else f'not ready ({blockers})'}")
    if found.project is not None:
        say(found.project.summary)


def _as_json(found: Diagnosis) -> dict[str, Any]:
    project = found.project
    return {
        "exitCode": found.exit_code,
        "capabilities": found.preflight.capabilities.to_wire(),
        "repository": project and {"path": str(project.path), "commit": project.commit},
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


app.command()(verify_provenance)
