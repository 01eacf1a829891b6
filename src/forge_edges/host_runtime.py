"""Dispatches on the host itself: :class:`forge_core.ports.HostRuntime` (B-53).

::

    <directory>/<name>.json     whose directory it is; durable before there is one
    <directory>/<name>/         0700
      home/  scratch/           instead of the service account's own
      tree/                     the input commit

A process says itself whose it is: it is started with this directory and its labels in a variable
that everything below it inherits (:mod:`forge_edges.host_processes`).  So what an earlier life of
the bridge has left is found by looking, as the engine is asked for labels, and never by a process
id that somebody else may have by now.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.to_thread
import structlog

from forge_core.errors import EngineConflict, EngineNotFound, RefusedError
from forge_core.labels import name_of
from forge_core.ports import Clock, EngineResource, ExitStatus, HostProgram
from forge_core.wire.codes import ResourceKind
from forge_edges.durable_file import create_file, disk_errors, on_disk, read_file, remove_file
from forge_edges.host_commands import INHERITED
from forge_edges.host_processes import end_marked, marks
from forge_edges.host_program import RunningProgram
from forge_edges.tree_removal import remove_tree
from forge_edges.tree_unpack import unpack
from forge_supervisor.host_agent import MARK

logger = structlog.get_logger(__name__)

KILL_MS: Final = 10_000
UNPACKINGS_AT_ONCE: Final = 4
REMOVALS_AT_ONCE: Final = 4
MAX_LABELS_BYTES: Final = 8_192
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_VARIABLE: Final = MARK.decode()
_NAME: Final = re.compile(r"forge-[a-z][a-z0-9_.-]{0,63}-[0-9a-f]{24}")
_SUFFIX: Final = ".json"

T = TypeVar("T")


class LocalHost:
    """See the module."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._programs: dict[str, RunningProgram] = {}
        self._unpackings = anyio.CapacityLimiter(UNPACKINGS_AT_ONCE)
        self._removals = anyio.CapacityLimiter(REMOVALS_AT_ONCE)

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path, clock: Clock) -> AsyncIterator[Self]:
        """Until the end of the block, which no program outlives."""
        host = cls(directory, clock)
        try:
            yield host
        finally:
            with anyio.CancelScope(shield=True):
                for name in tuple(host._programs):
                    try:
                        await host.remove_container(name)
                    except RefusedError as error:
                        logger.error("a program outlives the bridge", error=str(error))

    def environment(self) -> Mapping[str, str]:
        """The allow-list of :mod:`forge_edges.host_commands`, and a path where there is none."""
        own = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return {"PATH": PATH, "LANG": "C.UTF-8", **own}

    def path(self, volume: str) -> str:
        """See the port."""
        return str(self._path(volume))

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> str:
        """See the port.

        :raises EngineConflict: there is one of this name.
        """
        await on_disk(self._make, self._path(name), dict(labels))
        return name

    async def unpack(self, volume: str, archive: AsyncIterable[bytes]) -> None:
        """See :func:`forge_edges.tree_unpack.unpack`."""
        await unpack(archive, self._path(volume), self._unpackings)

    async def create_container(self, name: str, program: HostProgram) -> str:
        """See the port."""
        if name in self._programs:
            raise EngineConflict(f"cannot start {name}: it runs")
        mark = json.dumps([str(self._directory), dict(program.labels)])
        self._programs[name] = RunningProgram.start(name, program, {_VARIABLE: mark})
        return name

    async def start_container(self, container: str) -> None:
        """It waits for its orders already."""
        self._find(container)

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        """No more than whether it runs."""
        return {"State": {"Running": self._find(container).is_running}}

    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus:
        """See the port."""
        return await self._find(container).wait(timeout_ms=timeout_ms)

    @asynccontextmanager
    async def attach(self, container: str) -> AsyncIterator[RunningProgram]:
        """See the port."""
        yield self._find(container)

    async def remove_container(self, container: str) -> None:
        """Kill whatever carries its mark and all that is below.

        :raises EngineNotFound: nothing does.
        :raises RefusedError: code ``process_resists``.
        """
        found = await self._in_thread(lambda: self._end(container))
        program = self._programs.get(container)
        if program is not None:
            if program.is_running:
                raise RefusedError(f"cannot end {container}: it hides", code="process_resists")
            del self._programs[container]
            program.close()
        elif not found:
            raise EngineNotFound(f"cannot end {container}: nothing of it runs on this host")

    async def remove_volume(self, name: str) -> None:
        """See the port.

        :raises RefusedError: something in it is not ours to remove.
        :raises DiskUnusable: something in it cannot be removed now.
        """
        path = self._path(name)
        if not await self._in_thread(lambda: _remove(path)):
            raise EngineNotFound(f"cannot remove directory {name}: there is none")

    async def remove_network(self, network: str) -> None:
        """There are none on the host."""
        raise EngineNotFound(f"cannot remove network {network}: there are none on a host")

    async def network_endpoints(self, network: str) -> Sequence[str]:
        """Likewise."""
        return ()

    async def disconnect_network(self, network: str, container: str) -> None:
        """Likewise."""
        raise EngineNotFound(f"cannot disconnect {container}: there are no networks on a host")

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        """See the port."""
        listed = await self._in_thread(lambda: [*_directories(self._directory), *self._processes()])
        return [found for found in listed if labels.items() <= found.labels.items()]

    def _end(self, name: str) -> bool:
        found = False
        for mark, (owned, _) in self._marked().items():
            if owned == name:
                found = end_marked(_VARIABLE, mark, within_ms=KILL_MS) or found
        return found

    def _processes(self) -> list[EngineResource]:
        owned = dict(self._marked().values())
        return [
            EngineResource(ResourceKind.CONTAINER, name, name, labels, "")
            for name, labels in owned.items()
        ]

    def _marked(self) -> dict[str, tuple[str, dict[str, str]]]:
        """The marks of programs that work below this directory: name and labels of each."""
        found: dict[str, tuple[str, dict[str, str]]] = {}
        for mark in marks(_VARIABLE):
            match _json(mark):
                case [str(directory), dict(labels)] if directory == str(self._directory):
                    name = name_of(_strings(labels))
                    if name is not None:
                        found[mark] = name, _strings(labels)
        return found

    def _make(self, path: Path, labels: dict[str, str]) -> None:
        content = json.dumps({"labels": labels, "createdAt": self._clock.utc()}).encode()
        try:
            create_file(path.with_name(path.name + _SUFFIX), content)
        except RefusedError as error:
            if error.code != "file_exists":
                raise
            raise EngineConflict(f"cannot make directory {path.name}: there is one") from error
        with disk_errors("make", path):
            for directory in (path, path / "home", path / "scratch"):
                directory.mkdir(mode=0o700)

    def _find(self, container: str) -> RunningProgram:
        program = self._programs.get(container)
        if program is None:
            raise EngineNotFound(f"cannot find {container}: this bridge does not run it")
        return program

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RefusedError(f"cannot use {name[:100]!r}: no name of ours", code="malformed")
        return self._directory / name

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """A removal that was begun is done, or has failed, when this returns."""
        return await anyio.to_thread.run_sync(function, limiter=self._removals)


