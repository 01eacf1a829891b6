"""One program on the host that the bridge speaks with over its standard streams.

It is started by the thread of the event loop, because the kernel takes the death of the thread
that made a process for the death of its parent (PR_SET_PDEATHSIG, prctl(2)).
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Final, Self

import anyio
import anyio.lowlevel

from forge_core.errors import EngineTimedOut, EngineUnreachable, RefusedError
from forge_core.ports import ExitStatus, HostProgram

READ_BYTES: Final = 1 << 16
STDOUT: Final = 1
STDERR: Final = 2


class RunningProgram:
    """Implements :class:`forge_core.ports.Attachment`.

    Its streams are read through one poll of their own, so that a program that fills one of them is
    heard on the other.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._name = name
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._channels = {
            _open(process.stdout).fileno(): STDOUT,
            _open(process.stderr).fileno(): STDERR,
        }
        self._ready = select.epoll()
        os.set_blocking(_open(process.stdin).fileno(), False)
        for descriptor in self._channels:
            os.set_blocking(descriptor, False)
            self._ready.register(descriptor, select.EPOLLIN)

    @classmethod
    def start(cls, name: str, program: HostProgram, mark: Mapping[str, str]) -> Self:
        """Start it in a session of its own.

        :param mark: added to its environment.
        :raises RefusedError: code ``host_not_started``.
        """
        try:
            process = subprocess.Popen(
                program.argv,
                cwd=program.directory,
                env={**program.environment, **mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise RefusedError(
                f"cannot start {name} on the host: {error}", code="host_not_started"
            ) from error
        if program.memory_bytes is not None:
            # Before it is told anything: what works on its standard input never works without.
            limit = (program.memory_bytes, program.memory_bytes)
            with suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_AS, limit)
        return cls(name, process)

    @property
    def is_running(self) -> bool:
        """Whether its first process has not ended."""
        return self._process.poll() is None

    async def send(self, data: bytes) -> None:
        """See the port."""
        await anyio.lowlevel.checkpoint()
        stdin = _open(self._process.stdin)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(stdin.fileno(), view[:READ_BYTES]) :]
            except BlockingIOError:
                await anyio.wait_writable(stdin.fileno())
            except BrokenPipeError as error:
                raise EngineUnreachable(f"cannot write to {self._name}: it has ended") from error

    async def receive(self) -> tuple[int, bytes] | None:
        """See the port."""
        await anyio.lowlevel.checkpoint()
        while self._channels:
            for descriptor, _ in self._ready.poll(0, maxevents=1):
                data = os.read(descriptor, READ_BYTES)
                if data:
                    return self._channels[descriptor], data
                self._ready.unregister(descriptor)
                del self._channels[descriptor]
                break
            else:
                await anyio.wait_readable(self._ready.fileno())
        return None

    async def wait(self, *, timeout_ms: int) -> ExitStatus:
        """How it ended, in the engine's words: 128 plus the signal that ended it.

        :raises EngineTimedOut: it goes on.
        """
        with anyio.move_on_after(timeout_ms / 1000):
            await anyio.wait_readable(self._pidfd)
            code = self._process.wait()
            return ExitStatus(code if code >= 0 else 128 - code, oom_killed=False)
        raise EngineTimedOut(f"cannot see the end of {self._name} within {timeout_ms} ms")

    def close(self) -> None:
        """Let go of one that has ended; idempotent."""
        self._process.poll()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            _open(stream).close()
        self._ready.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _open(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "every stream is a pipe of ours"
    return stream
