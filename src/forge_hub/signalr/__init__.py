"""The SignalR endpoint of the hub: JSON over WebSockets, and nothing else.

It keeps ASP.NET Core's manners (status codes, limits, order of invocations, masked errors), so
that a bridge which works here works there.  docs/explanation/signalr.md has the reasons.

    hub = SignalRHub("/hubs/runner", authenticate)

    @hub.method("Heartbeat")
    async def heartbeat(connection, payload): ...

    async with hub.running(): ...   # in the application's lifespan
    app = expose_transport(Starlette(routes=hub.routes(), lifespan=lifespan))
    uvicorn.run(app, **UVICORN_SETTINGS)
"""

from .connection import Connection
from .hub import SignalRHub
from .methods import HubException
from .options import UVICORN_SETTINGS, HubOptions
from .transport import expose_transport

__all__ = [
    "UVICORN_SETTINGS",
    "Connection",
    "HubException",
    "HubOptions",
    "SignalRHub",
    "expose_transport",
]
