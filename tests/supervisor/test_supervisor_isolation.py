"""The agent runs as the same user and must not get at the lease key, the pipes or PID 1."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pid1 import KEY, Pid1, child_of, init_frame

THIEF = """
import ctypes, json, os, subprocess, time
libc = ctypes.CDLL(None, use_errno=True)

def of(action):
    try: return action()
    except OSError as error: return os.strerror(error.errno)

def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), "")
    return "done"

def copy(pid):
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    room = ctypes.create_string_buffer(16)
    here = Vector(ctypes.addressof(room), 16)
    there = Vector(ADDRESS, 16)
    return checked(libc.process_vm_readv(
        pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))

def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file: return "done" if file.read(1) else "empty"

def take_fd(pid):
    pidfd = os.pidfd_open(pid)
    return checked(libc.syscall(438, pidfd, 0, 0))

def attach(pid):
    PTRACE_SEIZE = 0x4206
    return checked(libc.ptrace(PTRACE_SEIZE, pid, None, None))

def write_in(pid):
    with open(f"/proc/{pid}/fd/1", "wb") as file: return "done"

ADDRESS = ctypes.addressof(ctypes.create_string_buffer(16))
child = os.fork()
if child == 0:
    while True: time.sleep(1)
answers = {}
for name, pid in (("PID 1", 1), ("its own child", child)):
    answers[name] = {
        "environ": of(lambda: read(pid, "environ")),
        "maps": of(lambda: read(pid, "maps")),
        "auxv": of(lambda: read(pid, "auxv")),
        "mem": of(lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)) or "done"),
        "fd": of(lambda: os.listdir(f"/proc/{pid}/fd") and "done"),
        "fd/1": of(lambda: write_in(pid)),
        "process_vm_readv": of(lambda: copy(pid)),
        "pidfd_getfd": of(lambda: take_fd(pid)),
        "ptrace": of(lambda: attach(pid)),
    }
answers["cmdline"] = open("/proc/1/cmdline").read()
print(json.dumps(answers))
"""


@pytest.mark.requirement("B-70")
def test_the_agent_cannot_look_into_its_supervisor(start: Callable[..., Pid1]) -> None:
    pid1 = start()
    program = THIEF.replace("ctypes.addressof(ctypes.create_string_buffer(16))", "id(THIEF)")
    program = "THIEF = 'a buffer that a fork shares'\n" + program
    pid1.send(
        init_frame(
            *("/usr/bin/python3", "-I", "-S", "-c", program),
            env={"PATH": "/usr/bin:/bin", "SECRET": "canary-value"},
        )
    )
    assert pid1.end() == 0, pid1.text("stderr")
    answers = json.loads(pid1.text())
    # The control: the same probes open an ordinary process of the same user.
    assert set(answers["its own child"].values()) == {"done"}
    assert set(answers["PID 1"].values()) <= {"Permission denied", "Operation not permitted"}
    assert "canary-value" not in answers["cmdline"]
    assert base64.b64encode(KEY).decode() not in answers["cmdline"]


@pytest.mark.requirement("B-70")
def test_the_key_is_in_pid_1_and_nowhere_in_the_agent(start: Callable[..., Pid1]) -> None:
    pid1 = start()
    pid1.send(init_frame("sh", "-c", "echo up; while :; do sleep 1; done"))
    pid1.wait_for_text("up")
    host_pid = pid1.host_pid
    agent = child_of(host_pid)
    needles = (KEY, base64.b64encode(KEY))
    assert any(needle in memory_of(host_pid) for needle in needles)  # the search can find it
    assert not any(needle in memory_of(agent) for needle in needles)
    for pid in (host_pid, agent):
        for name in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{name}").read_bytes()
            assert not any(needle in content for needle in needles)


def memory_of(pid: int) -> bytes:
    """Everything writable, as root sees it from outside."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if match and "[vvar" not in line:
                first, end = (int(part, 16) for part in match.groups())
                memory.seek(first)
                found.append(memory.read(end - first))
    return b"".join(found)
