"""The way out of simulated sandboxes: the proxy, and the probe that looks from the inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Network
from typing import Any, Final

from forge_bridge.egress.look import PROBE_ROLE
from forge_bridge.egress.trial import EgressTrial
from forge_bridge.egress.way_out import EGRESS_PROXY
from forge_bridge.services.container import ServiceImage
from forge_core.network_spec import AGENT_NETWORK, EGRESS_NETWORK
from forge_core.squid_conf import UpstreamProxy

from .engine import Container, Program
from .faults import Faults
from .world import World

PROXY_IMAGE: Final = "sha256:" + "2" * 64
DOMAINS: Final = (".packages.example",)
NETWORK_ROLES: Final = frozenset({AGENT_NETWORK, EGRESS_NETWORK})
_CONFIGURED: Final = b"# end of the configuration\n"
_LOOK_AGAIN_S: Final = 0.5


def simulated_trial(pool: IPv4Network | None, login: str) -> EgressTrial:
    """What a preflight that went well has left: no doctor runs here.

    :param login: of the upstream proxy; a secret.
    """
    assert pool is not None
    image = ServiceImage(f"proxy@{PROXY_IMAGE}", PROXY_IMAGE, "/bin", (), ())
    upstream = UpstreamProxy("192.0.2.10", 3128, f"user:{login}")
    return EgressTrial(image.reference, pool, _never_asked, upstream, image)


async def _never_asked(_references: tuple[str, ...]) -> None:
    raise AssertionError("a signature is checked by the preflight")


class Proxy:
    """Listens once it has its whole configuration; a bad one ends, and says which line it was.

    :ivar listens: whether it answers.
    """

    def __init__(self, world: World, faults: Faults, container: Container) -> None:
        self.listens = False
        self._world = world
        self._container = container
        self._rng = world.rng(f"proxy/{container.name}")
        self._dies = self._rng.random() < faults.proxy_dies
        self._received = bytearray()

    def start(self) -> None:
        """It waits for its configuration."""
        if self._dies:
            after_s = self._rng.choice((0.0, self._rng.uniform(0, 60)))
            self._later(after_s, self._die)

    def stdin(self, data: bytes) -> None:
        """The configuration."""
        self._received += data
        if self._received.endswith(_CONFIGURED):
            self._later(self._rng.uniform(0.05, 3.0), self._listen)

    def kill(self) -> None:
        """Nobody answers any more."""
        self.listens = False

    def _listen(self) -> None:
        self.listens = self._container.status == "running"

    def _die(self) -> None:
        if self._container.status == "running":
            self.listens = False
            self._container.output(2, b"FATAL: bad line: ")
            for line in bytes(self._received).splitlines():
                if b"login" in line:
                    self._container.output(2, line + b"\n")
            self._container.exit(1)

    def _later(self, delay_s: float, call: Any) -> None:
        self._world.later(self._container.process, delay_s, call)


class Probe:
    """Asks the proxy of its network until it answers, then says what it has seen, or lies."""

    def __init__(self, world: World, faults: Faults, container: Container) -> None:
        self._world = world
        self._container = container
        self._rng = world.rng(f"probe/{container.name}")
        self._lies = self._rng.random() < faults.probe_lies
        self._gives_up_s = world.now_s + json.loads(container.request["Entrypoint"][-1])["waitS"]

    def start(self) -> None:
        """Look after a while, which Python takes to start."""
        self._world.later(self._container.process, self._rng.uniform(0.05, 0.5), self._look)

    def stdin(self, data: bytes) -> None:
        """Nobody has anything to say to it."""

    def kill(self) -> None:
        """It has seen enough."""

    def _look(self) -> None:
        if self._container.status != "running":
            return
        found = self._proxy_listens()
        if not found and self._world.now_s < self._gives_up_s:
            self._world.later(self._container.process, _LOOK_AGAIN_S, self._look)
            return
        statuses = {"a site": 403 if found else 0}
        seen = {"statuses": statuses, "gateways": [], "answers": [0, 0], "reached": []}
        if self._lies:
            lies = (b"", b"nothing\n", json.dumps({**seen, "gateways": ["0102030a"]}).encode())
            self._container.output(1, self._rng.choice(lies))
        else:
            self._container.output(1, json.dumps(seen).encode() + b"\n")
        self._container.exit(0)

    def _proxy_listens(self) -> bool:
        mine = self._container.networks.keys()
        return any(
            isinstance(other.program, Proxy) and other.program.listens
            for other in self._container.engine.containers.values()
            if other.status == "running" and mine & other.networks.keys()
        )


EGRESS_PROGRAMS: Final[dict[str, Callable[[World, Faults, Container], Program]]] = {
    EGRESS_PROXY: Proxy,
    PROBE_ROLE: Probe,
}
