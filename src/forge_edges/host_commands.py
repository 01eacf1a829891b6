"""Runs a command as the service account: legacy v1 (B-03; sandbox.md, Host execution).

The environment is an allow-list, the output has a cap, the deadline kills the whole tree: the
command runs below a launcher that inherits and kills whatever it leaves behind
(:mod:`forge_supervisor.host_command`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Final

import anyio
import anyio.abc

from forge_core.errors import RefusedError
from forge_core.ports import HostResult

INHERITED: Final = frozenset({"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"})
"""What a host command sees of the bridge's own environment; never a FORGE_ variable."""

STOP_MS: Final = 15_000
READ_BYTES: Final = 65_536


class ProcessHostCommands:
    """Implements the ``HostCommands`` port of ``flows/legacy.py``."""

    def __init__(self) -> None:
        self._launcher = (files("forge_supervisor") / "host_command.py").read_text("utf-8")

    async def run(
        self,
        argv: Sequence[str],
        *,
        directory: str,
        environment: Mapping[str, str],
        timeout_ms: int,
        max_output_bytes: int,
    ) -> HostResult:
        """Run to its end, its deadline, or cancellation; no process of it is left after that.

        :param environment: added to the allow-list of the bridge's own.
        :raises RefusedError: the directory is not there, or no process can be made.
        """
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        command = [sys.executable, "-I", "-S", "-c", self._launcher, *argv]
        try:
            process = await anyio.open_process(
                command,
                cwd=directory,
                env={**inherited, **environment},
                stdin=subprocess.DEVNULL,
                stderr=-2,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise RefusedError(
                f"cannot run {argv[0][:200]!r} in {directory}: {error}", code="host_not_started"
            ) from error
        output = _Output(max_output_bytes)
        async with process:
            try:
                with anyio.move_on_after(timeout_ms / 1000) as deadline:
                    await output.read_all(process)
                    await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process)
        timed_out = deadline.cancelled_caught
        code = None if timed_out else process.returncode
        return HostResult(code, bytes(output.kept), output.truncated, timed_out)


class _Output:
    """The first bytes of a stream; what comes after the cap is read and dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.kept = bytearray()
        self.truncated = False
        self._max_bytes = max_bytes

    async def read_all(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                data = await process.stdout.receive(READ_BYTES)
            except anyio.EndOfStream:
                return
            room = self._max_bytes - len(self.kept)
            self.kept += data[:room]
            self.truncated = self.truncated or len(data) > room


async def _end(process: anyio.abc.Process) -> None:
    """Ask the launcher to kill the tree; it is only killed itself when it does not answer."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with anyio.move_on_after(STOP_MS / 1000):
        await process.wait()
        return
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
