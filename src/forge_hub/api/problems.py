"""Errors as problem details (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from traceback import format_tb
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from forge_core.errors import RefusedError, RetryableError
from forge_core.wire.base import WireModel

MEDIA_TYPE: Final = "application/problem+json"
_STATUS_OF_CODE: Final = {
    "unknown_session": HTTPStatus.NOT_FOUND,
    "unknown_runner": HTTPStatus.NOT_FOUND,
    "unknown_project": HTTPStatus.NOT_FOUND,
    "unknown_dispatch": HTTPStatus.NOT_FOUND,
    "runner_offline": HTTPStatus.CONFLICT,
    "conflict": HTTPStatus.CONFLICT,
    "policy_conflict": HTTPStatus.CONFLICT,
}
_log = structlog.get_logger(__name__)


class Problem(WireModel):
    """RFC 9457, with a code for programs and the fields at fault."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    fields: dict[str, str] | None = None


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    fields: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """A response with problem details."""
    body = Problem(
        title=HTTPStatus(status).phrase, status=status, detail=detail, code=code, fields=fields
    )
    return JSONResponse(body.to_wire(), status_code=status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Turn every error of the API into problem details."""
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RetryableError, _retryable)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    status = _STATUS_OF_CODE.get(error.code, HTTPStatus.UNPROCESSABLE_ENTITY)
    fields = {error.field: str(error)} if error.field else None
    return problem(status, error.code, str(error), fields=fields)


async def _retryable(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RetryableError)
    _log.warning("api.unavailable", error=str(error))
    seconds = max(1, (error.retry_after_ms or 1_000) // 1_000)
    return problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "unavailable",
        "the hub cannot do this now; try again",
        headers={"Retry-After": str(seconds)},
    )


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """Names the fields and what is wrong with each; never the value, it may be a secret."""
    assert isinstance(error, RequestValidationError)
    fields: dict[str, str] = {}
    for fault in error.errors():
        fields[".".join(str(part) for part in fault["loc"])] = _said(fault)
    first = next(iter(fields), "the request")
    detail = f"cannot read {first}: {fields.get(first, 'it is not valid')}"
    return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_request", detail, fields=fields)


def _said(fault: dict[str, Any]) -> str:
    """What is wrong, in our words where they are ours: pydantic sets ``Value error, `` before."""
    own = fault.get("ctx", {}).get("error") if fault["type"] == "value_error" else None
    return fault["msg"] if own is None else str(own)


async def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    code = phrase.lower().replace(" ", "_")
    headers: Any = error.headers
    return problem(error.status_code, code, error.detail, headers=headers)


async def _bug(_request: Request, error: Exception) -> JSONResponse:
    # Without the exception's text, which may quote the request.
    place = "".join(format_tb(error.__traceback__))
    _log.error("api.bug", kind=type(error).__name__, place=place)
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "the hub has a bug here")
