"""An engine without containers: it keeps what it is asked for, and programs are coroutines.

For tests of what the bridge does towards its hub; whatever depends on what a container really is
or does runs on a real engine.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.abc

from forge_core.errors import EngineConflict, EngineNotFound, EngineTimedOut, EngineUnreachable
from forge_core.ports import EngineImage, EngineResource, ExitStatus, PathKind
from forge_core.sandbox_spec import TOOLING_MOUNT
from forge_core.wire.codes import ResourceKind
from forge_core.wire.shapes import EngineFacts, EngineLimits

IMAGE = "sha256:" + "1" * 64
CREATED_AT = "2026-11-29T14:00:00.000Z"

Program = Callable[["Container"], Awaitable[int]]
"""What a container runs: returns its exit status."""


class Container:
    """A container that was created; also its standard streams, for the program and the bridge."""

    def __init__(self, identity: str, name: str, request: Mapping[str, Any]) -> None:
        self.id = identity
        self.name = name
        self.request = request
        self.exit_code: int | None = None
        self.ended = anyio.Event()
        self.scope = anyio.CancelScope()
        self._input = bytearray()
        self._output: deque[tuple[int, bytes]] = deque()
        self._hung_up = False
        self._moved = anyio.Event()

    @property
    def role(self) -> str:
        return str(self.request["Labels"]["dev.forge.role"])

    # -- the program's side ---------------------------------------------------------------------

    async def read(self, size: int) -> bytes:
        while len(self._input) < size:
            await self._moved.wait()
        data, self._input[:size] = bytes(self._input[:size]), b""
        return data

    async def read_line(self) -> bytes:
        while b"\n" not in self._input:
            await self._moved.wait()
        return await self.read(self._input.index(b"\n") + 1)

    def write(self, data: bytes, channel: int = 1) -> None:
        self._output.append((channel, data))
        self._move()

    def frame(self, kind: str, **fields: object) -> None:
        """One frame of PID 1."""
        self.write(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def hang_up(self) -> None:
        """The streams end although the program goes on."""
        self._hung_up = True
        self._move()

    # -- the bridge's side: an Attachment ---------------------------------------------------------

    async def send(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self.ended.is_set():
            raise EngineUnreachable(f"cannot write to container {self.name}: it has ended")
        self._input += data
        self._move()

    async def receive(self) -> tuple[int, bytes] | None:
        while not self._output:
            if self.ended.is_set() or self._hung_up:
                return None
            await self._moved.wait()
        await anyio.lowlevel.checkpoint()
        return self._output.popleft()

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.ended.set()
        self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()


async def obedient_agent(container: Container) -> int:
    """PID 1 as it should be: does what the first word of its command says, until cancelled.

    ``true`` ends at once, ``false`` fails, ``print`` prints its words and ends, ``env`` prints
    one variable, ``wait`` waits for ``cancel``.
    """
    container.frame("ready")
    orders = json.loads(await container.read_line())
    word, *rest = orders["argv"]
    container.frame("started")
    match word:
        case "print":
            for text in rest:
                container.frame("log", stream="stdout", text=text, droppedBytes=0)
        case "env":
            container.frame("log", stream="stdout", text=orders["env"][rest[0]], droppedBytes=0)
        case "wait":
            while json.loads(await container.read_line())["type"] != "cancel":
                continue
            return 73
    container.frame("exit", code=1 if word == "false" else 0)
    return 0


async def idle_helper(container: Container) -> int:
    """The output helper of a workspace in which nothing has changed."""
    request = json.loads(await container.read_line())
    await container.read(request["listingBytes"])
    container.write(b'{"resultCommit":null,"files":0,"bytes":0}\n')
    return 0


async def packer(container: Container) -> int:
    """The tooling image as it packs its interpreter; nobody unpacks what it writes."""
    container.write(b'{"program": "bin/python3", "loader": "ld.so"}\na tar')
    return 0


async def looker(container: Container) -> int:
    """The packed interpreter, which loads nothing from elsewhere."""
    seen = [f"{TOOLING_MOUNT}/bin/python3"]
    container.write(json.dumps({"files": seen, "modules": seen}).encode())
    return 0


class MemoryEngine:
    """Implements :class:`forge_core.ports.Engine`.

    :ivar programs: what a container of a role runs.
    :ivar faults: by method, the error that it raises instead of doing anything.
    :ivar most_at_once: the most agents that ever ran together.
    :ivar images: those that it can list, by id; any other is there all the same, without a name.
    :ivar configs: what an image declares, by id.
    :ivar requests: everything that was asked for as a container.
    :ivar paths: what every container has, by path.
    """

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {
            "agent": obedient_agent,
            "helper": idle_helper,
            "tooling-pack": packer,
            "tooling-look": looker,
        }
        self.faults: dict[str, Exception] = {}
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, Mapping[str, str]] = {}
        self.created: list[str] = []
        self.most_at_once = 0
        self.images: dict[str, EngineImage] = {}
        self.configs: dict[str, Mapping[str, Any]] = {}
        self.requests: list[Mapping[str, Any]] = []
        self.paths: Mapping[str, PathKind] = {}
        self._tasks: anyio.abc.TaskGroup

    @asynccontextmanager
    async def running(self) -> AsyncIterator[MemoryEngine]:
        async with anyio.create_task_group() as self._tasks:
            yield self
            self._tasks.cancel_scope.cancel()

    @property
    def is_empty(self) -> bool:
        return not self.containers and not self.volumes

    async def facts(self) -> EngineFacts:
        return EngineFacts(
            id="memory",
            version="26.1",
            api_version="1.45",
            rootless=True,
            desktop=False,
            cgroup_version="2",
            storage_driver="none",
            limits=EngineLimits(memory=True, pids=True, cpu=True),
        )

    async def info(self) -> Mapping[str, Any]:
        return {"ID": "memory"}

    async def inspect_image(self, reference: str) -> Mapping[str, Any]:
        await self._enter("inspect_image")
        known = self._image(reference)
        if known is None:
            if ":" in reference and "sha256:" not in reference:
                raise EngineNotFound(f"cannot inspect image {reference}: there is none")
            return {"Id": reference, "Os": "linux", "Config": {}}
        config = {"Labels": dict(known.labels), **self.configs.get(known.id, {})}
        return {"Id": known.id, "Os": "linux", "RepoTags": [*known.names], "Config": config}

    async def list_images(self, labels: Mapping[str, str]) -> Sequence[EngineImage]:
        await self._enter("list_images")
        found = self.images.values()
        return [image for image in found if labels.items() <= image.labels.items()]

    async def tag_image(self, image: str, name: str) -> None:
        await self._enter("tag_image")
        known = self._image(image)
        assert known is not None
        for other in tuple(self.images.values()):
            names = tuple(one for one in other.names if one != name)
            self.images[other.id] = replace(other, names=names)
        self.images[known.id] = replace(known, names=(*self.images[known.id].names, name))

    async def remove_image(self, name: str) -> None:
        await self._enter("remove_image")
        known = self._image(name)
        if known is None:
            raise EngineNotFound(f"cannot remove image {name}: there is none")
        names = tuple(one for one in known.names if one != name)
        if names:
            self.images[known.id] = replace(known, names=names)
        else:
            del self.images[known.id]

    async def create_container(self, name: str, request: Mapping[str, Any]) -> str:
        await self._enter("create_container")
        if any(container.name == name for container in self.containers.values()):
            raise EngineConflict(f"cannot create {name}: the name is taken")
        container = Container(f"{len(self.created):064x}", name, request)
        self.created.append(name)
        self.requests.append(request)
        self.containers[container.id] = container
        running = [c for c in self.containers.values() if c.role == "agent"]
        self.most_at_once = max(self.most_at_once, len(running))
        return container.id

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        await self._enter("inspect_container")
        found = self._find(container)
        request = found.request
        paths = {"MaskedPaths": ["/proc/kcore"], "ReadonlyPaths": ["/proc/sys"]}
        mounts = [
            {
                "Type": "volume",
                "Name": mount["Source"],
                "Destination": mount["Target"],
                "RW": not mount["ReadOnly"],
            }
            for mount in request["HostConfig"]["Mounts"]
        ]
        return {
            "HostConfig": {**request["HostConfig"], **paths},
            "Config": {**request, "Cmd": None},
            "Mounts": mounts,
            "State": {"Running": not found.ended.is_set()},
        }

    async def start_container(self, container: str) -> None:
        await self._enter("start_container")
        self._tasks.start_soon(self._run, self._find(container))

    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus:
        await self._enter("wait_container")
        found = self._find(container)
        with anyio.move_on_after(timeout_ms / 1000):
            await found.ended.wait()
        if found.exit_code is None:
            raise EngineTimedOut(f"cannot see the end of {container}")
        return ExitStatus(found.exit_code, oom_killed=False)

    async def remove_container(self, container: str) -> None:
        await self._enter("remove_container")
        found = self._find(container)
        del self.containers[found.id]
        found.scope.cancel()

    @asynccontextmanager
    async def attach(self, container: str) -> AsyncIterator[Container]:
        await self._enter("attach")
        yield self._find(container)

    async def put_archive(self, container: str, path: str, archive: AsyncIterable[bytes]) -> None:
        await self._enter("put_archive")
        async for _ in archive:
            continue

    async def path_kind(self, container: str, path: str) -> PathKind | None:
        return self.paths.get(path)

    async def create_volume(
        self, name: str, labels: Mapping[str, str], *, size_bytes: int | None = None
    ) -> str:
        await self._enter("create_volume")
        self.volumes[name] = dict(labels)
        return name

    async def remove_volume(self, name: str) -> None:
        await self._enter("remove_volume")
        if self.volumes.pop(name, None) is None:
            raise EngineNotFound(f"cannot remove volume {name}: there is none")

    async def create_network(self, name: str, request: Mapping[str, Any]) -> str:
        raise NotImplementedError

    async def inspect_network(self, network: str) -> Mapping[str, Any]:
        raise EngineNotFound(f"cannot inspect network {network}: there is none")

    async def connect_network(
        self, network: str, container: str, *, address: str, aliases: Sequence[str] = ()
    ) -> None:
        raise NotImplementedError

    async def remove_network(self, network: str) -> None:
        raise EngineNotFound(f"cannot remove network {network}: there is none")

    async def network_endpoints(self, network: str) -> Sequence[str]:
        raise EngineNotFound(f"cannot inspect network {network}: there is none")

    async def disconnect_network(self, network: str, container: str) -> None:
        raise NotImplementedError

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        await self._enter("list_resources")
        containers = [
            (ResourceKind.CONTAINER, c.id, c.name, c.request["Labels"])
            for c in self.containers.values()
        ]
        volumes = [(ResourceKind.VOLUME, n, n, has) for n, has in self.volumes.items()]
        return [
            EngineResource(kind, identity, name, dict(has), CREATED_AT)
            for kind, identity, name, has in (*containers, *volumes)
            if labels.items() <= has.items()
        ]

    async def _enter(self, method: str) -> None:
        await anyio.lowlevel.checkpoint()
        if method in self.faults:
            raise self.faults[method]

    def _image(self, reference: str) -> EngineImage | None:
        for image in self.images.values():
            if reference == image.id or reference in image.names:
                return image
        return None

    def _find(self, container: str) -> Container:
        for found in self.containers.values():
            if container in (found.id, found.name):
                return found
        raise EngineNotFound(f"cannot find container {container}: there is none")

    async def _run(self, container: Container) -> None:
        with container.scope:
            container.finish(await self.programs[container.role](container))
        if not container.ended.is_set():
            container.finish(137)
