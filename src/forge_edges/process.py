"""Programs run from outside: argv only, the given environment only, bounded in every way.

A child gets its own session (so no terminal to prompt on, and no Ctrl-C of ours), and its
process group dies with it: when the first process has ended, and also on a deadline, an
overflow or a cancellation, whatever else is in the group is killed *before* the first process
is reaped, while its process id cannot have been given to anybody else (pidfd_open(2), setpgid(2)).
What leaves the group by setsid(2) is out of reach here; that needs a cgroup.

Resource limits are set with prlimit(2) directly after the start and before a byte of ``input``
is written, so that a program which works on its standard input never works without them.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import anyio
import anyio.lowlevel

from forge_core.errors import RefusedError, RetryableError

_CHUNK_BYTES = 1 << 16
_KILL_WAIT_MS = 10_000


class ProcessTimedOut(RetryableError):  # noqa: N818 - says what is the case
    """The program did not end within its time and was killed with its group."""


class OutputOverflow(RefusedError):  # noqa: N818
    """The program wrote more to standard output than allowed and was killed with its group."""


class ProcessNotStarted(RefusedError):  # noqa: N818
    """The program could not be executed at all."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one program may use.

    :param timeout_ms: wall time from start to end, milliseconds.
    :param stdout_bytes: more than this on a captured standard output ends the program.
    :param stderr_bytes: only this much of the end of standard error is kept.
    :param memory_bytes: address space of each process (RLIMIT_AS); None: as inherited.
    :param cpu_seconds: processor time of each process (RLIMIT_CPU); None: as inherited.
    :param file_bytes: size of each file written (RLIMIT_FSIZE); None: as inherited.
    :param grace_ms: between SIGTERM and SIGKILL, milliseconds.
    """

    timeout_ms: int
    stdout_bytes: int = 1 << 20
    stderr_bytes: int = 1 << 16
    memory_bytes: int | None = None
    cpu_seconds: int | None = None
    file_bytes: int | None = None
    grace_ms: int = 2_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    :param exit_code: its status; ``-n`` when signal n ended it.
    :param stdout: all of it, unless it went to a file.
    :param stderr: the last part of it.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes

    def complaint(self) -> str:
        """The last lines of standard error, for a message to people."""
        return "; ".join(self.complaints())[-500:] or f"exit code {self.exit_code}"

    def complaints(self) -> list[str]:
        """The lines of :attr:`stderr` that say something; nothing in them moves a cursor."""
        lines = self.stderr.decode("utf-8", "replace").splitlines()
        shown = ("".join(c if c.isprintable() else "?" for c in line.strip()) for line in lines)
        return [line for line in shown if line]


class Process:
    """A running program; :meth:`close` always, from a ``finally``."""

    def __init__(self, popen: subprocess.Popen[bytes], name: str, bounds: Bounds) -> None:
        self.name = name
        self.bounds = bounds
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._deadline = anyio.current_time() + bounds.timeout_ms / 1000
        self._stderr = bytearray()
        for pipe in (popen.stdin, popen.stdout, popen.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group and session."""
        return self._popen.pid

    async def read(self) -> bytes:
        """Next bytes of standard output; empty at its end.

        :raises ProcessTimedOut: the deadline has passed; :meth:`close` is still due.
        """
        with anyio.CancelScope(deadline=self._deadline):
            return await _read(_opened(self._popen.stdout).fileno())
        raise self._timed_out()

    async def feed(self, data: bytes) -> None:
        """Write all of *data* to standard input and close it; a reader that left is no error."""
        await self._write(data)
        _opened(self._popen.stdin).close()

    async def feed_from(self, pieces: AsyncIterable[bytes]) -> None:
        """Write the pieces to standard input as they come, and close it.

        A reader that left is no error; the pieces that it did not want are not asked for.
        """
        iterator = aiter(pieces)
        try:
            async for piece in iterator:
                if not await self._write(piece):
                    break
        finally:
            # What a generator holds open must not wait for the garbage collector.
            if isinstance(iterator, AsyncGenerator):
                with anyio.CancelScope(shield=True):
                    await iterator.aclose()
        _opened(self._popen.stdin).close()

    async def _write(self, data: bytes) -> bool:
        descriptor = _opened(self._popen.stdin).fileno()
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                await anyio.wait_writable(descriptor)
            except BrokenPipeError:
                return False
        return True

    async def keep_stderr(self) -> None:
        """Read standard error to its end, keeping the last ``stderr_bytes`` of it."""
        while data := await _read(_opened(self._popen.stderr).fileno()):
            self._keep(data)
            await anyio.lowlevel.checkpoint()

    async def wait(self) -> Outcome:
        """Wait for the end, kill what is left of the group, reap.  Standard output is not read.

        :raises ProcessTimedOut: the deadline has passed; :meth:`close` is still due.
        """
        with anyio.CancelScope(deadline=self._deadline):
            await self._ended()
            return self._reap()
        raise self._timed_out()

    async def close(self) -> None:
        """End the group if it still runs (TERM, grace, KILL), reap, close; idempotent.

        :raises ProcessTimedOut: not even SIGKILL ended it (it waits for a broken disk).
        """
        with anyio.CancelScope(shield=True):
            try:
                if self._popen.returncode is None:
                    await self._end()
            finally:
                for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
                    if pipe is not None:
                        pipe.close()
                if self._pidfd >= 0:
                    os.close(self._pidfd)
                    self._pidfd = -1

    async def _end(self) -> None:
        self._signal_group(signal.SIGTERM)
        with anyio.move_on_after(self.bounds.grace_ms / 1000):
            await self._ended()
        self._signal_group(signal.SIGKILL)
        with anyio.move_on_after(_KILL_WAIT_MS / 1000) as patience:
            await self._ended()
        if patience.cancelled_caught:
            raise ProcessTimedOut(
                f"cannot end {self.name}, process {self.pid}: SIGKILL had no effect within "
                f"{_KILL_WAIT_MS} ms; look at the disk that it waits for"
            )
        self._reap()

    async def _ended(self) -> None:
        await anyio.wait_readable(self._pidfd)

    def _reap(self) -> Outcome:
        self._signal_group(signal.SIGKILL)
        exit_code = self._popen.wait()
        while self._popen.stderr and (data := _read_ready(self._popen.stderr.fileno())):
            self._keep(data)
        return Outcome(exit_code, b"", bytes(self._stderr))

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._popen.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _keep(self, data: bytes) -> None:
        self._stderr += data
        del self._stderr[: max(0, len(self._stderr) - self.bounds.stderr_bytes)]

    def _take_rest(self, captured: bytearray) -> None:
        descriptor = _opened(self._popen.stdout).fileno()
        while len(captured) <= self.bounds.stdout_bytes and (data := _read_ready(descriptor)):
            captured += data

    def _timed_out(self) -> ProcessTimedOut:
        return ProcessTimedOut(f"{self.name} did not end within {self.bounds.timeout_ms} ms")


