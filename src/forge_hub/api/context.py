"""What every endpoint is handed: the hub's parts, and the caller's right to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from forge_hub.dispatch.board import Board
from forge_hub.principals import ApiPrincipal
from forge_hub.tokens import Tokens

_bearer = HTTPBearer(auto_error=False, description="a token of role `api`")


@dataclass(frozen=True, slots=True)
class Context:
    """Set once on the application's state."""

    board: Board
    tokens: Tokens


def _context(request: Request) -> Context:
    return cast("Context", request.app.state.context)


async def _authorized(
    context: Annotated[Context, Depends(_context)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Board:
    """The board, for a caller with an API token (or anybody where no token is asked for)."""
    if not context.tokens.is_open:
        token = credentials.credentials if credentials else None
        if not isinstance(await context.tokens.principal(token), ApiPrincipal):
            raise HTTPException(
                401, "an API token is needed", headers={"WWW-Authenticate": "Bearer"}
            )
    return context.board


async def _anybody(context: Annotated[Context, Depends(_context)]) -> Board:
    return context.board


AuthorizedBoard = Annotated[Board, Depends(_authorized)]
OpenBoard = Annotated[Board, Depends(_anybody)]
