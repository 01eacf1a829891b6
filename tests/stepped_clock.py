"""Clocks that a test steps under a running process, and under that process alone."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
DAY_S = 86_400


class CompilerMissingError(Exception):
    """There is no C compiler here."""


def build_shim(folder: Path) -> Path:
    """Compile the shared object that moves the clocks.

    :raises CompilerMissingError: there is nothing to compile it with.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise CompilerMissingError("there is no cc to compile tests/stepped_clock.c with")
    shim = folder / "stepped_clock.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(shim)]
    done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return shim


class SteppedClock:
    """The clocks of the processes that are started with :attr:`environment`."""

    def __init__(self, shim: Path, file: Path) -> None:
        self._file = file
        self._wall_s = self._boot_s = 0
        self._write()
        self.environment = {"LD_PRELOAD": str(shim), "STEPPED_CLOCK": str(file)}

    def set_wall(self, offset_s: int) -> None:
        """Step the wall clock so that it is this far from the true time."""
        self._wall_s = offset_s
        self._write()

    def sleep_host(self, seconds: int) -> None:
        """Let the host have slept: boot and wall clock went on, the process did not notice."""
        self._wall_s += seconds
        self._boot_s += seconds
        self._write()

    def _write(self) -> None:
        # In place: the processes have the file mapped.
        mode = "r+b" if self._file.exists() else "w+b"
        with self._file.open(mode) as file:
            file.write(struct.pack("=qq", self._wall_s, self._boot_s))
