"""The simulated way between bridge and hub: one connection at a time, as SignalR gives them.

Fault model: within a connection requests and answers keep their order, but it may end at any
message, before the hub has seen it or before the answer is back; a partition swallows everything
until both sides give up.  What the hub says to the bridge may be lost, come twice, or late and
out of order, as a hub of several processes can bring about.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import anyio
import anyio.abc

from forge_core.errors import ForgeError, HubConnectionLost, HubError, HubRefused, HubUnavailable
from forge_core.ports import BridgeConnection, PayloadHandler

from .faults import Faults
from .points import CALL_POINTS, Reach, Surrounded
from .world import World

HUB: Final = "hub"
INVOKE_S: Final = 30.0
FORGED_SEQUENCE: Final = 10**9
SILENCE_S: Final = 30.0
"""After so long without a frame, either side gives a connection up."""


Sent = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Called before anything is sent; a dead process's never returns."""


class Hub(Protocol):
    """The far side."""

    def connected(self, connection: SimulatedConnection) -> None: ...
    def disconnected(self, connection: SimulatedConnection) -> None: ...
    def call(
        self, connection: SimulatedConnection, method: str, payload: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer; raises HubError."""


class Network:
    """Between one bridge host and the hub.

    :ivar partitioned: nothing gets through, in either direction.
    :ivar hub_is_up: whether anything listens there.
    """

    def __init__(
        self,
        world: World,
        faults: Faults,
        hub: Hub,
        delivered: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.delivered = delivered
        self.world = world
        self.faults = faults
        self.hub = hub
        self.rng = world.rng("network")
        self.partitioned = False
        self.hub_is_up = True
        self.connections: list[SimulatedConnection] = []
        world.later("world", 1.0, self._watch_silence)

    def cut(self) -> None:
        """Every connection breaks at once."""
        for connection in tuple(self.connections):
            connection.lose("the connection broke")

    def vanish(self, process: str) -> None:
        """The bridge's host or process is gone: the hub sees the end of its connections."""
        for connection in tuple(self.connections):
            if connection.process == process:
                connection.lose("the other side is gone")

    def _watch_silence(self) -> None:
        """A partition that lasts ends every connection, on both sides."""
        self.world.later("world", 1.0, self._watch_silence)
        for connection in tuple(self.connections):
            if not self.partitioned:
                connection.heard_s = self.world.now_s
            elif self.world.now_s - connection.heard_s > SILENCE_S:
                connection.lose("nothing was heard for too long")


class ConnectionFactory:
    """:class:`forge_bridge.flows.session.ConnectionFactory` of one process."""

    def __init__(
        self,
        network: Network,
        process: str,
        sent: Sent,
        reach: Reach,
    ) -> None:
        self._network = network
        self._process = process
        self._sent = sent
        self._reach = reach

    def create(self, task_group: anyio.abc.TaskGroup) -> BridgeConnection:
        """One that was not used yet; it needs no tasks of its own."""
        connection = SimulatedConnection(self._network, self._process, self._sent)
        return Surrounded(connection, self._reach, CALL_POINTS)


class SimulatedConnection:
    """:class:`forge_core.ports.BridgeConnection`."""

    def __init__(
        self,
        network: Network,
        process: str,
        sent: Sent,
    ) -> None:
        self.process = process
        self.is_open = False
        self.heard_s = network.world.now_s
        self.registered_instance: str | None = None
        self._network = network
        self._sent = sent
        self._handlers: dict[str, PayloadHandler] = {}
        self._on_close: Callable[[ForgeError | None], None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._there_s = self._back_s = network.world.loop.time()

    # -- the bridge's side ----------------------------------------------------------------------

    async def start(self) -> None:
        """See the port."""
        network = self._network
        await anyio.sleep(network.rng.uniform(0.005, 0.2))
        if network.partitioned:
            await anyio.sleep(15.0)
        if network.partitioned or not network.hub_is_up:
            raise HubUnavailable("cannot connect to the hub: nothing answers")
        if network.rng.random() < network.faults.refused:
            status = network.rng.choice((401, 429, 503))
            raise HubRefused(f"cannot connect to the hub: status {status}", status=status)
        self.is_open = True
        network.connections.append(self)
        network.world.later(HUB, 0, network.hub.connected, self)

    async def stop(self) -> None:
        """See the port."""
        await anyio.lowlevel.checkpoint()
        self._end(None)

    def on_close(self, handler: Callable[[ForgeError | None], None]) -> None:
        """See the port."""
        self._on_close = handler

    def on_dispatch(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["Dispatch"] = handler

    def on_offer(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["Offer"] = handler

    def on_start(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["Start"] = handler

    def on_lease_update(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["LeaseUpdate"] = handler

    def on_cancel(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["Cancel"] = handler

    def on_reap(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["Reap"] = handler

    def on_runner_settings(self, handler: PayloadHandler) -> None:
        """See the port."""
        self._handlers["RunnerSettings"] = handler

    async def invoke(
        self, method: str, payload: Mapping[str, object], *, timeout_ms: int | None = None
    ) -> object:
        """See the port."""
        if not self.is_open:
            raise HubUnavailable(f"cannot invoke {method}: the connection has ended")
        await self._sent(method, payload)
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._there_s = self._at(self._there_s, HUB, self._arrive, number, method, _copy(payload))
        try:
            with anyio.move_on_after(INVOKE_S if timeout_ms is None else timeout_ms / 1000):
                return await answer
        finally:
            self._calls.pop(number, None)
        raise HubConnectionLost(f"cannot invoke {method}: no answer in time")

    # -- the hub's side -------------------------------------------------------------------------

    def push(self, target: str, payload: Mapping[str, object]) -> None:
        """Say something to the bridge; no answer."""
        network, rng, faults = self._network, self._network.rng, self._network.faults
        if target == "LeaseUpdate" and rng.random() < faults.forged:
            forged = {**payload, "sequence": FORGED_SEQUENCE, "ttlMs": 3_600_000}
            network.world.later(self.process, rng.uniform(0, 1), self._deliver, target, forged)
        copies = 1 + (rng.random() < faults.doubled)
        for _ in range(copies):
            if rng.random() < faults.lost:
                network.world.note("network", f"loses {target}")
            elif rng.random() < faults.late:
                delay_s = rng.uniform(0.1, 20.0)
                network.world.later(self.process, delay_s, self._deliver, target, _copy(payload))
            else:
                self._back_s = self._at(
                    self._back_s, self.process, self._deliver, target, _copy(payload)
                )

    def lose(self, why: str) -> None:
        """The connection breaks."""
        self._end(HubConnectionLost(f"lost the connection to the hub: {why}"))

    # -- private --------------------------------------------------------------------------------

    def _arrive(self, number: int, method: str, payload: dict[str, Any]) -> None:
        network, rng, faults = self._network, self._network.rng, self._network.faults
        if not self.is_open or network.partitioned:
            return
        if rng.random() < faults.dropped:
            self.lose(f"at {method}, which nobody has seen")
            return
        result: dict[str, Any] | ForgeError
        try:
            if rng.random() < faults.hub_errs:
                raise HubError(f"cannot complete {method}: the hub failed")
            result = network.hub.call(self, method, payload)
        except HubError as error:
            result = error
        if rng.random() < faults.ack_lost:
            self.lose(f"before the answer to {method}")
            return
        if rng.random() < faults.ack_late:
            network.world.later(self.process, rng.uniform(1, 50), self._answer, number, result)
            return
        self._back_s = self._at(self._back_s, self.process, self._answer, number, result)

    def _answer(self, number: int, result: dict[str, Any] | ForgeError) -> None:
        answer = self._calls.get(number)
        if self._network.partitioned or answer is None or answer.done():
            return
        if isinstance(result, ForgeError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def _deliver(self, target: str, payload: Mapping[str, object]) -> None:
        if self.is_open and not self._network.partitioned:
            self._network.world.note(self.process, f"hears {target} {_brief(payload)}")
            self._network.delivered(target, payload)
            self._handlers[target](payload)

    def _end(self, error: ForgeError | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        network = self._network
        network.connections.remove(self)
        network.world.note("network", f"ends {self.process}'s connection: {error or 'in order'}")
        network.world.later(HUB, 0, network.hub.disconnected, self)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(HubConnectionLost("lost the connection before the answer"))
        if self._on_close is not None:
            if error is None:
                self._on_close(None)
            else:
                network.world.later(self.process, 0, self._on_close, error)

    def _at(self, earlier_s: float, process: str, call: Callable[..., None], *args: Any) -> float:
        world, rng = self._network.world, self._network.rng
        at_s = max(earlier_s, world.loop.time()) + rng.uniform(0.0005, 0.02)
        world.loop.call_at(at_s, call, *args, context=world.context(process))
        return at_s


def _copy(payload: Mapping[str, object]) -> dict[str, Any]:
    """Over the wire it is JSON."""
    copied: dict[str, Any] = json.loads(json.dumps(payload))
    return copied


def _brief(payload: Mapping[str, Any]) -> str:
    names = ("attemptId", "fence", "offerId", "sequence", "requestId", "reason", "settings")
    return " ".join(str(payload[name]) for name in names if name in payload)
