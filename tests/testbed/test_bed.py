"""The test bed comes up once, heals, leaves alone what is not its own, and goes without a trace."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest
from lib.processes import Process

from engines import describe, run_testbed
from needs import require_root

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
PARTS = ("d26", "r26")


class OwnBed:
    """A second test bed beside the shared one, with the same cache."""

    def __init__(self, root: Path) -> None:
        self.environment = {
            "FORGE_TESTBED_ROOT": str(root),
            "FORGE_TESTBED_CACHE": describe()["cache"],
        }
        self.root = root

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_testbed(*arguments, environment=self.environment)

    def up(self, *parts: str) -> dict[str, Any]:
        done = self.run("up", "--json", "--parts", ",".join(parts))
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def down(self, *arguments: str) -> None:
        done = self.run("down", *arguments)
        assert done.returncode == 0, done.stderr

    @property
    def run_folder(self) -> Path:
        socket = describe(environment=self.environment)["engines"]["d26"]["socket"]
        return Path(socket).parents[1]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBed]:
    require_root("run private Docker daemons")
    own = OwnBed(tmp_path_factory.mktemp("bed"))
    yield own
    own.down("--purge")
    assert not own.root.exists()
    tag = own.run_folder.name.rpartition("-")[2]
    assert tag not in Path("/etc/passwd").read_text()


def traces(tag: str) -> list[str]:
    """Everything on this machine that still carries the tag of a bed."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True)
    found = [line for line in listing.stdout.splitlines() if f"forge-testbed-{tag}" in line]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if tag in line]
    found += [str(path) for path in Path("/run/netns").glob(f"*{tag}*")]
    found += [str(path) for top in ("/run", "/var/lib") for path in Path(top).glob(f"*{tag}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/*{tag}*")]
    return found


def start_sleeper(base_url: str, image: str) -> int:
    """A container that ignores SIGTERM; its process id on the host."""
    client = docker.DockerClient(base_url=base_url, timeout=60)
    try:
        argv = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
        container = client.containers.create(image, argv, network_mode="none")
        container.start()
        container.reload()
        return int(container.attrs["State"]["Pid"])
    finally:
        client.close()


def kill(process_id: int) -> None:
    process = Process.observe(process_id)
    assert process is not None
    process.signal(signal.SIGKILL)
    assert process.wait_gone(timeout_s=10)


def test_two_at_once_start_one_and_a_third_changes_nothing(bed: OwnBed) -> None:
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: bed.up(*PARTS), range(2))
    third = bed.up(*PARTS)
    for part in PARTS:
        identities = {status["engines"][part]["daemon_pid"] for status in (first, second, third)}
        assert len(identities) == 1
    assert describe()["root"] != first["root"]


def test_a_killed_daemon_is_started_again(bed: OwnBed) -> None:
    before = bed.up(*PARTS)["engines"]
    for part in PARTS:
        kill(before[part]["daemon_pid"])
    assert not describe(environment=bed.environment)["engines"]["d26"]["up"]
    after = bed.up(*PARTS)["engines"]
    for part in PARTS:
        assert after[part]["up"]
        assert after[part]["daemon_pid"] != before[part]["daemon_pid"]


def test_down_leaves_nothing_even_of_killed_daemons(bed: OwnBed) -> None:
    status = bed.up(*PARTS)
    image = status["images"]["busybox"]["reference"]
    engines = {part: status["engines"][part] for part in PARTS}
    containers = [start_sleeper(f"unix://{engine['socket']}", image) for engine in engines.values()]
    assert all(Process.observe(process_id) for process_id in containers)
    for engine in engines.values():
        kill(engine["daemon_pid"])
    run_folder = bed.run_folder
    tag = run_folder.name.rpartition("-")[2]
    assert traces(tag)
    bed.down()
    assert traces(tag) == []
    assert not any(Process.observe(process_id) for process_id in containers)


def test_a_foreign_daemon_is_not_touched(bed: OwnBed) -> None:
    bed.up("d26")
    run_folder = bed.run_folder
    sleeper = "import signal; signal.pause()"
    neighbour = f"--host=unix://{run_folder}0/docker.sock"
    with subprocess.Popen(
        ["dockerd", "-c", sleeper, neighbour], executable=sys.executable
    ) as foreign:
        now = Process.observe(foreign.pid)
        assert now is not None
        # The id of our daemon's record now belongs to somebody else's process.
        record = run_folder / "d26" / "dockerd.json"
        record.write_text(json.dumps({"pid": now.pid, "started_ticks": now.started_ticks - 1}))
        bed.down()
        assert now.alive
        foreign.kill()
    assert traces(run_folder.name.rpartition("-")[2]) == []


def test_a_part_that_cannot_start_says_why_and_the_others_start(bed: OwnBed) -> None:
    bed.down()
    blocker = bed.root / "d20"
    blocker.write_text("a file where the data root should be")
    done = bed.run("up", "--json", "--parts", "d20,d26")
    blocker.unlink()
    assert done.returncode == 1
    engines = json.loads(done.stdout)["engines"]
    assert engines["d26"]["up"]
    assert not engines["d20"]["up"]
    assert "d20" in engines["d20"]["error"]
    assert not (bed.run_folder / "d20").exists()
