"""The REST application."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, FastAPI

from forge_hub.api import legacy, problems, projects, runners, sessions
from forge_hub.api.context import Context, OpenBoard
from forge_hub.api.models import Health
from forge_hub.api.problems import Problem
from forge_hub.dispatch.board import Board
from forge_hub.tokens import Tokens

_health = APIRouter(tags=["health"])


@_health.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@_health.get("/readyz", responses={503: {"model": Problem}})
async def readyz(board: OpenBoard) -> Health:
    """The database answers too."""
    await board.database.ping()
    return Health()


def bare_app() -> FastAPI:
    """The routes and their documentation, without the parts behind them."""
    app = FastAPI(
        title="forge-hub",
        version=version("forge-bridge"),
        summary="Dispatches sessions to runners and keeps what became of them",
        openapi_url="/api/v1/openapi.json",
        redoc_url=None,
        responses={"default": {"model": Problem, "description": "Problem details (RFC 9457)"}},
    )
    for router in (sessions.router, projects.router, runners.router, legacy.router, _health):
        app.include_router(router)
    problems.install(app)
    return app


def api_app(board: Board, tokens: Tokens) -> FastAPI:
    """The REST application on these parts."""
    app = bare_app()
    app.state.context = Context(board, tokens)
    return app