def _remove(path: Path) -> bool:
    """The directory first: without its labels nobody would know whose it is."""
    with disk_errors("remove", path):
        found = remove_tree(path)
    labels = path.with_name(path.name + _SUFFIX)
    found = labels.exists() or found
    remove_file(labels)
    return found


def _directories(directory: Path) -> list[EngineResource]:
    listed = []
    with disk_errors("list", directory), os.scandir(directory) as entries:
        files = [entry.name for entry in entries if entry.name.endswith(_SUFFIX)]
    for file in files:
        try:
            content = _json(read_file(directory / file, MAX_LABELS_BYTES))
        except RefusedError as error:
            # It was removed just now, or it is none of our making.
            logger.info("cannot tell whose a directory is", file=file, error=str(error))
            continue
        name = file.removesuffix(_SUFFIX)
        match content:
            case {"labels": dict(labels), "createdAt": str(created_at)}:
                found = EngineResource(
                    ResourceKind.VOLUME, name, name, _strings(labels), created_at
                )
                listed.append(found)
    return listed


def _json(text: str | bytes) -> object:
    """None where it is no JSON: others write files and variables too."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _strings(value: Mapping[object, object]) -> dict[str, str]:
    return {k: v for k, v in value.items() if isinstance(k, str) and isinstance(v, str)}
