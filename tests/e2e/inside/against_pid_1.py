"""Runs as the agent: everything that one process may try on another of the same user.

Prints one JSON object: target → attempt → ``done`` or the errno's name.  The second target is a
child of its own, which shows that each attempt is one that works.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
# Numbers of x86-64: the machine that the project is tested on.
PROCESS_VM_READV, PROCESS_VM_WRITEV, PIDFD_GETFD = 310, 311, 438
GET_ROBUST_LIST, RT_SIGQUEUEINFO, SETPRIORITY, SCHED_SETATTR = 274, 129, 141, 314
X32 = 0x40000000
PTRACE_SEIZE, PTRACE_DETACH, PTRACE_INTERRUPT = 0x4206, 17, 0x4207
SUPERVISOR_TICK_S = 0.5
SHARED = ctypes.create_string_buffer(16)  # at this address in a forked child as well

READ = ("environ", "maps", "smaps", "auxv", "io", "pagemap", "syscall", "personality")
LINKS = ("exe", "cwd", "root", "ns/pid", "ns/mnt", "fd/0", "fd/1")
LISTS = ("fd", "fdinfo", "map_files", "cwd/", "root/")
WRITTEN = ("mem", "fd/0", "fd/1", "fd/2", "comm", "oom_score_adj", "clear_refs")
FATAL = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV)


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def call(number: int, *arguments: object) -> int:
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = LIBC.syscall(number, *wide)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return int(result)


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def copy(number: int, pid: int) -> None:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    here = Vector(ctypes.addressof(ctypes.create_string_buffer(16)), 16)
    there = Vector(ctypes.addressof(SHARED), 16)
    call(number, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)


def trace(pid: int) -> None:
    LIBC.ptrace.argtypes = (ctypes.c_long,) * 4
    if LIBC.ptrace(PTRACE_SEIZE, pid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "")
    LIBC.ptrace(PTRACE_INTERRUPT, pid, 0, 0)
    os.waitpid(pid, 0)
    LIBC.ptrace(PTRACE_DETACH, pid, 0, 0)


def robust(pid: int) -> None:
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    call(GET_ROBUST_LIST, pid, ctypes.byref(head), ctypes.byref(size))


def looks(pid: int) -> dict[str, Callable[[], object]]:
    """What would show or change the memory or the files of a process."""
    found: dict[str, Callable[[], object]] = {}
    for name in READ:
        found[f"read {name}"] = lambda name=name: read(f"/proc/{pid}/{name}")  # type: ignore[misc]
    for name in LINKS:
        found[f"readlink {name}"] = lambda name=name: os.readlink(f"/proc/{pid}/{name}")  # type: ignore[misc]
    for name in LISTS:
        found[f"list {name}"] = lambda name=name: os.listdir(f"/proc/{pid}/{name}")  # type: ignore[misc]
    for name in WRITTEN:
        found[f"open {name}"] = lambda name=name: os.close(  # type: ignore[misc]
            os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        )
    return found | {
        "open task mem": lambda: os.close(os.open(f"/proc/{pid}/task/{pid}/mem", os.O_RDWR)),
        "process_vm_readv": lambda: copy(PROCESS_VM_READV, pid),
        "process_vm_writev": lambda: copy(PROCESS_VM_WRITEV, pid),
        "pidfd_getfd": lambda: call(PIDFD_GETFD, os.pidfd_open(pid), 0, 0),
        "ptrace": lambda: trace(pid),
        "get_robust_list": lambda: robust(pid),
        "prlimit": lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1)),
        "nice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 5),
        "nice of the group": lambda: os.setpriority(os.PRIO_PGRP, pid, 5),
        "scheduler": lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
        "parameters": lambda: os.sched_setparam(pid, os.sched_param(0)),
        "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
        "attributes": lambda: call(
            SCHED_SETATTR, pid, struct.pack("=IIQiIQQQ", 48, 0, 0, 5, 0, 0, 0, 0), 0
        ),
    }


# setpriority(PRIO_PROCESS, 1, 19) as a 32-bit program calls it; returns what the kernel answered.
INT_80 = bytes.fromhex("53 b861000000 bb00000000 b901000000 ba13000000 cd80 5b c3")


def other_doors() -> dict[str, str]:
    """The same through the ways in which other programs call this kernel, and for all at once."""
    with mmap.mmap(-1, len(INT_80), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        code.write(INT_80)
        at = ctypes.addressof(place := ctypes.c_char.from_buffer(code))
        answer = ctypes.CFUNCTYPE(ctypes.c_int)(at)()
        del place
    return {
        "32-bit": errno.errorcode.get(-answer, "done"),
        "x32": outcome(lambda: call(X32 | SETPRIORITY, 0, 1, 19)),
        "nice of all": outcome(lambda: os.setpriority(os.PRIO_USER, 0, 19)),
    }


def forged_sigterm(pid: int) -> None:
    """A SIGTERM that says that it comes from outside of the PID namespace: si_pid is 0."""
    si_queue = -1
    info = struct.pack("=iiiiII", signal.SIGTERM, 0, si_queue, 0, 0, 0).ljust(128, b"\0")
    call(RT_SIGQUEUEINFO, pid, int(signal.SIGTERM), info)


def shoot(pid: int) -> None:
    """Every way to send a signal; the kernel takes them, PID 1 must not care."""
    forged_sigterm(pid)
    time.sleep(SUPERVISOR_TICK_S)  # a blocked signal that is pending would hide the next
    for number in (*FATAL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGCHLD, signal.SIGUSR1):
        os.kill(pid, number)
        signal.pidfd_send_signal(os.pidfd_open(pid), number)
    time.sleep(SUPERVISOR_TICK_S)


def inherited() -> dict[str, str]:
    """What this process was started with: descriptor → what it is."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links[name] = os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
    return links


def main() -> None:
    descriptors = inherited()
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(1)
    os.setpgid(child, child)
    with open("/proc/1/cmdline") as file:
        command_line = file.read()
    answers: dict[str, object] = {
        name: {what: outcome(attempt) for what, attempt in looks(pid).items()}
        for name, pid in (("PID 1", 1), ("child", child))
    }
    answers["other doors"] = other_doors()
    answers["signals"] = outcome(lambda: shoot(1))
    answers["descriptors"] = descriptors
    answers["canary in command line"] = os.environ["CANARY"] in command_line
    json.dump(answers, sys.stdout)


main()
