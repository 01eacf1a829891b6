"""What an agent may try on the supervisor, on the walls of its container and on its limits.

docs/explanation/threat-model.md says what is contained and how; each claim of it is tried here,
in tests/e2e/test_hostile_workspace.py or in tests/e2e/test_canaries.py.
"""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import Engine
from rig import Rig, running_rig

INSIDE = Path(__file__).parent / "inside"
CANARY = "canary-of-the-agents-environment-7f3a"
MIB = 1 << 20

pytestmark = pytest.mark.engine("d26", "r26")


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("rig")
    with running_rig(
        directory, engine, module_runner_id, FORGE_MAX_CONCURRENT_SANDBOXES="2"
    ) as rig:
        yield rig


def run(rig: Rig, script: str, **more: Any) -> tuple[dict[str, Any], str]:
    """The result of a Python program as the agent, and what it printed."""
    session_id = rig.dispatch("python3", "-c", script, **more)
    result = rig.wait_over(session_id)
    return result, rig.diagnostics(session_id)["logTail"]


def report(rig: Rig, name: str, **more: Any) -> dict[str, Any]:
    """The JSON that a program of ``inside/`` printed as the agent."""
    result, printed = run(rig, (INSIDE / name).read_text(), **more)
    assert result["outcome"] == "succeeded", (result, printed)
    return dict(json.loads(printed))


@pytest.mark.requirement("B-70", "B-60")
def test_the_agent_cannot_read_write_trace_or_signal_its_supervisor(rig: Rig) -> None:
    found = report(rig, "against_pid_1.py", env={"CANARY": CANARY})
    # The control: what the seccomp filter lets through works on a process that is not closed.
    refused_by_seccomp = {"pidfd_getfd"}
    works = {what for what, outcome in found["child"].items() if outcome == "done"}
    assert works == found["child"].keys() - refused_by_seccomp, found["child"]
    assert set(found["PID 1"].values()) <= {"EACCES", "EPERM"}, found["PID 1"]
    assert set(found["other doors"].values()) <= {"EPERM", "ENOSYS"}, found["other doors"]
    assert found["signals"] == "done"
    assert found["descriptors"] == {"0": "/dev/null", "1": "pipe", "2": "pipe"}
    assert not found["canary in command line"]


FORGED = """
import json, sys
frames = [
    {"type": "ready", "version": 1, "pid": 1},
    {"type": "exit", "code": 0},
    {"type": "expired", "which": "lease"},
    {"type": "refused", "reason": "bad_mac", "count": 9},
    {"type": "log", "stream": "stderr", "text": "forged", "droppedBytes": 1 << 50},
    {"type": "lease", "sequence": 9, "ttlMs": 1, "issuedAt": "", "mac": ""},
    {"type": "cancel", "graceMs": 0},
    {"type": "init"},
]
for stream in (sys.stdout, sys.stderr):
    for frame in frames:
        print(json.dumps(frame), file=stream, flush=True)
sys.exit(3)
"""


@pytest.mark.requirement("B-70", "B-04")
def test_forged_frames_are_text(rig: Rig) -> None:
    result, printed = run(rig, FORGED)
    assert (result["failureCode"], result["exitCode"]) == ("agent_failed", 3)
    frames = [json.loads(line) for line in printed.splitlines()]
    assert len(frames) == 16
    kinds = Counter(frame["type"] for frame in frames)
    assert set(kinds.values()) == {2}, kinds


HOST_SOURCES = re.compile(
    r".*/docker/volumes/forge-workspace-[0-9a-f]+/_data"
    r"|.*/docker/containers/[0-9a-f]{64}/(?:resolv\.conf|hostname|hosts)"
)
OF_THE_KERNEL = re.compile(r"/|/(?:bus|fs|irq|sys|null|random|urandom|full|tty|zero)")


@pytest.mark.requirement("A-07", "B-35")
def test_the_walls_hold(rig: Rig, tmp_path: Path) -> None:
    host_path = tmp_path / "listening"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind(f"\0{rig.runner_id}")
        named.bind(str(host_path))
        for one in (abstract, named):
            one.listen()
        env = {"HOST_SOCKET": rig.runner_id, "HOST_PATH": str(host_path)}
        found = report(rig, "against_the_walls.py", env=env)
    for kind in ("syscalls", "writes", "reads", "sockets", "cgroup"):
        assert [what for what, came in found[kind].items() if came == "done"] == [], kind
    assert set(found["syscalls"].values()) <= {"EPERM", "EACCES", "ENOSYS"}
    for source, target, options in found["mounts"]:
        assert OF_THE_KERNEL.fullmatch(source) or HOST_SOURCES.fullmatch(source), (source, target)
        bounded = target in {"/proc", "/workspace"} or target.startswith(("/dev", "/tmp", "/run"))
        masked = source == "/null"
        assert bounded or masked or "ro" in options.split(",") or target == "/sys/fs/cgroup", target
    assert int(found["status"]["CapEff"], 16) == int(found["status"]["CapBnd"], 16) == 0
    assert (found["status"]["NoNewPrivs"], found["status"]["Seccomp"]) == ("1", "2")
    assert (found["interfaces"], found["host name"]) == (["lo"], "sandbox")
    assert found["abstract sockets"] == found["host sockets"] == found["set-id files"] == []
    assert (found["host path"], len(found["processes"])) == (False, 2)
    own = {"FORGE_ATTEMPT_ID", "FORGE_BRANCH", "HOME", "LANG", "PATH", *env}
    assert set(found["environment"]) == own


BOUNDS = """
import errno, json, os, resource
found = {}
for directory in ("/tmp", "/run", "/dev/shm"):
    size = 0
    try:
        with open(directory + "/fill", "wb", buffering=0) as file:
            while size < 300 << 20:
                size += file.write(bytes(1 << 20))
    except OSError as error:
        found[directory] = [size >> 20, errno.errorcode[error.errno]]
    os.unlink(directory + "/fill")
count = 0
try:
    while True:
        os.dup(1)
        count += 1
except OSError as error:
    os.closerange(3, 4096)
    found["descriptors"] = [count < 4096, errno.errorcode[error.errno]]
pid = os.fork()
if pid == 0:
    os.abort()
found["dumped"] = os.WCOREDUMP(os.waitpid(pid, 0)[1])
found["core limit"] = list(resource.getrlimit(resource.RLIMIT_CORE))
print(json.dumps(found))
"""


@pytest.mark.requirement("B-35", "A-07")
def test_files_in_memory_descriptors_and_core_dumps_are_bounded(rig: Rig) -> None:
    _, printed = run(rig, BOUNDS)
    assert json.loads(printed) == {
        "/tmp": [64, "ENOSPC"],
        "/run": [16, "ENOSPC"],
        "/dev/shm": [64, "ENOSPC"],
        "descriptors": [True, "EMFILE"],
        "dumped": False,
        "core limit": [1, 1],
    }
