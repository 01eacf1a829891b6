"""What PID 1 runs from in an image that is not ours (sandbox.md, PID 1; B-29).

The tooling image's interpreter, its standard library and the shared libraries that the supervisor
loads lie in a volume that every such container mounts read-only: one copy for all images, made
once in the life of a bridge and removed with it.  The image itself stays what the gates have
proven, to the byte.

Nothing of the project's image has a say in PID 1: the loader is started by its path, finds every
library in the volume, and reads neither the image's cache nor its environment.  That this is so
is read back from a process, not concluded.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import Annotated, Final

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_bridge.containers import create_as_asked
from forge_bridge.images.pack_tooling import SHARED
from forge_core.errors import EngineNotFound, EngineRefused, RefusedError
from forge_core.labels import Owner
from forge_core.ports import Attachment, Engine
from forge_core.sandbox_spec import (
    TOOLING_MOUNT,
    ContainerSpec,
    Hardening,
    VolumeMount,
    container_request,
)
from forge_core.wire.codes import ResourceKind

VOLUME_ROLE: Final = "tooling"
PACK_ROLE: Final = "tooling-pack"
FILL_ROLE: Final = "tooling-fill"
LOOK_ROLE: Final = "tooling-look"
MAX_TREE_BYTES: Final = 1 << 29
MAX_ANSWER_BYTES: Final = 256 * 1024
MAX_COMPLAINT_BYTES: Final = 4096
MEMORY_BYTES: Final = 256 * 2**20
CPU_MILLIS: Final = 2000
PIDS: Final = 16
MAKE_S: Final = 300.0
REMOVE_S: Final = 30.0
EXIT_MS: Final = 10_000

PID_1_ENVIRONMENT: Final = {"LC_ALL": "C", "OPENSSL_CONF": "/dev/null"}
"""Of PID 1 alone.  Any other locale can make the C library load code from the image
(``gconv``, locale(7)), and so can OpenSSL's own configuration file (config(5ssl))."""

_INTERPRETER: Final = "/usr/bin/python3"


@dataclass(frozen=True, slots=True)
class ToolingTree:
    """The tree in its volume.

    :param interpreter: the first words of a command, up to the interpreter itself.
    """

    volume: str
    interpreter: tuple[str, ...]

    @property
    def mount(self) -> VolumeMount:
        """How a container has it."""
        return VolumeMount(self.volume, TOOLING_MOUNT, read_only=True)


class _Head(BaseModel):
    """What the packer says of its tar; a claim, so bounded."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    program: Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./+-]*$")]
    loader: Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$")] | None


class _Seen(BaseModel):
    """What a process of the tree has loaded."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    files: Annotated[tuple[str, ...], Field(min_length=1, max_length=4096)]
    modules: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]


