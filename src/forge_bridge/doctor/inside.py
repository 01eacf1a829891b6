"""What a container looks like from inside, printed as one line of JSON.

Not imported by anything: the doctor runs this file's text as PID 1 of its probe container
(``python3 -I -S -c``).  Standard library of Python 3.9 and later.  Arguments: the memory limit
in bytes and the process limit that the container was given.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CLONE_NEWUSER = 0x10000000
MIB = 1 << 20
PIDS_BEYOND = 8
THROTTLE_WAIT_S = 0.5


def text_of(path: str | Path) -> str:
    """The file's text; empty when it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def core_pattern() -> str | None:
    """Where the kernel puts what crashes, the same for all containers; None: not to be read."""
    try:
        return Path("/proc/sys/kernel/core_pattern").read_text(errors="replace").strip()
    except OSError:
        return None


def uid_map() -> list[list[int]]:
    """Inside, outside and count of every range (user_namespaces(7))."""
    lines = text_of("/proc/self/uid_map").splitlines()
    return [[int(number) for number in line.split()] for line in lines]


def process_status() -> dict[str, str]:
    """The lines of proc(5) status that tell what this process may do."""
    wanted = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    pairs = (line.partition(":") for line in text_of("/proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in pairs if name in wanted}


def mounts() -> list[list[str]]:
    """Target, type and options of every mount."""
    return [line.split()[1:4] for line in text_of("/proc/self/mounts").splitlines()]


def devices() -> list[str]:
    """Device nodes in /dev."""
    entries = [entry for entry in Path("/dev").iterdir() if not entry.is_symlink()]
    return sorted(p.name for p in entries if p.is_char_device() or p.is_block_device())


def limits() -> dict[str, str]:
    """The kernel's limits of this process's own cgroup, version 2 or 1 (cgroups(7))."""
    if (CGROUP / "cgroup.controllers").exists():
        quota, _, period = text_of(CGROUP / "cpu.max").partition(" ")
        files = {"memory": "memory.max", "swap": "memory.swap.max", "pids": "pids.max"}
        return {
            **{k: text_of(CGROUP / v) for k, v in files.items()},
            "quota": quota,
            "period": period,
        }
    files = {
        "memory": "memory/memory.limit_in_bytes",
        "memory_and_swap": "memory/memory.memsw.limit_in_bytes",
        "pids": "pids/pids.max",
        "quota": "cpu/cpu.cfs_quota_us",
        "period": "cpu/cpu.cfs_period_us",
    }
    return {name: text_of(CGROUP / file) for name, file in files.items()}


def write_error(path: str) -> str | None:
    """The name of the error that creating this file raises; None when it can be created."""
    try:
        Path(path).touch()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "unknown")
    Path(path).unlink()
    return None


def exec_error(folder: str) -> str | None:
    """The name of the error that running a file in this folder raises."""
    program = Path(folder) / "probe"
    program.write_text("#!/usr/bin/python3\n")
    program.chmod(0o700)
    try:
        os.waitpid(os.posix_spawn(program, [str(program)], {}), 0)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "unknown")
    finally:
        program.unlink()
    return None


def user_namespace_error() -> str | None:
    """The name of the error that a new user namespace raises; None when one was made."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):
        return "unknown"
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(CLONE_NEWUSER) == 0 else min(ctypes.get_errno(), 255) or 255)
    code = os.WEXITSTATUS(os.waitpid(child, 0)[1])
    return errno.errorcode.get(code, "unknown") if code else None


def processes_until_refused(limit: int) -> int | None:
    """How many processes there are when the kernel refuses another; None when it does not."""
    read_end, write_end = os.pipe()
    children: list[int] = []
    refused = None
    for _ in range(limit + PIDS_BEYOND):
        try:
            child = os.fork()
        except OSError:
            refused = len(children) + 1
            break
        if child == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
        children.append(child)
    os.close(write_end)
    os.close(read_end)
    for child in children:
        os.waitpid(child, 0)
    return refused


def memory_is_killed(limit: int) -> bool:
    """Whether a child that touches half as much again as the limit is killed for it."""
    child = os.fork()
    if child == 0:
        Path("/proc/self/oom_score_adj").write_text("1000")
        held: list[bytes] = []
        for _ in range(limit * 3 // 2 // MIB):
            held.append(b"x" * MIB)  # noqa: PERF401 - one at a time is the point
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def is_throttled(quota: str) -> bool:
    """Whether the kernel holds this process back once its CPU quota is used up."""
    give_up = time.monotonic() + (THROTTLE_WAIT_S if quota.isdecimal() else 0)
    file = CGROUP / "cpu.stat" if (CGROUP / "cpu.stat").exists() else CGROUP / "cpu" / "cpu.stat"
    while time.monotonic() < give_up:
        for line in text_of(file).splitlines():
            name, _, value = line.partition(" ")
            if name == "nr_throttled" and value != "0":
                return True
    return False


def resolves_localhost() -> bool:
    """Whether the name has an address."""
    try:
        return bool(socket.getaddrinfo("localhost", 80))
    except OSError:
        return False


def version_of(program: str) -> str:
    """What ``program --version`` says."""
    try:
        return subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()[:200]
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot run {program}: {error}"[:200]


def volume_bytes(path: str) -> int | None:
    """The size of the filesystem mounted at ``path``; None when nothing is."""
    if not os.path.ismount(path):
        return None
    sizes = os.statvfs(path)
    return sizes.f_blocks * sizes.f_frsize


def main() -> None:
    """Look at everything, then push against the limits, and print."""
    memory_bytes, pids, volume = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    git, own_limits = version_of("/usr/bin/git"), limits()
    facts = {
        "status": process_status(),
        "pid": os.getpid(),
        "uid": os.getuid(),
        "uidMap": uid_map(),
        "gid": os.getgid(),
        "groups": os.getgroups(),
        "lsm": text_of("/proc/self/attr/current").rstrip("\0"),
        "mounts": mounts(),
        "devices": devices(),
        "interfaces": sorted(p.name for p in Path("/sys/class/net").iterdir()),
        "resolvesLocalhost": resolves_localhost(),
        "rootWriteError": write_error("/probe"),
        "tmpExecError": exec_error("/tmp"),  # noqa: S108 - inside the container
        "userNamespaceError": user_namespace_error(),
        "limits": own_limits,
        "throttled": is_throttled(own_limits["quota"]),
        "processesUntilRefused": processes_until_refused(pids),
        "memoryIsKilled": memory_is_killed(memory_bytes),
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "corePattern": core_pattern(),
        "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
        "volumeBytes": volume_bytes(volume),
        "python": list(sys.version_info[:3]),
        "git": git,
    }
    print(json.dumps(facts), flush=True)  # noqa: T201 - standard output is the answer


main()
