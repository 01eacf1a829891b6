"""Runs as the agent: looks for a way out of the container.

Prints one JSON object: attempt → ``done`` or the errno's name, and what can be seen from inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x4000000, 0x10000000, 0x40000000
AF_VSOCK, AF_PACKET = 40, 17
SYSCALLS: dict[str, tuple[int, *tuple[object, ...]]] = {  # x86-64: name → number and arguments
    "mount": (165, b"none", b"/tmp", b"tmpfs", 0, 0),
    "umount2": (166, b"/proc/sys", 0),
    "move a mount": (165, b"/proc", b"/tmp", 0, 0x2000, 0),
    "open_tree": (428, -100, b"/proc", 1),
    "fsopen": (430, b"tmpfs", 0),
    "pivot_root": (155, b"/", b"/tmp"),
    "chroot": (161, b"/tmp"),
    "unshare a user namespace": (272, CLONE_NEWUSER),
    "unshare a mount namespace": (272, CLONE_NEWUSER | CLONE_NEWNS),
    "unshare a host name": (272, CLONE_NEWUTS),
    "unshare a network": (272, CLONE_NEWNET),
    "clone a user namespace": (56, CLONE_NEWUSER | 17, 0, 0, 0, 0),
    "make a device": (133, b"/tmp/device", 0o600 | stat.S_IFCHR, 0x101),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, b"user", b"name", b"value", 5, -3),
    "request_key": (249, b"user", b"name", 0, -3),
    "bpf": (321, 0, 0, 0),
    "io_uring_setup": (425, 1, 0),
    "perf_event_open": (298, 0, 1, -1, -1, 0),
    "userfaultfd": (323, 0),
    "init_module": (175, 0, 0, b""),
    "kexec_load": (246, 0, 0, 0, 0),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0),
    "swapon": (167, b"/tmp", 0),
    "acct": (163, b"/tmp/acct"),
    "kernel log": (103, 3, b"x" * 64, 64),
    "sethostname": (170, b"mine", 4),
    "clock_settime": (227, 0, bytes(16)),
    "iopl": (172, 3),
    "open_by_handle_at": (304, -100, bytes(24), 0),
    "fanotify_init": (300, 0, 0),
    "setuid 0": (105, 0),
    "setgid 0": (106, 0),
    "setgroups": (116, 0, 0),
    "make others slower": (141, 0, 0, -20),
}
WRITES = (
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/irq/default_smp_affinity",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/power/state",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/release_agent",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/memory.max",
    "/dev/kmsg",
    "/dev/mem",
    "/dev/console",
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/passwd",
    "/etc/ld.so.preload",
    "/usr/bin/python3",
    "/workspace/beside-the-tree",
)
READS = ("/dev/kmsg", "/dev/mem", "/dev/tty", "/proc/kcore", "/proc/keys", "/proc/timer_list")
HOST_SOCKETS = ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock")


def outcome(attempt: Callable[[], object]) -> str:
    try:
        found = attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "empty" if found == b"" else "done"


def call(number: int, *arguments: object) -> int:
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    pid = os.getpid()
    result = LIBC.syscall(number, *wide)
    if os.getpid() != pid:
        os._exit(0)  # the child of a clone
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return int(result)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def write(path: str) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(b"0")


def connect(family: int, kind: int, address: tuple[object, ...] | str) -> None:
    with socket.socket(family, kind) as found:
        found.settimeout(2)
        found.connect(address)


def sockets() -> Iterator[tuple[str, Callable[[], object]]]:
    for host in ("10.0.2.2", "172.17.0.1", "169.254.169.254", "192.0.2.1"):
        yield host, partial(connect, socket.AF_INET, socket.SOCK_STREAM, (host, 80))
    yield "IPv6", lambda: connect(socket.AF_INET6, socket.SOCK_STREAM, ("2001:db8::1", 80))
    yield "raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()
    yield "packet", lambda: socket.socket(AF_PACKET, socket.SOCK_RAW, 3).close()
    yield "vsock of the hypervisor", lambda: connect(AF_VSOCK, socket.SOCK_STREAM, (2, 22))
    name = os.environ["HOST_SOCKET"]
    yield "abstract", lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}")
    yield "path", lambda: connect(socket.AF_UNIX, socket.SOCK_STREAM, os.environ["HOST_PATH"])


def attempts() -> dict[str, dict[str, str]]:
    return {
        "syscalls": {name: outcome(partial(call, *c)) for name, c in SYSCALLS.items()},
        "writes": {path: outcome(partial(write, path)) for path in WRITES},
        "reads": {path: outcome(partial(read, path)) for path in READS},
        "sockets": {name: outcome(attempt) for name, attempt in sockets()},
        "cgroup": {"mkdir": outcome(lambda: os.mkdir("/sys/fs/cgroup/mine"))},
    }


def set_id_files() -> list[str]:
    found = []
    for directory, _, names in os.walk("/"):
        if directory.startswith(("/proc", "/sys")):
            continue
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(path := os.path.join(directory, name))
                if stat.S_ISREG(status.st_mode) and status.st_mode & 0o6000:
                    found.append(path)
    return found


def sights() -> dict[str, object]:
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split(" - ")[0].split()[3:6] for line in file]
    with open("/proc/self/status") as file:
        status = dict(line.strip().split(":\t", 1) for line in file if ":\t" in line)
    with open("/proc/net/unix") as file:
        abstract = [line for line in file if "@" in line]
    return {
        "mounts": mounts,
        "status": {n: status[n] for n in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Groups")},
        "interfaces": os.listdir("/sys/class/net"),
        "abstract sockets": abstract,
        "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()),
        "devices": sorted(os.listdir("/dev")),
        "host name": socket.gethostname(),
        "host sockets": [path for path in HOST_SOCKETS if os.path.exists(path)],
        "host path": os.path.exists(os.environ["HOST_PATH"]),
        "set-id files": set_id_files(),
        "environment": sorted(os.environ),
    }


json.dump({**attempts(), **sights()}, sys.stdout)
