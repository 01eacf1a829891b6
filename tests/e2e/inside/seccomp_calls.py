"""Runs in a container: system calls that an agent never needs, and what the kernel says.

Prints one JSON object: call → ``done`` or the errno's name.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNS = 0x10000000, 0x20000
OWN = os.getpid()
PAGE = ctypes.create_string_buffer(4096)
VECTOR = struct.pack("QQ", ctypes.addressof(PAGE), 16)

CALLS = {  # x86-64: name → number and arguments; those that need no capability to succeed
    "unshare": (272, NEWUSER),
    "unshare a mount namespace": (272, NEWUSER | NEWNS),
    "clone": (56, NEWUSER | 17, 0, 0, 0, 0),
    "clone3": (435, struct.pack("11Q", NEWUSER, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88),
    "ptrace": (101, 0, 0, 0, 0),
    "process_vm_readv": (310, OWN, VECTOR, 1, VECTOR, 1, 0),
    "kcmp": (312, OWN, OWN, 2, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, b"user", b"name", b"value", 5, -3),
    "io_uring_setup": (425, 1, ctypes.create_string_buffer(120)),
    "io_setup": (206, 1, ctypes.create_string_buffer(8)),
    "userfaultfd": (323, 1),
    "name_to_handle_at": (303, -100, b"/", struct.pack("II", 128, 0) + bytes(128), PAGE, 0),
    "modify_ldt": (154, 0, PAGE, 16),
    "execveat": (322, -100, b"/bin/true", 0, 0, 0),
    "an AF_ALG socket": (41, 38, 5, 0),
    "an AF_VSOCK socket": (41, 40, 1, 0),
    "an SCTP socket": (41, 2, 1, 132),
    "an MPTCP socket": (41, 2, 1, 262),
    "an audit socket": (41, 16, 3, 9),
    "an AF_ALG socket with a bit too many": (41, (1 << 32) | 38, 5, 0),
}


def outcome(name: str) -> str:
    """In a child, since some of them change who calls."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        arguments = CALLS[name]
        result = LIBC.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
        code = ctypes.get_errno() if result < 0 else 0
        os.write(write_end, struct.pack("i", code))
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 4)
    os.close(read_end)
    os.waitpid(child, 0)
    if not answer:
        return "done"  # it ran another program, or was stopped for whoever traces it
    (code,) = struct.unpack("i", answer)
    return errno.errorcode.get(code, str(code)) if code else "done"


print(json.dumps({name: outcome(name) for name in CALLS}), flush=True)
