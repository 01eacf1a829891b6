"""``python bridge_at_fault.py ORDERS``: the production bridge, which dies where it is told to.

The settings come from the environment as always.  ORDERS is a file that a test may write and
remove while the bridge runs; without it nothing is different.  It holds one JSON object:

``record``: append each point that is reached to this file, as ``<place> TAB <name> TAB <n>``;
``kill``: ``[name, n]``, SIGKILL this process as it reaches the point for the n-th time;
``lose``: the first call of this hub method gets lost on its way to the hub.

A point is whatever :data:`forge_bridge.perform.FaultPoint` names, and the moment before and
after each effect on the engine, on the Git stores and on the files of the state root.  Reaches
count from when the file was written.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import forge_bridge.app as bridge_app
from forge_bridge.assembly import BridgeService
from forge_bridge.cli import main
from forge_bridge.runner import Runner
from forge_bridge.settings import BridgeSettings
from forge_bridge.state_root.evidence import EvidenceStore
from forge_bridge.state_root.images import ImageIndex
from forge_bridge.state_root.ledgers import LedgerStore
from forge_bridge.state_root.messages import MessageStore
from forge_core.errors import HubConnectionLost
from forge_core.outbox import Entry
from forge_core.ports import Engine
from forge_edges.buildx import BuildxBuilder
from forge_edges.docker_engine import DockerEngine
from forge_edges.git_stores import GitStores
from forge_edges.host_runtime import LocalHost
from forge_edges.signalr import SignalRConnection

LOOKS: Final = frozenset(
    {
        "attach",
        "facts",
        "info",
        "inspect_container",
        "inspect_image",
        "inspect_network",
        "list_images",
        "list_resources",
        "network_endpoints",
        "path_kind",
        "wait_container",
    }
)
"""What changes nothing in the engine; every other method of the port is an effect."""

HOST_EFFECTS: Final = (
    "create_volume",
    "unpack",
    "create_container",
    "remove_container",
    "remove_volume",
)
"""What changes something on the host."""

CALLS: Final = (
    "RegisterRunner",
    "ReadAttemptSnapshot",
    "RedeemPublishGrant",
    "SubmitOfferDecision",
)
"""The calls that are not made durable first; those that are pass as ``forget`` once answered."""

Effect = Callable[..., Awaitable[Any]]


class Fault:
    """What the orders say, and how often each point was reached since they were given."""

    def __init__(self, orders: Path) -> None:
        self.runner: Runner | None = None
        self.in_preflight = False
        self._path = orders
        self._text = ""
        self._orders: Mapping[str, Any] = {}
        self._reached: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Count, and do what the orders say; may not return."""
        orders = self._read()
        if not orders:
            return
        self._reached[name] += 1
        count = self._reached[name]
        if orders.get("kill") == [name, count]:
            os.kill(os.getpid(), signal.SIGKILL)
        if "record" in orders:
            with Path(orders["record"]).open("a") as log:
                log.write(f"{self._place()}\t{name}\t{count}\n")

    def loses(self, method: str) -> bool:
        """Whether this call gets lost; once."""
        if self._read().get("lose") != method:
            return False
        self._reached[method] += 1
        return self._reached[method] == 1

    def _read(self) -> Mapping[str, Any]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            text = ""
        if text != self._text:
            self._text, self._reached = text, Counter()
            self._orders = json.loads(text) if text else {}
        return self._orders

    def _place(self) -> str:
        """Where the only dispatch stands, for people who read the recording."""
        if self.runner is None:
            return "preflight" if self.in_preflight else "start"
        for run in self.runner.attempts.values():
            return str(run.state.stage or run.state.phase)
        return "idle"


