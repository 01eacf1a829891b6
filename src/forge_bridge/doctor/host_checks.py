"""What the host behind a container does with its crashes and its user; neither is namespaced."""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Iterator
from typing import Final

import anyio.to_thread

from forge_bridge.doctor.probe import Inside
from forge_bridge.doctor.results import Check, CheckResult

CORES: Final = Check(
    "core_pattern", "A crash starts no program on the host", "/proc/sys/kernel/core_pattern"
)
ACCOUNT: Final = Check(
    "host_account",
    "The sandbox's user is nobody on the host",
    "/proc/self/uid_map, and the accounts of this host",
)
_TO_A_PROGRAM: Final = ("|", "@")
"""core(5): to a program, or to a socket that one listens on."""


def host_checks(seen: Inside, account: str | None) -> Iterator[CheckResult]:
    """Every finding about the host of a container that ran.

    :param account: :func:`account_of` what was seen.
    """
    yield _cores(seen.core_pattern)
    yield _account(seen, account)


async def account_of(seen: Inside) -> str | None:
    """The name of the account on this host that has the sandbox's user id, if one does."""
    uid = host_uid(seen.uid_map, seen.uid)
    return None if uid is None else await anyio.to_thread.run_sync(_name_of, uid)


def host_uid(uid_map: Iterable[tuple[int, int, int]], uid: int) -> int | None:
    """Who ``uid`` is outside of its user namespace (user_namespaces(7)); None: nobody."""
    for inside, outside, count in uid_map:
        if inside <= uid < inside + count:
            return outside + uid - inside
    return None


def _name_of(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


def _cores(pattern: str | None) -> CheckResult:
    # A core limit of 1 byte, which every container has, keeps the kernel from starting the program
    # (fs/coredump.c); but any process may lower its limit to 0, for which a pipe does not care.
    remedy = (
        "echo kernel.core_pattern=core | sudo tee /etc/sysctl.d/90-forge-bridge.conf && "
        "sudo sysctl --system"
    )
    if pattern is None:
        return CORES.warns("it cannot be read in the container", remedy)
    if pattern.startswith(_TO_A_PROGRAM):
        return CORES.warns(
            f"{pattern}: a process that lowers its core limit to 0 and crashes has the kernel hand "
            "its memory to that program, as root, outside of every container",
            remedy,
        )
    return CORES.passed(f"{pattern or 'empty'}: a file name")


def _account(seen: Inside, account: str | None) -> CheckResult:
    uid = host_uid(seen.uid_map, seen.uid)
    evidence = f"uid {seen.uid} is uid {'?' if uid is None else uid} outside of the container"
    if account is None:
        return ACCOUNT.passed(f"{evidence}, which no account of this host has")
    return ACCOUNT.warns(
        f"{evidence}, which is the account {account}: what escapes has its files and processes",
        "run the engine rootless (dockerd-rootless-setuptool.sh install), or map its users: add "
        '{"userns-remap": "default"} to /etc/docker/daemon.json',
    )
