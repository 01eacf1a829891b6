"""Nothing is signalled unless the process is the very one that was recorded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lib import processes
from lib.layout import BedError
from lib.processes import Process

SLEEPER = "import signal; signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as child:
        yield child
        child.kill()


def test_a_process_with_a_reused_id_is_not_signalled(stranger: subprocess.Popen[bytes]) -> None:
    now = Process.observe(stranger.pid)
    assert now is not None
    earlier = Process(now.pid, now.started_ticks - 1)
    assert not earlier.alive
    earlier.signal(signal.SIGKILL)
    earlier.end(grace_s=0.1)
    assert now.alive


def test_a_record_counts_only_while_its_own_process_lives(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    now = Process.observe(stranger.pid)
    assert now is not None
    record = tmp_path / "daemon.json"
    assert processes.recorded(record) is None
    record.write_text(json.dumps({"pid": now.pid, "started_ticks": now.started_ticks}))
    assert processes.recorded(record) == now
    record.write_text(json.dumps({"pid": now.pid, "started_ticks": now.started_ticks + 1}))
    assert processes.recorded(record) is None
    record.write_text("{")
    assert processes.recorded(record) is None


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = Process.observe(child.pid)
        assert process is not None
        process.end(grace_s=0.1)
        assert child.wait() == -signal.SIGKILL


def test_a_daemon_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    process = processes.start(
        [sys.executable, "-c", "import sys; input(); sys.exit('no such flag')"],
        record=tmp_path / "daemon.json",
        log=log,
        environment={},
    )
    with pytest.raises(BedError, match=r"cannot start it: it ended at once.*EOFError"):
        processes.wait_ready("it", lambda: False, process, log, timeout_s=10)


def test_only_daemons_that_name_the_place_itself_belong_to_it(tmp_path: Path) -> None:
    place, neighbour = tmp_path / "bed", tmp_path / "bed2"
    children = [
        subprocess.Popen(["dockerd", "-c", SLEEPER, f"{folder}/x"], executable=sys.executable)
        for folder in (place, neighbour)
    ]
    try:
        found = {process.pid for process in processes.belonging_to([place])}
        assert found == {children[0].pid}
    finally:
        for child in children:
            child.kill()
            child.wait()