def surround(owner: type, method: str, fault: Fault, name: Callable[..., str]) -> None:
    """Make the moments before and after a method points; named after its arguments."""
    effect: Effect = getattr(owner, method)

    @functools.wraps(effect)
    async def surrounded(self: object, *arguments: Any, **named: Any) -> Any:
        point = name(method, *arguments)
        fault.reach(f"{point}:before")
        answer = await effect(self, *arguments, **named)
        fault.reach(f"{point}:after")
        return answer

    setattr(owner, method, surrounded)


def install(fault: Fault) -> None:
    """Let every effect of the bridge pass through the fault."""
    roles = _Roles()
    port = {name for name in dir(Engine) if not name.startswith("_")}
    for method in sorted(port - LOOKS):
        surround(DockerEngine, method, fault, roles.name)
    roles.watch_creates()
    for method in HOST_EFFECTS:
        surround(LocalHost, method, fault, roles.name)
    for method in ("ensure_commit", "import_bundle", "push"):
        surround(GitStores, method, fault, _plain)
    for method in ("create", "reopen", "remove", "mark_suspect"):
        surround(LedgerStore, method, fault, lambda method, *_: f"{method} ledger")
    for method in ("write", "remove", "set_aside"):
        surround(MessageStore, method, fault, _message)
    surround(BuildxBuilder, "build", fault, _plain)
    for method in ("put", "remove"):
        surround(ImageIndex, method, fault, lambda method, *_: f"{method} record")
    for method in ("put", "put_set", "remove"):
        surround(EvidenceStore, method, fault, lambda method, *_: f"{method} evidence")
    _surround_calls(fault)
    app: Any = bridge_app  # where run_bridge looks them up
    app.preflight = _noticed(app.preflight, fault)
    app.open_bridge = _opening(app.open_bridge, fault)


class _Roles:
    """Names containers by what they are for: ids are different in each run."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def name(self, method: str, resource: str, *_: Any) -> str:
        role = self._of.get(resource) or _role_in(resource)
        return f"{method} {role}" if role else method

    def watch_creates(self) -> None:
        create = DockerEngine.create_container

        async def watched(engine: DockerEngine, name: str, request: Mapping[str, Any]) -> str:
            container = await create(engine, name, request)
            self._of[container] = _role_in(name)
            return container

        DockerEngine.create_container = watched  # type: ignore[assignment, method-assign]


def _role_in(name: str) -> str:
    if name.startswith("forge-host-"):
        return "-".join(name.split("-")[1:3])
    return name.split("-")[1] if name.startswith("forge-") else ""


def _plain(method: str, *_: Any) -> str:
    return method


def _message(method: str, entry: Entry, *_: Any) -> str:
    verb = {"write": "store", "remove": "forget"}.get(method, method)
    return f"{verb} {entry.method} {entry.position or ''}".rstrip()


def _surround_calls(fault: Fault) -> None:
    invoke = SignalRConnection.invoke

    async def surrounded(
        self: SignalRConnection,
        method: str,
        payload: Mapping[str, object],
        *,
        timeout_ms: int | None = None,
    ) -> object:
        if fault.loses(method):
            raise HubConnectionLost(f"cannot call {method}: it got lost")
        if method not in CALLS:
            return await invoke(self, method, payload, timeout_ms=timeout_ms)
        fault.reach(f"{method}:before")
        answer = await invoke(self, method, payload, timeout_ms=timeout_ms)
        fault.reach(f"{method}:after")
        return answer

    SignalRConnection.invoke = surrounded  # type: ignore[method-assign]


def _noticed(preflight: Effect, fault: Fault) -> Effect:
    async def noticed(*arguments: Any, **named: Any) -> Any:
        fault.in_preflight = True
        try:
            return await preflight(*arguments, **named)
        finally:
            fault.in_preflight = False

    return noticed


def _opening(open_bridge: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(settings: BridgeSettings, **named: Any) -> AsyncIterator[BridgeService]:
        async with open_bridge(settings, **named, reach=fault.reach) as service:
            fault.runner = service.runner
            yield service

    return opened


if __name__ == "__main__":
    install(Fault(Path(sys.argv.pop(1))))
    main()
