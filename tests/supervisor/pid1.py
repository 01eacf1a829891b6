"""The supervisor as a real PID 1: own PID namespace, unprivileged, pipes instead of Docker's."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import time
from importlib import resources
from pathlib import Path
from typing import Any

from forge_core.wire.lease_mac import lease_message, sign_lease

SOURCE = resources.files("forge_supervisor").joinpath("supervisor.py").read_text("utf-8")
KEY = bytes(range(32))
UID = 61_234  # nobody else's, so that RLIMIT_NPROC and kill() mean this test alone
PATIENCE_S = 30.0
ISSUED_AT = "2026-11-29T14:00:00.000Z"

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
SETPRIV = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups")


def init_frame(*argv: str, **changes: Any) -> dict[str, Any]:
    """A valid ``init`` with generous deadlines; a change to None removes the field."""
    frame: dict[str, Any] = {
        "type": "init",
        "attemptId": "att-1",
        "fence": 7,
        "key": base64.b64encode(KEY).decode(),
        "sequence": 2,
        "leaseMs": 60_000,
        "hardWallMs": 120_000,
        "idleMs": 60_000,
        "graceMs": 200,
        "argv": list(argv) or ["true"],
        "env": {"PATH": "/usr/bin:/bin"},
        "cwd": "/",
        "maxOutputBytes": 1 << 30,
    }
    frame.update(changes)
    return {name: value for name, value in frame.items() if value is not None}


def lease_frame(
    sequence: int = 3, ttl_ms: int = 60_000, *, fence: int = 7, attempt_id: str = "att-1"
) -> dict[str, Any]:
    """A renewal with the right MAC for the fence and attempt that are given."""
    mac = sign_lease(KEY, lease_message(attempt_id, fence, sequence, ttl_ms, ISSUED_AT))
    return {
        "type": "lease",
        "sequence": sequence,
        "ttlMs": ttl_ms,
        "issuedAt": ISSUED_AT,
        "mac": mac,
    }


class Pid1:
    """One running supervisor and the frames that came from it.

    ``send`` and ``frames`` are the host's side; ``host_pid`` is its pid outside of the namespace.
    """

    def __init__(
        self, source: str = SOURCE, *, prefix: tuple[str, ...] = (*UNSHARE, *SETPRIV)
    ) -> None:
        self._start([*prefix, "/usr/bin/python3", "-I", "-S", "-c", source])

    def _start(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "CANARY": "of-pid-1"},
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._stderr = self.process.stderr
        self.frames: list[dict[str, Any]] = []
        self._pending = b""

    def send(self, *frames: dict[str, Any] | bytes) -> None:
        lines = [f if isinstance(f, bytes) else json.dumps(f).encode() for f in frames]
        self._stdin.write(b"".join(line + b"\n" for line in lines))
        self._stdin.flush()

    def lose_stdin(self) -> None:
        self._stdin.close()

    def lose_reader(self) -> None:
        self._stdout.close()

    def read_some(self, size_bytes: int = 65_536) -> bool:
        """Take what the supervisor wrote next; False at the end of its output."""
        assert select.select([self._stdout], [], [], PATIENCE_S)[0], f"silence after {self.frames}"
        data = os.read(self._stdout.fileno(), size_bytes)
        *lines, self._pending = (self._pending + data).split(b"\n")
        self.frames += [json.loads(line) for line in lines]
        return bool(data)

    def wait_for(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first frame of this type with these fields; reads until it is there."""
        wanted = {"type": kind, **fields}
        seen = 0
        while True:
            for frame in self.frames[seen:]:
                if wanted.items() <= frame.items():
                    return frame
            seen = len(self.frames)
            assert self.read_some(), f"no {wanted} in {self.frames}"

    def wait_for_text(self, text: str, stream: str = "stdout") -> None:
        """Until one frame of the stream has this text."""
        seen = 0
        while True:
            for frame in self.frames[seen:]:
                if frame.get("stream") == stream and text in frame["text"]:
                    return
            seen = len(self.frames)
            assert self.read_some(), f"no {text!r} in {self.frames}"

    def end(self) -> int:
        """Read to the end; the exit status."""
        while self.read_some():
            pass
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Whatever happened, leave nothing: the kernel ends the namespace with its PID 1.

        ``unshare --kill-child`` is not enough: the change of user resets PR_SET_PDEATHSIG.
        """
        if self.process.poll() is None:
            with contextlib.suppress(IndexError, OSError):  # just gone
                os.kill(self.host_pid, signal.SIGKILL)
        for pipe in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait(PATIENCE_S)

    def text(self, stream: str = "stdout") -> str:
        return "".join(f["text"] for f in self.of_type("log") if f["stream"] == stream)

    def dropped_bytes(self, stream: str = "stdout") -> int:
        return sum(f["droppedBytes"] for f in self.of_type("log") if f["stream"] == stream)

    def refusals(self) -> dict[str, int]:
        return {f["reason"]: f["count"] for f in self.of_type("refused")}

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] == kind]

    @property
    def host_pid(self) -> int:
        return child_of(self.process.pid)

    @property
    def stderr(self) -> str:
        return self._stderr.read().decode()


def child_of(pid: int) -> int:
    """The first child, as seen from here."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def peak_memory_kib(pid: int) -> int:
    """VmHWM: the most resident memory that the process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def now_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
