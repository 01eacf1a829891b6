"""Programs are bounded in every way, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from forge_core.errors import RefusedError
from forge_edges.process import (
    Bounds,
    Outcome,
    OutputOverflow,
    ProcessNotStarted,
    ProcessTimedOut,
    run,
    start,
    stream,
)

BOUNDS = Bounds(timeout_ms=20_000)
ENV = {"PATH": "/usr/bin:/bin"}
HERE = Path("/")


async def python(code: str, *arguments: str, bounds: Bounds = BOUNDS, data: bytes = b"") -> Outcome:
    argv = [sys.executable, "-I", "-S", "-c", code, *arguments]
    return await run(argv, env=ENV, cwd=HERE, bounds=bounds, input=data)


def alive(pid: int) -> bool:
    """Whether *pid* is a process that is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(*pids: int) -> None:
    with anyio.fail_after(10):
        while any(map(alive, pids)):
            await anyio.lowlevel.checkpoint()


async def test_the_whole_answer_comes_back() -> None:
    code = "import sys; d=sys.stdin.buffer.read(); sys.stdout.buffer.write(d); sys.exit('bad')"
    data = os.urandom(300_000)
    outcome = await python(code, data=data)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (1, data, b"bad\n")
    assert outcome.complaint() == "bad"


def test_a_complaint_moves_no_cursor() -> None:
    outcome = Outcome(1, b"", b" one\x1b[2J\xff\r\n\n\ttwo\r")
    assert outcome.complaint() == "one?[2J\ufffd; two"
    assert Outcome(3, b"", b"\n \n").complaint() == "exit code 3"


async def test_only_the_given_environment_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_API_TOKEN", "secret")
    outcome = await run(["/usr/bin/env"], env={"ONE": "1"}, cwd=HERE, bounds=BOUNDS)
    assert outcome.stdout == b"ONE=1\n"


async def test_there_is_no_terminal_and_an_own_session() -> None:
    code = """
import os
assert os.getsid(0) == os.getpid() == os.getpgid(0)
try: open('/dev/tty'); raise SystemExit(3)
except OSError: pass
"""
    assert (await python(code)).exit_code == 0


async def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProcessNotStarted) as refused:
        await run(["/nonexistent/tool"], env=ENV, cwd=HERE, bounds=BOUNDS)
    assert refused.value.code == "not_executable"


async def test_input_that_nobody_reads_is_no_error() -> None:
    assert (await python("import os; os.close(0)", data=bytes(1 << 20))).exit_code == 0


async def test_too_much_output_ends_the_program() -> None:
    bounds = Bounds(timeout_ms=20_000, stdout_bytes=100_000)
    code = "import os\nwhile True: os.write(1, bytes(65536))"
    with pytest.raises(OutputOverflow) as refused:
        await python(code, bounds=bounds)
    assert isinstance(refused.value, RefusedError)
    exactly = await python("print('x' * 99999)", bounds=bounds)
    assert len(exactly.stdout) == 100_000


async def test_of_standard_error_the_end_is_kept() -> None:
    bounds = Bounds(timeout_ms=20_000, stderr_bytes=100)
    outcome = await python(
        "import sys; sys.stderr.write('a' * 10_000_000 + 'fatal: the end')", bounds=bounds
    )
    assert len(outcome.stderr) == 100
    assert outcome.stderr.endswith(b"fatal: the end")


FORKS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    while True: time.sleep(1000)
os.write(1, b"%d %d\\n" % (os.getpid(), child))
while len(sys.argv) > 1: time.sleep(1000)
"""


async def test_a_deadline_ends_the_whole_group(tmp_path: Path) -> None:
    listing = tmp_path / "pids"
    code = f"import os, sys\nsys.argv.append('')\nos.dup2(os.open({str(listing)!r}, 65), 1)" + FORKS
    with pytest.raises(ProcessTimedOut, match="within 1000 ms"):
        await python(code, bounds=Bounds(timeout_ms=1000))
    pids = [int(pid) for pid in listing.read_text().split()]
    assert len(pids) == 2
    assert not Path(f"/proc/{pids[0]}").exists(), "the first process is reaped, no zombie"
    await gone(*pids)


async def test_a_daemon_that_outlives_its_parent_is_ended_with_it() -> None:
    """It holds the pipes open: the answer must not wait for it."""
    outcome = await python(FORKS)
    await gone(*map(int, outcome.stdout.split()))


async def test_a_process_that_left_the_group_delays_nothing() -> None:
    code = """
import os, time
ready, left = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(1, b"%d" % os.getpid())
    os.write(left, b"x")
    time.sleep(1000)