@dataclass(slots=True)
class Tooling:
    """Makes the tree when it is first needed.

    :param owner: :meth:`Owner.of_runner` of this instance.
    :param image: the tooling image, pinned.
    :param supervisor: the source that will run.
    """

    engine: Engine
    owner: Owner
    image: str
    supervisor: str
    hardening: Hardening
    _tree: ToolingTree | None = None
    _one_at_a_time: anyio.Lock = field(default_factory=anyio.Lock)

    async def provide(self) -> ToolingTree:
        """The tree; it is made, or made again where somebody took it away.

        :raises RefusedError: ``image_policy_denied``: no such tree can be made of this image.
        :raises RetryableError: the engine went away, was too slow, or has no space.
        """
        async with self._one_at_a_time:
            if self._tree is None or not await self._is_there(self._tree):
                self._tree = None
                self._tree = await self._make()
            return self._tree

    async def remove(self) -> None:
        """Take everything of it away; what resists, the next start removes."""
        async with self._one_at_a_time:
            self._tree = None
            await self._remove()

    async def _is_there(self, tree: ToolingTree) -> bool:
        # An engine that is asked to mount a volume that is not there makes an empty one.
        labels = self.owner.labels(VOLUME_ROLE)
        listed = await self.engine.list_resources(labels)
        return any(r.kind is ResourceKind.VOLUME and r.name == tree.volume for r in listed)

    async def _make(self) -> ToolingTree:
        await self._remove()
        try:
            with anyio.move_on_after(MAKE_S):
                volume = await self.engine.create_volume(
                    self.owner.name(VOLUME_ROLE), self.owner.labels(VOLUME_ROLE)
                )
                tree = ToolingTree(volume, _command(await self._pack(volume)))
                await self._require_alone(tree)
                return tree
            raise self._unfit(f"that took more than {MAKE_S:.0f} s")
        except BaseException:
            with anyio.move_on_after(REMOVE_S, shield=True):
                await self._remove()
            raise

    async def _pack(self, volume: str) -> _Head:
        """Have the engine unpack what a container of the image prints.

        Into another one, which never runs: an engine that unpacks into a container may not see
        the end of that container's output meanwhile (20.10).
        """
        holder = VolumeMount(volume, TOOLING_MOUNT, read_only=False)
        filled = await self._create(FILL_ROLE, (_INTERPRETER,), "look", holder)
        container = await self._create(PACK_ROLE, (_INTERPRETER,), "pack")
        complaint = bytearray()
        async with self.engine.attach(container) as stream:
            await self.engine.start_container(container)
            pieces = _stdout(stream, complaint)
            line, rest = await _first_line(pieces)
            try:
                head = _Head.model_validate_json(line)
            except ValidationError:
                raise self._unfit(f"it said {_said(complaint)}") from None
            await self.engine.put_archive(filled, TOOLING_MOUNT, _bounded(rest, pieces))
        status = await self.engine.wait_container(container, timeout_ms=EXIT_MS)
        if status.exit_code != 0:
            raise self._unfit(f"it ended with {status.exit_code}: {_said(complaint)}")
        await self.engine.remove_container(container)
        await self.engine.remove_container(filled)
        return head

    async def _require_alone(self, tree: ToolingTree) -> None:
        """Everything that a process of the tree loads must come from the tree.

        It runs in the tooling image, where whatever it might look for elsewhere really is.
        """
        container = await self._create(LOOK_ROLE, tree.interpreter, "look", tree.mount)
        complaint = bytearray()
        async with self.engine.attach(container) as stream:
            await self.engine.start_container(container)
            answer = b"".join([p async for p in _bounded(b"", _stdout(stream, complaint))])
        try:
            seen = _Seen.model_validate_json(answer[:MAX_ANSWER_BYTES])
        except ValidationError:
            raise self._unfit(f"it does not run elsewhere: {_said(complaint)}") from None
        outside = [p for p in (*seen.files, *seen.modules) if not p.startswith(f"{TOOLING_MOUNT}/")]
        if outside:
            raise self._unfit(f"elsewhere it would still load {', '.join(outside)[:500]}")
        await self.engine.remove_container(container)

    async def _create(
        self, role: str, interpreter: tuple[str, ...], action: str, *mounts: VolumeMount
    ) -> str:
        source = resources.files(__package__).joinpath("pack_tooling.py").read_text("utf-8")
        spec = ContainerSpec(
            owner=self.owner,
            role=role,
            image=self.image,
            argv=(*interpreter, "-I", "-S", "-c", source, action, self.supervisor),
            memory_bytes=MEMORY_BYTES,
            cpu_millis=CPU_MILLIS,
            pids=PIDS,
            environment=PID_1_ENVIRONMENT,
            resolves_localhost=False,
            mounts=mounts,
        )
        request = container_request(spec, self.hardening)
        return await create_as_asked(self.engine, spec.name, request)

    async def _remove(self) -> None:
        for role in (PACK_ROLE, FILL_ROLE, LOOK_ROLE):
            with suppress(EngineNotFound):
                await self.engine.remove_container(self.owner.name(role))
        with suppress(EngineNotFound):
            await self.engine.remove_volume(self.owner.name(VOLUME_ROLE))

    def _unfit(self, why: str) -> RefusedError:
        return RefusedError(
            f"cannot run PID 1 from {self.image} in the image of a project: {why}",
            code="image_policy_denied",
            field="FORGE_AGENT_TOOLING_IMAGE",
        )


def _command(head: _Head) -> tuple[str, ...]:
    program = f"{TOOLING_MOUNT}/{head.program}"
    if head.loader is None:
        return (program,)
    shared = f"{TOOLING_MOUNT}/{SHARED}"
    # musl's loader has no cache, and no such option (ld.so(8)).
    uncached = () if head.loader.startswith("ld-musl-") else ("--inhibit-cache",)
    return (f"{shared}/{head.loader}", *uncached, "--library-path", shared, program)


async def _stdout(stream: Attachment, complaint: bytearray) -> AsyncIterator[bytes]:
    while (piece := await stream.receive()) is not None:
        channel, data = piece
        if channel == 1:
            yield data
        else:
            complaint += data[: MAX_COMPLAINT_BYTES - len(complaint)]


async def _first_line(pieces: AsyncIterator[bytes]) -> tuple[bytes, bytes]:
    """The first line, and what came with it of the rest."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        if b"\n" in buffer or len(buffer) > MAX_ANSWER_BYTES:
            break
    line, _, rest = bytes(buffer).partition(b"\n")
    return line, rest


async def _bounded(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size_bytes = len(first)
    if first:
        yield first
    async for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > MAX_TREE_BYTES:
            raise EngineRefused(f"cannot pack the tooling: it has more than {MAX_TREE_BYTES} bytes")
        yield piece


def _said(complaint: bytearray) -> str:
    return json.dumps(" ".join(complaint.decode(errors="replace").split())[-500:])
