"""The services of simulated attempts, and the tooling that their PID 1 runs from.

A service has the same model of PID 1 as an agent (:class:`.containers.Pid1`): its lease, its
hostility.  Beside that it may die at any moment, never be ready, or say what is no version.
"""

from __future__ import annotations

import json
from typing import Final, Protocol

from forge_bridge.images.tooling import FILL_ROLE, LOOK_ROLE, PACK_ROLE
from forge_bridge.services.container import ServiceImage
from forge_core.sandbox_spec import TOOLING_MOUNT
from forge_core.services import CATALOGUE, PASSWORD_VARIABLE
from forge_core.wire.codes import ServiceName
from forge_supervisor import supervisor as real

from .containers import AgentPlan, AgentWatch, Pid1
from .engine import Container
from .faults import Faults
from .world import World

VERSION: Final = "15.2"


def _image(name: ServiceName, digit: str) -> ServiceImage:
    digest = f"sha256:{digit * 64}"
    return ServiceImage(f"{name}@{digest}", digest, "/bin", (), (), version=VERSION)


SERVICES: Final = {
    name: _image(name, digit)
    for name, digit in ((ServiceName.POSTGRES, "3"), (ServiceName.REDIS, "4"))
}
SERVICE_ROLES: Final = frozenset(CATALOGUE[name].role for name in SERVICES)
FOR_EVER_S: Final = 1e6


class ServiceWatch(AgentWatch, Protocol):
    """Who is told what services really do."""

    def service_told(self, service: ServicePid1, password: str) -> None: ...
    def service_died(self, service: ServicePid1) -> None: ...


class ServicePid1(Pid1):
    """The supervisor of a service; its child is a server that needs a while to be ready."""

    def __init__(
        self, world: World, faults: Faults, container: Container, watch: ServiceWatch
    ) -> None:
        super().__init__(world, faults, container, watch)
        self._watch: ServiceWatch = watch
        self._fails = None
        if self._rng.random() < faults.service_dies:
            self._fails = self._rng.choice(("at once", "later", "later", "never ready", "nonsense"))
        self._password = b""

    def _plan_of(self, init: real.Init) -> AgentPlan:
        self._password = init.env[PASSWORD_VARIABLE.encode()]
        self._watch.service_told(self, self._password.decode())
        ready_s = 0.0 if self._fails == "never ready" else self._rng.uniform(0.1, 3.0)
        runs_s = {"at once": 0.05, "later": ready_s + self._rng.uniform(0, 30)}
        return AgentPlan(runs_s.get(self._fails or "", FOR_EVER_S), 1, ready_s)

    def _print(self) -> None:
        """The one line that anybody looks at."""
        said = (
            b"ready!\n" if self._fails == "nonsense" else json.dumps({"version": VERSION}).encode()
        )
        self._outbox.logs.feed("stdout", said + b"\n")
        self._prints_at_ms = None

    def kill(self) -> None:
        """That is nothing that it did by itself."""
        self._phase = real.Phase.FLUSHING
        super().kill()

    def _end_agent(self) -> None:
        if self.is_running and self._phase is real.Phase.RUNNING:
            self._outbox.logs.feed("stderr", b"FATAL: no room for " + self._password + b"\n")
            self._watch.service_died(self)
        super()._end_agent()


class ToolingProgram:
    """What a container of the tooling image prints when the tooling is made of it."""

    def __init__(self, world: World, _faults: Faults, container: Container) -> None:
        self._world = world
        self._container = container
        self._rng = world.rng(f"tooling/{container.name}")

    def start(self) -> None:
        """It takes a moment."""
        delay_s = self._rng.uniform(0.05, 1.0)
        self._world.later(self._container.process, delay_s, self._print)

    def stdin(self, data: bytes) -> None:
        """Nobody has anything to say to it."""

    def kill(self) -> None:
        """Nothing more is said."""

    def _print(self) -> None:
        if self._container.status != "running":
            return
        if self._container.role == PACK_ROLE:
            head = {"program": "bin/python3", "loader": None}
            self._container.output(1, json.dumps(head).encode() + b"\na tar")
        else:
            inside = [f"{TOOLING_MOUNT}/bin/python3"]
            seen = {"files": inside, "modules": inside}
            self._container.output(1, json.dumps(seen).encode() + b"\n")
        self._container.exit(0)


TOOLING_PROGRAMS: Final = dict.fromkeys((PACK_ROLE, FILL_ROLE, LOOK_ROLE), ToolingProgram)
