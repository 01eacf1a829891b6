"""What the probe container saw of itself, judged line by line (sandbox.md, Every container)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.probe import (
    PROBE_CPU_MILLIS,
    PROBE_MEMORY_BYTES,
    PROBE_PIDS,
    QUOTA_BYTES,
    QUOTA_MOUNT,
    Inside,
)
from forge_bridge.doctor.results import CheckResult, Gate
from forge_core.blockers import Blocker
from forge_core.sandbox_spec import SANDBOX_GID, SANDBOX_UID

USER: Final = Gate(Blocker.USER, "PID 1 is an ordinary user in namespaces of its own", "/proc/self")
CAPABILITIES: Final = Gate(Blocker.CAPABILITIES, "No capability is left", "/proc/self/status, Cap*")
PRIVILEGES: Final = Gate(
    Blocker.NO_NEW_PRIVILEGES, "Set-user-id programs gain nothing", "/proc/self/status, NoNewPrivs"
)
SECCOMP: Final = Gate(
    Blocker.SECCOMP, "The configured seccomp filter is active", "/proc/self/status, unshare(2)"
)
LSM: Final = Gate(Blocker.LSM, "The configured LSM profile is active", "/proc/self/attr/current")
ROOT: Final = Gate(Blocker.READ_ONLY_ROOT, "The root filesystem is read-only", "a write to /")
TMPFS: Final = Gate(
    Blocker.TMPFS, "Nothing can be run from /tmp", "/proc/self/mounts, a run from /tmp"
)
MOUNTS: Final = Gate(Blocker.MOUNTS, "Nothing of the host is mounted", "/proc/self/mounts, /dev")
NETWORK: Final = Gate(Blocker.NETWORK, "Network policy none leaves only lo", "/sys/class/net")
LIMITS: Final = Gate(
    Blocker.LIMITS,
    "Memory, process and CPU limits hold",
    "the container's cgroup, and pushing at it",
)
TOOLING: Final = Gate(
    Blocker.TOOLING_IMAGE, "The tooling image can be used", "its manifest, a container made from it"
)
QUOTA: Final = Gate(Blocker.DISK_QUOTA, "A sandbox cannot fill the disk", "a volume with a quota")

OLDEST_PYTHON: Final = (3, 9)
OLDEST_GIT: Final = (2, 30)
_DEVICES = frozenset({"full", "null", "random", "tty", "urandom", "zero"})
_MOUNTED = re.compile(
    r"/|/(?:proc|dev|sys)(?:/.*)?|/tmp|/run|/etc/(?:hosts|hostname|resolv\.conf)|" + QUOTA_MOUNT
)
_HARD_FLAGS = frozenset({"noexec", "nosuid", "nodev"})
_DELEGATE = (
    "printf '[Service]\\nDelegate=cpu cpuset io memory pids\\n' | sudo install -D /dev/stdin "
    "/etc/systemd/system/user@.service.d/delegate.conf && sudo systemctl daemon-reload"
)
_REPORT = "do not use this engine: it does not apply what it was asked for"


def inside_checks(seen: Inside, settings: PreflightSettings) -> Iterator[CheckResult]:
    """Every finding about a container that ran."""
    yield _tooling(seen, settings)
    yield _user(seen)
    yield _capabilities(seen)
    if seen.status.get("NoNewPrivs") == "1":
        yield PRIVILEGES.passed("NoNewPrivs 1")
    else:
        yield PRIVILEGES.blocks_all(f"NoNewPrivs {seen.status.get('NoNewPrivs')}", _REPORT)
    yield _seccomp(seen, settings)
    yield _lsm(seen, settings)
    if seen.root_write_error == "EROFS":
        yield ROOT.passed("EROFS")
    else:
        yield ROOT.blocks_all(f"a write to / gave {seen.root_write_error or 'a file'}", _REPORT)
    yield _tmpfs(seen)
    yield _mounts(seen)
    if seen.interfaces == ("lo",):
        yield NETWORK.passed(f"lo, localhost resolves: {seen.resolves_localhost}")
    else:
        yield NETWORK.blocks_all(f"interfaces {', '.join(seen.interfaces)}", _REPORT)
    yield _limits(seen)


def quota_supported(seen: Inside | None) -> bool:
    """Whether a volume of a given size really has that size."""
    return seen is not None and seen.volume_bytes is not None and seen.volume_bytes <= QUOTA_BYTES


def quota_check(seen: Inside | None, settings: PreflightSettings) -> CheckResult:
    """B-26: a quota, or the operator's word that the disk is for this alone."""
    if quota_supported(seen):
        return QUOTA.passed(f"a volume of {QUOTA_BYTES} bytes has that size")
    if settings.dedicated_disk:
        return QUOTA.passed("no quotas; the operator asserts a disk of its own for the engine")
    return QUOTA.blocks_required(
        "no probe ran, so none is known"
        if seen is None
        else "the engine's storage keeps no volume quotas",
        "put the engine's data root on XFS mounted with pquota, or give it a disk of its own "
        "and set FORGE_SANDBOX_DEDICATED_DISK=true",
    )


def _tooling(seen: Inside, settings: PreflightSettings) -> CheckResult:
    python = ".".join(map(str, seen.python))
    evidence = f"{settings.tooling_image}: Python {python}, {seen.git}"
    version = re.match(r"git version (\d+)\.(\d+)", seen.git)
    old_git = version is None or (int(version[1]), int(version[2])) < OLDEST_GIT
    if old_git or seen.python[:2] < OLDEST_PYTHON:
        return TOOLING.blocks_all(
            evidence, "use a tooling image with /usr/bin/python3 3.9+ and /usr/bin/git 2.30+"
        )
    return TOOLING.passed(evidence)


