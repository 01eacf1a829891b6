"""``forge-hub``: serve, and make tokens."""

from __future__ import annotations

import logging
import os
import signal
import sys
from enum import StrEnum
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated

import anyio
import structlog
import typer

from forge_core.errors import ForgeError, RefusedError
from forge_hub.principals import ApiPrincipal, Principal, RunnerPrincipal
from forge_hub.server import running_hub
from forge_hub.settings import HubSettings, load_settings
from forge_hub.tokens import new_token, parse_token_file, token_line

app = typer.Typer(
    name="forge-hub",
    help="The reference hub: dispatches sessions to runners and keeps what became of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
token_app = typer.Typer(help="Bearer tokens of people, programs and runners.", no_args_is_help=True)
app.add_typer(token_app, name="token")


class Role(StrEnum):
    """What a token is for."""

    API = "api"
    RUNNER = "runner"


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port [8080]; 0: a free one.")] = None,
    database: Annotated[
        str | None, typer.Option(help="sqlite:///PATH or postgresql+asyncpg://…")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Digests of tokens; see `forge-hub token create`.")
    ] = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends it at once."""
    settings = load_settings(host=host, port=port, database_url=database, token_file=token_file)
    _set_up_logging()
    anyio.run(_serve, settings)


@token_app.command("create")
def create_token(
    role: Annotated[Role, typer.Option(help="api: people and programs; runner: a bridge.")],
    token_file: Annotated[
        Path, typer.Option(envvar="FORGE_HUB_TOKEN_FILE", help="Gets the token's digest.")
    ],
    name: Annotated[str, typer.Option(help="Who it is for; of a runner, its id or *.")] = "*",
    trust_domain: Annotated[str, typer.Option(help="The runner's trust domain, or *.")] = "*",
) -> None:
    """Add a token to the file and print it, this once; the hub knows it at once."""
    principal: Principal
    if role is Role.API:
        principal = ApiPrincipal(name if name != "*" else "api")
    else:
        principal = RunnerPrincipal(
            None if name == "*" else name, None if trust_domain == "*" else trust_domain
        )
    token = new_token()
    line = token_line(principal, token)
    try:
        parse_token_file(line)
    except RefusedError as error:
        raise RefusedError(
            "cannot make the token: a name is one word, a runner's id and trust domain are * or at"
            " most 128 letters, digits, - and _",
            code="invalid_name",
        ) from error
    try:
        descriptor = os.open(token_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise RefusedError(
            f"cannot write the token file {token_file}: {error.strerror}; name another",
            code="invalid_token_file",
        ) from error
    typer.echo(token)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"forge-hub {distribution_version('forge-bridge')}")


def main() -> None:
    """Entry point; expected errors are one line on stderr."""
    try:
        app()
    except ForgeError as error:
        typer.echo(f"forge-hub: {error}", err=True)
        sys.exit(1)


async def _serve(settings: HubSettings) -> None:
    log = structlog.get_logger("forge_hub")
    if not settings.asks_for_tokens:
        log.warning("hub.open", detail="no tokens: every user of this machine may do everything")
    async with running_hub(settings) as hub:
        log.info("hub.listening", url=hub.url)
        # Once left, the default action is back: a second signal ends the process at once.
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await anext(signals)
        log.info("hub.stopping")


def _set_up_logging() -> None:
    """Lines for people on a terminal, JSON for everything else."""
    terminal = sys.stderr.isatty()
    # Never rich's tracebacks: they print the locals, and with them whatever is secret.
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
