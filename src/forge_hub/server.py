"""The hub as a whole: the only place where its parts are put together."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

import anyio
import uvicorn
from starlette.requests import HTTPConnection

from forge_core.errors import RetryableError
from forge_core.ports import Clock
from forge_edges.clock import SystemClock
from forge_hub.api import api_app
from forge_hub.connections import Connections
from forge_hub.dispatch import dispatcher, remotes
from forge_hub.dispatch.board import Board, Timing
from forge_hub.dispatch.leases import Leases
from forge_hub.dispatch.offers import Offers
from forge_hub.feed import Feed
from forge_hub.principals import ApiPrincipal, RunnerPrincipal
from forge_hub.runner_hub import attach
from forge_hub.settings import HubSettings, require_safe
from forge_hub.signalr import UVICORN_SETTINGS, HubOptions, SignalRHub, expose_transport
from forge_hub.sources import (
    CredentialSource,
    DirectoryCredentials,
    DirectorySecrets,
    SecretSource,
)
from forge_hub.store.database import Database, open_database
from forge_hub.tokens import Tokens

HUB_PATH: Final = "/hubs/runner"
RUNNER_OPTIONS: Final = HubOptions(
    # The 32 that a bridge replays at once share commits; heartbeats and decisions go beside them.
    max_parallel_invocations=64,
)
_STOP_TIMEOUT_S: Final = 10


@dataclass(frozen=True, slots=True)
class RunningHub:
    """A hub that answers.

    :ivar url: its base URL, as ``FORGE_SERVER_URL`` takes it.
    :ivar board: its parts, for tests and programs in the same process.
    """

    url: str
    board: Board


@asynccontextmanager
async def running_hub(
    settings: HubSettings,
    *,
    clock: Clock | None = None,
    options: HubOptions | None = None,
    secrets: SecretSource | None = None,
    credentials: CredentialSource | None = None,
) -> AsyncIterator[RunningHub]:
    """Serve in this event loop while the context is open; leaves no task and no socket.

    :param secrets: in place of the directory that the settings name.
    :param credentials: likewise, of publish credentials.
    :raises RefusedError: the settings cannot be used.
    :raises RetryableError: the port is taken, or the database cannot be reached.
    """
    require_safe(settings)
    tokens = _tokens(settings)
    await tokens.load()
    async with open_database(settings.database_url.get_secret_value()) as database:
        board = _board(settings, database, clock or SystemClock(), secrets, credentials)
        await dispatcher.restore(board)
        await remotes.restore(board)
        endpoint = _endpoint(board, tokens, settings, options)
        app = api_app(board, tokens)
        app.router.routes.extend(endpoint.routes())
        listener = _listen(settings.host, settings.port)
        server = _Server(_uvicorn_config(expose_transport(app)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve_shielded, listener)
            try:
                await server.answering.wait()
                async with endpoint.running(), anyio.create_task_group() as dispatching:
                    dispatching.start_soon(dispatcher.run, board)
                    dispatching.start_soon(remotes.run, board)
                    yield RunningHub(_url(settings.host, listener), board)
                    dispatching.cancel_scope.cancel()
            finally:
                board.feed.close()
                server.should_exit = True


def _board(
    settings: HubSettings,
    database: Database,
    clock: Clock,
    secrets: SecretSource | None,
    credentials: CredentialSource | None,
) -> Board:
    if secrets is None and settings.secrets_directory is not None:
        secrets = DirectorySecrets(settings.secrets_directory)
    if credentials is None and settings.credentials_directory is not None:
        credentials = DirectoryCredentials(settings.credentials_directory)
    timing = Timing(
        heartbeat_interval_ms=settings.heartbeat_interval_ms,
        offer_ttl_ms=settings.offer_ttl_ms,
        kill_grace_ms=settings.kill_grace_ms,
        publish_ttl_ms=settings.publish_ttl_ms,
    )
    return Board(
        database=database,
        connections=Connections(),
        feed=Feed(),
        clock=clock,
        timing=timing,
        offers=Offers(decline_backoff_ms=settings.decline_backoff_ms),
        leases=Leases(),
        secrets=secrets,
        credentials=credentials,
    )


def _endpoint(
    board: Board, tokens: Tokens, settings: HubSettings, options: HubOptions | None
) -> SignalRHub[RunnerPrincipal]:
    async def authenticate(token: str | None, _request: HTTPConnection) -> RunnerPrincipal | None:
        if tokens.is_open:
            return RunnerPrincipal()
        principal = await tokens.principal(token)
        return principal if isinstance(principal, RunnerPrincipal) else None

    endpoint = SignalRHub(HUB_PATH, authenticate, options or RUNNER_OPTIONS)
    attach(endpoint, board, heartbeat_interval_ms=settings.heartbeat_interval_ms)
    return endpoint


def _tokens(settings: HubSettings) -> Tokens:
    fixed: list[tuple[str, ApiPrincipal | RunnerPrincipal]] = []
    if settings.api_token is not None:
        fixed.append((settings.api_token.get_secret_value(), ApiPrincipal("FORGE_HUB_API_TOKEN")))
    if settings.runner_token is not None:
        fixed.append((settings.runner_token.get_secret_value(), RunnerPrincipal()))
    return Tokens(fixed, settings.token_file)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise RetryableError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="websockets-sansio",
        timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        **UVICORN_SETTINGS,
    )


class _Server(uvicorn.Server):
    """uvicorn that says when it answers, and leaves signals to the program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = anyio.Event()

    async def serve_shielded(self, listener: socket.socket) -> None:
        """Serve until ``should_exit``; a cancellation does not keep it from closing its sockets."""
        with anyio.CancelScope(shield=True):
            await self.serve([listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