def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path,
    bounds: Bounds,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    name: str = "",
) -> Process:
    """Start *argv* in a session of its own; the caller owns :meth:`Process.close`.

    :param name: what messages call it; else the name of the executable.
    :raises ProcessNotStarted: it is not there or not executable (``code="not_executable"``).
    """
    try:
        popen = subprocess.Popen(
            [os.fspath(argument) for argument in argv],
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise ProcessNotStarted(
            f"cannot run {argv[0]}: {error.strerror}", code="not_executable"
        ) from error
    try:
        _limit(popen.pid, bounds)
        return Process(popen, name or Path(argv[0]).name, bounds)
    except BaseException:
        popen.kill()
        popen.wait()
        raise


async def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path,
    bounds: Bounds,
    input: bytes | IO[bytes] = b"",  # noqa: A002 - the word of the standard library
    stdout: IO[bytes] | None = None,
) -> Outcome:
    """Run *argv* to its end and return how it ended; a non-zero status is an answer, not an error.

    :param input: bytes for standard input, or an open file that becomes it.
    :param stdout: an open file that becomes standard output; None: captured.
    :raises ProcessNotStarted: it is not there or not executable.
    :raises ProcessTimedOut: it ran longer than ``bounds.timeout_ms``.
    :raises OutputOverflow: it wrote more than ``bounds.stdout_bytes`` (``code="output_limit"``).
    """
    process = start(
        argv,
        env=env,
        cwd=cwd,
        bounds=bounds,
        stdin=subprocess.PIPE if isinstance(input, bytes) else input,
        stdout=subprocess.PIPE if stdout is None else stdout,
    )
    try:
        captured = bytearray()
        outcome: Outcome | None = None
        async with anyio.create_task_group() as group:
            group.cancel_scope.deadline = process._deadline
            group.start_soon(process.keep_stderr)
            if isinstance(input, bytes):
                group.start_soon(process.feed, input)
            if stdout is None:
                group.start_soon(_capture, process, captured, group.cancel_scope)
            await process._ended()
            outcome = process._reap()
            group.cancel_scope.cancel()
        if stdout is None:
            process._take_rest(captured)
        if len(captured) > bounds.stdout_bytes:
            raise OutputOverflow(
                f"{process.name} wrote more than {bounds.stdout_bytes} bytes",
                code="output_limit",
            )
        if outcome is None:
            raise process._timed_out()
        return Outcome(outcome.exit_code, bytes(captured), outcome.stderr)
    finally:
        await process.close()


