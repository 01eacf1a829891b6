"""The simulated Docker Engine: what it holds, and how it misbehaves.

Fault model (measured on real engines): a request whose client gave up may still be carried out;
the connection may break before or after that; a daemon that is killed takes attachments along as
if their containers had ended, and comes back with its containers running, or killed, or with an
exit code that is not theirs; a stopped daemon carries requests out once it goes on; a removal may
be refused for a while; another engine may stand behind the same socket.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forge_core.errors import (
    EngineConflict,
    EngineNotFound,
    EngineOutOfDisk,
    EngineRefused,
    ForgeError,
)
from forge_core.labels import ROLE
from forge_core.ports import EngineImage, EngineResource, ExitStatus, PathKind
from forge_core.wire.codes import ResourceKind

from .engine_networks import EngineNetworks
from .faults import Faults
from .world import World

PROCESS = "engine"
UNKNOWN_EXIT_CODES = (0, 137, 255)
"""What an engine says of a container whose end it did not see."""


class Program(Protocol):
    """What runs in a container."""

    def start(self) -> None: ...
    def stdin(self, data: bytes) -> None: ...
    def kill(self) -> None:
        """SIGKILL: nothing of it goes on."""


class EngineWatch(Protocol):
    """Who is told what really happens in the engine."""

    def created(self, resource: EngineResource) -> None: ...
    def started(self, container: Container) -> None: ...
    def removed(self, resource: EngineResource) -> None: ...


@dataclass(eq=False)
class Container:
    """A container, from its creation to its removal."""

    engine: SimulatedEngine
    id: str
    name: str
    request: Mapping[str, Any]
    created_at: str
    status: str = "created"
    exit_code: int = 0
    oom_killed: bool = False
    stuck_until_s: float = 0.0
    networks: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    program: Program | None = None
    ended: list[Callable[[], None]] = field(default_factory=list)
    outputs: list[Callable[[tuple[int, bytes] | None], None]] = field(default_factory=list)

    @property
    def labels(self) -> Mapping[str, str]:
        """As it was created with."""
        labels: Mapping[str, str] = self.request.get("Labels", {})
        return labels

    @property
    def role(self) -> str:
        """Its role, empty for a foreign one."""
        return self.labels.get(ROLE, "")

    @property
    def process(self) -> str:
        """As the loop knows it, to freeze it."""
        return f"container-{self.id[:8]}"

    @property
    def resource(self) -> EngineResource:
        """As it is listed."""
        return EngineResource(
            ResourceKind.CONTAINER, self.id, self.name, dict(self.labels), self.created_at
        )

    def output(self, channel: int, data: bytes) -> None:
        """Its processes have written; nobody keeps what nobody reads."""
        for output in tuple(self.outputs):
            output((channel, data))

    def exit(self, exit_code: int, *, oom_killed: bool = False) -> None:
        """Its PID 1 has ended."""
        assert self.status == "running", self.status
        self.status, self.exit_code, self.oom_killed = "exited", exit_code, oom_killed
        if not self.engine.up or self.engine.rng.random() < self.engine.faults.exit_lies:
            self.exit_code = self.engine.rng.choice(UNKNOWN_EXIT_CODES)
        self.engine.world.note(self.process, f"{self.role} exits with {exit_code}")
        self.engine.nets.leave(self)
        for output in tuple(self.outputs):
            output(None)
        for ended in tuple(self.ended):
            ended()


@dataclass(eq=False)
class Thing:
    """A volume or a network.

    :ivar stale_endpoints: of containers that have ended; a network's alone.
    """

    resource: EngineResource
    stuck_until_s: float = 0.0
    archive: bytes = b""
    request: Mapping[str, Any] = field(default_factory=dict)
    stale_endpoints: set[str] = field(default_factory=set)


Contents = tuple[dict[str, Container], dict[str, Thing], dict[str, Thing], dict[str, EngineImage]]


class SimulatedEngine:
    """What stands behind the socket; :class:`.engine_door.EngineDoor` is the way to it.

    :param programs: what a container runs; None: there is no such program.
    """

    process = PROCESS

    def __init__(
        self,
        world: World,
        faults: Faults,
        watch: EngineWatch,
        programs: Callable[[Container], Program | None],
        images: frozenset[str],
    ) -> None:
        self.world = world
        self.faults = faults
        self.rng = world.rng("engine")
        self.id = "engine-1"
        self.up = True
        self.epoch = 0
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, Thing] = {}
        self.networks: dict[str, Thing] = {}
        self.nets = EngineNetworks(self)
        self.broken: list[Callable[[], None]] = []
        self.watch = watch
        self._programs = programs
        self.images = {digest: EngineImage(digest, (), {}) for digest in images}
        self.on_image_removed: Callable[[EngineImage], None] = lambda _image: None
        self._numbers = itertools.count(1)
        self._pulled = dict(self.images)
        self._elsewhere: Contents | None = None

    # -- what happens to the daemon --------------------------------------------------------------

    def die(self) -> None:
        """SIGKILL of the daemon: its containers run on, every connection breaks."""
        self.up = False
        self.epoch += 1
        self.world.note(PROCESS, "is killed")
        broken, self.broken = self.broken, []
        for container in self.containers.values():
            container.outputs.clear()
            container.ended.clear()
        for notify in broken:
            notify()

    def restart(self, *, keeps_containers: bool) -> None:
        """The daemon is back."""
        self.up = True
        self.world.note(PROCESS, f"is back, {'with' if keeps_containers else 'without'} survivors")
        if not keeps_containers:
            for container in self.containers.values():
                if container.status == "running":
                    self._kill(container)

    def replace(self) -> None:
        """Another engine stands behind the socket, with nothing in it; again: the first is back.

        The other one is gone for good then, with all that runs in it.
        """
        if self._elsewhere is not None:
            for container in self.containers.values():
                if container.status == "running":
                    self._kill(container)
        here = (self.containers, self.volumes, self.networks, self.images)
        there = self._elsewhere or ({}, {}, {}, dict(self._pulled))
        self.containers, self.volumes, self.networks, self.images = there
        self._elsewhere = None if self._elsewhere is not None else here
        self.id = "engine-1" if self._elsewhere is None else "engine-2"
        self.world.note(PROCESS, f"is {self.id} from here on")

    @property
    def is_replaced(self) -> bool:
        """Whether another engine stands there now."""
        return self._elsewhere is not None

    def resources_of(self, engine_id: str) -> list[EngineResource]:
        """What one of the two holds; the second forgets everything when it is gone."""
        if engine_id == self.id:
            return self.resources()
        if self._elsewhere is None:
            return []
        containers, volumes, networks, _ = self._elsewhere
        things = (*networks.values(), *volumes.values())
        return [c.resource for c in containers.values()] + [t.resource for t in things]

    def resources(self) -> list[EngineResource]:
        """Everything it holds."""
        things = (*self.networks.values(), *self.volumes.values())
        return [c.resource for c in self.containers.values()] + [t.resource for t in things]

    # -- what is asked of it ---------------------------------------------------------------------

    def create_container(self, name: str, request: Mapping[str, Any]) -> str:
        """As the port says."""
        self._image(request["Image"], f"create container {name}")
        if any(c.name == name for c in self.containers.values()):
            raise EngineConflict(f"cannot create container {name}: the name is taken")
        for mount in request["HostConfig"]["Mounts"]:
            if mount["Source"] not in self.volumes:
                raise EngineNotFound(f"cannot create container {name}: no {mount['Source']}")
        self._make_room(name)
        identity = self.new_id()
        container = Container(self, identity, name, request, self.world.utc())
        endpoints = request.get("NetworkingConfig", {}).get("EndpointsConfig", {})
        for network, endpoint in endpoints.items():
            container.networks[self.nets.find(network).resource.id] = endpoint
        container.program = self._programs(container)
        self.containers[identity] = container
        self.world.note(PROCESS, f"creates container {name} as {identity[:8]}")
        self.watch.created(container.resource)
        return identity

    def start_container(self, reference: str) -> None:
        """As the port says; of one that runs, nothing."""
        container = self.container(reference, "start")
        if container.status == "running":
            return
        if container.program is None:
            raise EngineRefused(f"cannot start container {reference}: no such program")
        if container.status == "exited":
            raise EngineRefused(f"cannot start container {reference}: it has ended")
        self.nets.join(container)
        container.status = "running"
        self.world.note(PROCESS, f"starts {container.role} {container.id[:8]}")
        self.watch.started(container)
        container.program.start()

    def inspect_container(self, reference: str) -> Mapping[str, Any]:
        """The request as an engine echoes it."""
        container = self.container(reference, "inspect")
        request = container.request
        paths = {"MaskedPaths": ["/proc/kcore"], "ReadonlyPaths": ["/proc/sys"]}
        return {
            "Id": container.id,
            "HostConfig": {**request["HostConfig"], **paths},
            "Config": {**request, "Cmd": None},
            "Mounts": [
                {
                    "Type": "volume",
                    "Name": mount["Source"],
                    "Destination": mount["Target"],
                    "RW": not mount["ReadOnly"],
                }
                for mount in request["HostConfig"]["Mounts"]
            ],
            "State": {"Status": container.status, "Running": container.status == "running"},
            "NetworkSettings": {
                "Networks": {
                    self.networks[identity].resource.name: {
                        **endpoint,
                        "IPAddress": container.addresses.get(identity, ""),
                    }
                    for identity, endpoint in container.networks.items()
                    if identity in self.networks
                }
            },
        }

    def exit_status(self, reference: str) -> ExitStatus | None:
        """How it ended; None: it has not."""
        container = self.container(reference, "wait for")
        if container.status == "created":
            raise EngineConflict(f"cannot wait for container {reference}: it was never started")
        if container.status == "running":
            return None
        return ExitStatus(container.exit_code, container.oom_killed)

    def remove_container(self, reference: str) -> None:
        """Kill and remove, unless it resists."""
        container = self.container(reference, "remove")
        self.resist(container, f"container {reference}")
        if container.status == "running":
            self._kill(container)
        del self.containers[container.id]
        self.world.note(PROCESS, f"removes {container.role} {container.id[:8]}")
        self.watch.removed(container.resource)

    def create_volume(self, name: str, labels: Mapping[str, str]) -> str:
        """As the port says."""
        if name in self.volumes:
            raise EngineConflict(f"cannot create volume {name}: there is one")
        self._make_room(name)
        volume = self.volumes[name] = self.new_thing(ResourceKind.VOLUME, name, name, labels)
        self.watch.created(volume.resource)
        return name

    def remove_volume(self, name: str) -> None:
        """Unless a container has it."""
        volume = self.volumes.get(name)
        if volume is None:
            raise EngineNotFound(f"cannot remove volume {name}: there is none")
        mounts = [m for c in self.containers.values() for m in c.request["HostConfig"]["Mounts"]]
        if any(mount["Source"] == name for mount in mounts):
            raise EngineConflict(f"cannot remove volume {name}: it is in use")
        self.resist(volume, f"volume {name}")
        del self.volumes[name]
        self.world.note(PROCESS, f"removes volume {name}")
        self.watch.removed(volume.resource)

    def put_archive(self, reference: str, path: str, archive: bytes) -> None:
        """Into a volume of the container, nowhere else."""
        container = self.container(reference, f"fill {path} of")
        for mount in container.request["HostConfig"]["Mounts"]:
            if mount["Target"] == path:
                self.volumes[mount["Source"]].archive = archive
                return
        if path == "/":
            raise EngineRefused(f"cannot fill {path} of container {reference}: read-only")
        raise EngineNotFound(f"cannot fill {path} of container {reference}: no such path")

    def path_kind(self, reference: str, path: str) -> PathKind | None:
        """Every image has a shell and no preload file."""
        self.container(reference, f"look for {path} in")
        kinds: Mapping[str, PathKind] = {"/": "directory", "/bin/sh": "other"}
        return kinds.get(path)

    def inspect_image(self, reference: str) -> Mapping[str, Any]:
        """As the port says."""
        image = self._image(reference, f"inspect image {reference}")
        labels = {"Labels": dict(image.labels)}
        return {"Id": image.id, "RepoTags": list(image.names), "Os": "linux", "Config": labels}

    def tag_image(self, reference: str, name: str) -> None:
        """As the port says."""
        image = self._image(reference, f"tag image {reference}")
        for other in tuple(self.images.values()):
            kept = tuple(one for one in other.names if one != name)
            self.images[other.id] = replace(other, names=kept)
        names = (*self.images[image.id].names, name)
        self.images[image.id] = replace(image, names=names)

    def remove_image(self, name: str) -> None:
        """Unless it is the last name and a container has the image."""
        image = self._image(name, f"remove image {name}")
        names = tuple(one for one in image.names if one != name)
        used = any(c.request["Image"].endswith(image.id) for c in self.containers.values())
        if not names and used:
            raise EngineConflict(f"cannot remove image {name}: a container uses it")
        if names:
            self.images[image.id] = replace(image, names=names)
        else:
            del self.images[image.id]
            self.world.note(PROCESS, f"removes image {image.id[:15]}")
            self.on_image_removed(image)

    def _image(self, reference: str, action: str) -> EngineImage:
        """By id, by digest, or by name."""
        found = self.images.get(reference.rpartition("@")[2])
        for image in self.images.values():
            if reference in image.names:
                found = image
        if found is None:
            raise EngineNotFound(f"cannot {action}: there is no image {reference}")
        return found

    def container(self, reference: str, action: str) -> Container:
        """By id or name."""
        for container in self.containers.values():
            if reference in (container.id, container.name):
                return container
        raise EngineNotFound(f"cannot {action} container {reference}: there is none")

    def new_id(self) -> str:
        """64 hexadecimal digits, of which no two begin alike."""
        return f"{next(self._numbers):08x}" + f"{self.rng.getrandbits(224):056x}"

    def new_thing(
        self, kind: ResourceKind, identity: str, name: str, labels: Mapping[str, str]
    ) -> Thing:
        """One that nobody has been told of."""
        self.tell(f"creates {kind} {name}")
        return Thing(EngineResource(kind, identity, name, dict(labels), self.world.utc()))

    def tell(self, what: str) -> None:
        """A line of the trace."""
        self.world.note(PROCESS, what)

    def resist(self, thing: Container | Thing, what: str) -> None:
        """Whether it can be removed now; raises EngineConflict: it cannot."""
        if self.rng.random() < self.faults.engine_stuck:
            thing.stuck_until_s = self.world.now_s + self.rng.uniform(5, 200)
        if self.world.now_s < thing.stuck_until_s:
            raise EngineConflict(f"cannot remove {what}: device or resource busy")

    # -- private ---------------------------------------------------------------------------------

    def _kill(self, container: Container) -> None:
        assert container.program is not None
        container.program.kill()
        if container.status == "running":
            container.exit(137)

    def _make_room(self, name: str) -> None:
        if self.rng.random() < self.faults.engine_full:
            raise EngineOutOfDisk(f"cannot create {name}: no space left on device")


def settle(answer: asyncio.Future[Any], call: Callable[[], object]) -> None:
    """Carry a request out, and answer when anybody still waits."""
    try:
        result = call()
    except ForgeError as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(result)
