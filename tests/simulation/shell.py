"""A shell for simulated containers, with as many words as the engine's contract needs."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Generator

from .engine import PROCESS, Container


class Shell:
    """``/bin/sh -c``: ``exit``, ``echo``, ``read``, ``cat``, ``cd`` and ``sleep``."""

    def __init__(self, container: Container, script: str) -> None:
        self._container = container
        self._script = script
        self._stdin = bytearray()
        self._variables: dict[str, str] = {}
        self._directory = "/"
        self._files: dict[str, bytes] = {}
        self._running = self._run()

    def start(self) -> None:
        """Go on until something is waited for."""
        self._unpack()
        self._go_on()

    def stdin(self, data: bytes) -> None:
        """Somebody has written."""
        self._stdin += data
        self._go_on()

    def kill(self) -> None:
        """Nothing of it goes on."""
        self._running.close()

    def _go_on(self) -> None:
        if self._container.status == "running":
            code = next(self._running, None)
            if code is not None and code >= 0:
                self._container.exit(code)

    def _run(self) -> Generator[int]:
        """Yields -1 while it waits for stdin, and its exit code at the end."""
        for command in self._script.replace("&&", ";").split(";"):
            word, *rest = command.split()
            match word:
                case "exit":
                    yield int(rest[0])
                case "read":
                    while b"\n" not in self._stdin:
                        yield -1
                    line, _, remaining = bytes(self._stdin).partition(b"\n")
                    self._stdin[:] = remaining
                    self._variables[rest[0]] = line.decode()
                case "echo":
                    self._echo(rest)
                case "cat":
                    self._container.output(1, self._files[f"{self._directory}/{rest[0]}"])
                case "cd":
                    self._directory = rest[0]
                case "sleep":
                    self._sleep(float(rest[0]))
                    yield -1
        yield 0

    def _echo(self, words: list[str]) -> None:
        channel, into = 1, None
        if ">&2" in words:
            channel = 2
            words.remove(">&2")
        if ">>" in words:
            into = f"{self._directory}/{words.pop()}"
            words.remove(">>")
        text = " ".join(self._variables[w[1:]] if w.startswith("$") else w for w in words)
        if into is None:
            self._container.output(channel, text.encode() + b"\n")
        else:
            self._files[into] += text.encode() + b"\n"

    def _sleep(self, duration_s: float) -> None:
        self._container.engine.world.later(PROCESS, duration_s, self._go_on)

    def _unpack(self) -> None:
        for mount in self._container.request["HostConfig"]["Mounts"]:
            archive = self._container.engine.volumes[mount["Source"]].archive
            if archive:
                with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
                    for entry in opened:
                        if (file := opened.extractfile(entry)) is not None:
                            self._files[f"{mount['Target']}/{entry.name}"] = file.read()