async def stream(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path,
    bounds: Bounds,
    input: AsyncIterable[bytes],  # noqa: A002 - as in run
    on_output: Callable[[bytes], None],
    name: str = "",
) -> int:
    """Run *argv* to its end, feeding it and handing on its output as they come; its status.

    Memory stays flat whatever goes in or comes out.

    :param input: read only as fast as the program reads, and no further than it wants.
    :param on_output: takes standard output and standard error in one; never waits.
    :param name: what messages call it; else the name of the executable.
    :raises ProcessNotStarted: it is not there or not executable.
    :raises ProcessTimedOut: it ran longer than ``bounds.timeout_ms``.
    :raises ForgeError: of ``input``; the program has been ended.
    """
    pipe = subprocess.PIPE
    process = start(
        argv, env=env, cwd=cwd, bounds=bounds, stdin=pipe, stderr=subprocess.STDOUT, name=name
    )
    try:
        outcome: Outcome | None = None
        with first_failure():
            async with anyio.create_task_group() as group:
                group.cancel_scope.deadline = process._deadline
                group.start_soon(process.feed_from, input)
                group.start_soon(_hand_on, process, on_output)
                await process._ended()
                outcome = process._reap()
                group.cancel_scope.cancel()
        if outcome is None:
            raise process._timed_out()
        # Nobody of the group writes any more, and a pipe holds no more than one chunk (pipe(7)).
        if data := _read_ready(_opened(process._popen.stdout).fileno()):
            on_output(data)
        return outcome.exit_code
    finally:
        await process.close()


@contextmanager
def first_failure() -> Iterator[None]:
    """Let the error out of a task group around one program, whose tasks fail together if at all."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _hand_on(process: Process, on_output: Callable[[bytes], None]) -> None:
    while data := await process.read():
        on_output(data)
        # A program that writes as fast as it is read must leave turns to others.
        await anyio.lowlevel.checkpoint()


async def _capture(process: Process, captured: bytearray, scope: anyio.CancelScope) -> None:
    while data := await process.read():
        captured += data
        if len(captured) > process.bounds.stdout_bytes:
            scope.cancel()
            return
        # A program that writes as fast as it is read must leave turns to others.
        await anyio.lowlevel.checkpoint()


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError("this stream of the program is not a pipe of ours")
    return pipe


async def _read(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)


def _read_ready(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except BlockingIOError:
        return b""


def _limit(pid: int, bounds: Bounds) -> None:
    limits = (
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_CPU, bounds.cpu_seconds),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
    )
    for kind, value in limits:
        if value is None:
            continue
        try:
            resource.prlimit(pid, kind, (value, value))
        except ProcessLookupError:
            return