os.read(ready, 1)
"""
    outcome = await python(code)
    stray = int(outcome.stdout)
    assert alive(stray), "it holds the pipes, and nobody waited for it"
    os.kill(stray, signal.SIGKILL)


async def test_cancellation_ends_the_whole_group() -> None:
    process = start(
        [sys.executable, "-I", "-S", "-c", FORKS, "stay"], env=ENV, cwd=HERE, bounds=BOUNDS
    )
    with anyio.CancelScope() as scope:
        try:
            pids = [int(pid) for pid in (await process.read()).split()]
            scope.cancel()
            await process.wait()
        finally:
            await process.close()
    assert scope.cancelled_caught
    assert not Path(f"/proc/{process.pid}").exists()
    await gone(*pids)


async def test_reading_has_the_same_deadline() -> None:
    process = start(
        [sys.executable, "-c", "import time; time.sleep(1000)"],
        env=ENV,
        cwd=HERE,
        bounds=Bounds(timeout_ms=100),
    )
    try:
        with pytest.raises(ProcessTimedOut):
            await process.read()
    finally:
        await process.close()
        await process.close()


@pytest.mark.parametrize(
    ("code", "bounds"),
    [
        ("x = bytes(1 << 30)", Bounds(timeout_ms=20_000, memory_bytes=256 << 20)),
        ("while True: pass", Bounds(timeout_ms=20_000, cpu_seconds=1)),
        (
            "f = open(sys.argv[1], 'wb'); f.write(bytes(2 << 20)); f.flush()",
            Bounds(timeout_ms=20_000, file_bytes=1 << 20),
        ),
    ],
)
async def test_resource_limits_hold_from_the_first_byte_of_input(
    code: str, bounds: Bounds, tmp_path: Path
) -> None:
    waits = "import sys; sys.stdin.read()\n"
    outcome = await python(waits + code, str(tmp_path / "file"), bounds=bounds, data=b"go")
    assert outcome.exit_code != 0


async def test_nothing_stays_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await python("print('x')")
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1


def resident_bytes() -> int:
    """How much memory this process has now (proc(5), statm)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Pieces:
    """An endless input that says how much of it was asked for, and that it was closed."""

    def __init__(self, piece: bytes, count: int = 1 << 30) -> None:
        self.asked = 0
        self.closed = False
        self._piece = piece
        self._count = count

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while self.asked < self._count:
                self.asked += 1
                yield self._piece
        finally:
            self.closed = True


async def streamed(
    code: str, pieces: Pieces, output: list[bytes], timeout_ms: int = 20_000, name: str = ""
) -> int:
    return await stream(
        [sys.executable, "-I", "-S", "-c", code],
        env=ENV,
        cwd=HERE,
        bounds=Bounds(timeout_ms=timeout_ms),
        input=pieces,
        on_output=output.append,
        name=name,
    )


async def test_input_and_output_flow_at_once() -> None:
    code = """
import os, sys
while piece := sys.stdin.buffer.read(1 << 16):
    os.write(1 if piece[0] else 2, piece)
sys.exit(7)
"""
    output: list[bytes] = []
    pieces = Pieces(b"\0" * 65_536 + b"\1" * 65_536, 64)
    assert await streamed(code, pieces, output) == 7
    assert sum(map(len, output)) == 64 * 131_072
    assert pieces.closed
    assert all(len(piece) <= 65_536 for piece in output)


async def test_much_output_without_a_line_takes_no_memory() -> None:
    heard = [0, 0]

    def listen(data: bytes) -> None:
        heard[0] += len(data)
        heard[1] = max(heard[1], resident_bytes())

    code = "import os\nfor _ in range(3200): os.write(1, b'x' * 65536)"
    before = resident_bytes()
    status = await stream(
        [sys.executable, "-I", "-S", "-c", code],
        env=ENV,
        cwd=HERE,
        bounds=BOUNDS,
        input=Pieces(b"", 0),
        on_output=listen,
    )
    assert (status, heard[0]) == (0, 200 << 20)
    assert heard[1] - before < 8 << 20


async def test_a_program_that_wants_no_more_ends_the_input() -> None:
    pieces, output = Pieces(bytes(65_536)), list[bytes]()
    assert await streamed("import os; os.read(0, 10); print('enough')", pieces, output) == 0
    assert (b"".join(output), pieces.closed) == (b"enough\n", True)
    assert pieces.asked < 10


async def test_a_program_is_fed_no_faster_than_it_reads() -> None:
    pieces, output = Pieces(bytes(65_536)), list[bytes]()
    with pytest.raises(ProcessTimedOut, match="the reader did not end within 500 ms"):
        await streamed("import time; time.sleep(600)", pieces, output, 500, "the reader")
    assert pieces.closed
    assert pieces.asked < 10


async def test_an_input_that_fails_ends_the_program_and_says_why() -> None:
    class Failing(Pieces):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"first"
            raise RefusedError("cannot read the tree", code="workspace_invalid")

    output: list[bytes] = []
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with pytest.raises(RefusedError, match="cannot read the tree"):
        await streamed(code, Failing(b""), output)
    await gone(*(int(pid) for pid in b"".join(output).split()))


async def test_a_program_that_cannot_be_run_asks_for_no_input() -> None:
    pieces = Pieces(b"x")
    with pytest.raises(ProcessNotStarted):
        await stream(["/nowhere"], env=ENV, cwd=HERE, bounds=BOUNDS, input=pieces, on_output=print)
    assert pieces.asked == 0