def _user(seen: Inside) -> CheckResult:
    evidence = f"pid {seen.pid}, uid {seen.uid}, gid {seen.gid}, groups {list(seen.groups)}"
    identity = (seen.pid, seen.uid, seen.gid)
    if identity == (1, SANDBOX_UID, SANDBOX_GID) and set(seen.groups) <= {SANDBOX_GID}:
        return USER.passed(evidence)
    return USER.blocks_all(evidence, _REPORT)


def _capabilities(seen: Inside) -> CheckResult:
    sets = {name: value for name, value in seen.status.items() if name.startswith("Cap")}
    evidence = ", ".join(f"{name} {value}" for name, value in sorted(sets.items()))
    if {"CapBnd", "CapEff", "CapPrm"} <= sets.keys() and not any(
        int(value, 16) for value in sets.values()
    ):
        return CAPABILITIES.passed(evidence)
    return CAPABILITIES.blocks_all(evidence or "no Cap lines", _REPORT)


def _seccomp(seen: Inside, settings: PreflightSettings) -> CheckResult:
    remedy = "set FORGE_SANDBOX_SECCOMP_PROFILE to a hardened profile"
    mode, refused = seen.status.get("Seccomp"), seen.user_namespace_error
    evidence = f"mode {mode}, a new user namespace gives {refused or 'a user namespace'}"
    if mode != "2":
        return SECCOMP.blocks_required(f"{evidence}: no filter is active", remedy)
    if refused is None:
        return SECCOMP.blocks_required(evidence, "use a profile that refuses unshare(2) and clone")
    if settings.hardening.seccomp_digest is None:
        return SECCOMP.blocks_required(f"{evidence}: the engine's own filter", remedy)
    return SECCOMP.passed(f"{evidence}: {settings.hardening.seccomp_digest}")


def _lsm(seen: Inside, settings: PreflightSettings) -> CheckResult:
    wanted = settings.hardening.lsm_security_opt
    has = seen.lsm or "nothing"
    if wanted is None:
        return LSM.blocks_required(
            f"none is configured; the container runs under {has}",
            "set FORGE_SANDBOX_LSM_SECURITY_OPT, for example apparmor=docker-default",
        )
    profile = re.split("[=:]", wanted, maxsplit=1)[1].removeprefix("type:")
    enforcing = settings.proofs.get(LSM.id)
    enforced = seen.lsm.endswith("(enforce)") or enforcing is not None
    if profile in re.split(r"[:\s]", seen.lsm) and enforced:
        return LSM.passed("; ".join(filter(None, (f"{has}, as {wanted} asks", enforcing))))
    why = settings.failures.get(LSM.id)
    seen_instead = f"{wanted} was accepted, and the container runs under {has}"
    return LSM.blocks_required(
        "; ".join(filter(None, (seen_instead, why))),
        "enable AppArmor or SELinux on this host and load the profile: sudo aa-status",
    )


def _tmpfs(seen: Inside) -> CheckResult:
    options = {
        target: set(text.split(",")) for target, kind, text in seen.mounts if kind == "tmpfs"
    }
    weak = [
        target
        for target in ("/tmp", "/run", "/dev/shm")  # noqa: S108 - inside the container
        if not options.get(target, set()) >= _HARD_FLAGS
    ]
    evidence = f"a program in /tmp gives {seen.tmp_exec_error or 'a process'}"
    if weak or seen.tmp_exec_error != "EACCES":
        return TMPFS.blocks_all(f"{evidence}; weak: {', '.join(weak) or 'none'}", _REPORT)
    return TMPFS.passed(evidence)


def _mounts(seen: Inside) -> CheckResult:
    strange = sorted({target for target, _, _ in seen.mounts if not _MOUNTED.fullmatch(target)})
    writable = sorted(
        target
        for target, kind, text in seen.mounts
        if kind in {"sysfs", "cgroup", "cgroup2"} and "ro" not in text.split(",")
    )
    strange += [f"writable {target}" for target in writable]
    strange += [f"/dev/{name}" for name in sorted(set(seen.devices) - _DEVICES)]
    if strange:
        return MOUNTS.blocks_all(f"found {', '.join(strange)}", _REPORT)
    return MOUNTS.passed(f"{len(seen.mounts)} mounts, all of the container's own")


def _limits(seen: Inside) -> CheckResult:
    has = seen.limits
    wanted = {
        "memory": str(PROBE_MEMORY_BYTES),
        "pids": str(PROBE_PIDS),
        **({"swap": "0"} if "swap" in has else {"memory_and_swap": str(PROBE_MEMORY_BYTES)}),
    }
    weak = [
        f"{name} is {has.get(name) or 'unset'}" for name in wanted if has.get(name) != wanted[name]
    ]
    if not _is_quota(has.get("quota", ""), has.get("period", "")):
        weak.append(f"CPU quota is {has.get('quota') or 'unset'}")
    if not seen.memory_is_killed:
        weak.append("a child outgrew the memory limit and lived")
    if seen.processes_until_refused is None:
        weak.append(f"more than {PROBE_PIDS} processes ran")
    if weak:
        return LIMITS.blocks_required("; ".join(weak), _DELEGATE)
    # A busy machine may give the probe less than its quota, so that nothing is left to throttle;
    # the quota that the kernel shows in the container's own cgroup is evidence enough.
    cpu = (
        "was throttled" if seen.throttled else "has its quota, which the busy machine did not reach"
    )
    return LIMITS.passed(
        f"a child beyond {PROBE_MEMORY_BYTES} bytes was killed, process "
        f"{seen.processes_until_refused} was refused, the CPU {cpu}"
    )


def _is_quota(quota: str, period: str) -> bool:
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return False
    return int(quota) * 1000 == int(period) * PROBE_CPU_MILLIS
