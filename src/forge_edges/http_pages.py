"""A few pages over plain HTTP: what monitoring scrapes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio
import anyio.abc
from aiohttp import web

from forge_core.errors import RefusedError

MAX_REQUEST_BYTES = 8_192
SHUT_DOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered to a GET."""

    content_type: str
    body: bytes


async def serve_pages(
    address: str,
    pages: Mapping[str, Callable[[], Page]],
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    """Serve until cancelled; ``task_status`` tells when the port is open.

    :param address: ``address:port``, IPv6 in brackets.
    :param pages: by path; called in the event loop for each request, so they must be quick.
    :raises RefusedError: code ``address_refused``: the port cannot be had.
    """
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    for path, page in pages.items():
        app.router.add_get(path, _handler(page))
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUT_DOWN_S)
    await runner.setup()
    try:
        host, _, port = address.rpartition(":")
        try:
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            raise RefusedError(
                f"cannot listen on {address}: {error.strerror}; set FORGE_METRICS_LISTEN to "
                "another port",
                code="address_refused",
                field="FORGE_METRICS_LISTEN",
            ) from error
        task_status.started()
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def _handler(page: Callable[[], Page]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_request: web.Request) -> web.Response:
        content = page()
        return web.Response(body=content.body, headers={"Content-Type": content.content_type})

    return handle
