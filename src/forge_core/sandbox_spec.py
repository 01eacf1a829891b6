"""From a typed spec to the engine's request: the whole hardening list in one pure function.

sandbox.md, *Every container*.  The result is the body of ``POST /containers/create`` of the
Engine API (1.41 and later); :func:`read_back` compares what the engine says it created with
what was asked, because a request that was accepted is not a request that was obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forge_core.errors import RefusedError
from forge_core.labels import Owner

SANDBOX_UID: Final = 1000
SANDBOX_GID: Final = 1000
HOSTNAME: Final = "sandbox"
WORKSPACE: Final = "/workspace"
CPU_PERIOD_US: Final = 100_000

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_REPOSITORY = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::[0-9]{1,5})?/)?[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*\Z"
)

BLANKED_VARIABLES: Final = (
    "BASH_ENV",
    "ENV",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NODE_OPTIONS",
    "PYTHONHOME",
    "PYTHONINSPECT",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
)
"""Removed from the image's environment before PID 1 starts: each can make it run other code."""


def require_pinned(reference: str, *, field_name: str) -> str:
    """``repository@sha256:<64 hex>``, or a local image id ``sha256:<64 hex>``; nothing else.

    A tag can be moved between the check and the run; a digest cannot.

    :raises RefusedError: code ``malformed``.
    """
    repository, at, digest = reference.rpartition("@")
    if _DIGEST.match(digest) and (
        (at and _REPOSITORY.match(repository)) or (not at and not repository)
    ):
        return reference
    raise RefusedError(
        f"cannot use {field_name}: {reference[:200]!r} is not pinned by digest; write "
        "repository@sha256:<64 hex> (docker image inspect --format '{{.RepoDigests}}' IMAGE)",
        code="malformed",
        field=field_name,
    )


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A named volume of the attempt, mounted in a container; never a host path."""

    volume: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Hardening:
    """What the operator configured for every container (B-35); values, not paths."""

    seccomp_profile_json: str | None = None
    lsm_security_opt: str | None = None

    def security_opt(self) -> list[str]:
        """The engine's ``SecurityOpt``; the engine's own seccomp default where none is given."""
        options = ["no-new-privileges"]
        if self.seccomp_profile_json is not None:
            options.append(f"seccomp={self.seccomp_profile_json}")
        if self.lsm_security_opt is not None:
            options.append(self.lsm_security_opt)
        return options


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container of an attempt, as the sandbox means it.  Sizes in bytes."""

    owner: Owner
    role: str
    image: str
    argv: tuple[str, ...]
    memory_bytes: int
    cpu_millis: int
    pids: int
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = "/"
    mounts: tuple[VolumeMount, ...] = ()
    tmp_bytes: int = 64 * 2**20
    run_bytes: int = 16 * 2**20
    shm_bytes: int = 64 * 2**20
    nofile: int = 4096
    tmp_exec: bool = False
    network: str | None = None

    @property
    def name(self) -> str:
        """Derived from the labels, so that a late create is found by it."""
        return self.owner.name(self.role)


def container_request(spec: ContainerSpec, hardening: Hardening) -> dict[str, Any]:
    """The body of the create request; every line of the hardening list is here.

    :raises RefusedError: the image is not pinned, or a limit is missing.
    """
    require_pinned(spec.image, field_name="image")
    for name in ("memory_bytes", "cpu_millis", "pids"):
        if getattr(spec, name) <= 0:
            raise RefusedError(
                f"cannot build container {spec.name}: {name} must be positive",
                code="malformed",
                field=name,
            )
    environment = [f"{name}={value}" for name, value in sorted(spec.environment.items())]
    environment += [name for name in BLANKED_VARIABLES if name not in spec.environment]
    return {
        "Image": spec.image,
        "Entrypoint": list(spec.argv),
        "Cmd": [],
        "Env": environment,
        "User": f"{SANDBOX_UID}:{SANDBOX_GID}",
        "Hostname": HOSTNAME,
        "WorkingDir": spec.working_directory,
        "Labels": spec.owner.labels(spec.role),
        "Healthcheck": {"Test": ["NONE"]},
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": False,
        "Tty": False,
        "NetworkDisabled": False,
        "HostConfig": _host_config(spec, hardening),
    }


def _host_config(spec: ContainerSpec, hardening: Hardening) -> dict[str, Any]:
    flags = "nosuid,nodev" if spec.tmp_exec else "noexec,nosuid,nodev"
    owner = f"uid={SANDBOX_UID},gid={SANDBOX_GID},mode=0700"
    return {
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "Privileged": False,
        "SecurityOpt": hardening.security_opt(),
        "Memory": spec.memory_bytes,
        "MemorySwap": spec.memory_bytes,
        "CpuPeriod": CPU_PERIOD_US,
        "CpuQuota": spec.cpu_millis * CPU_PERIOD_US // 1000,
        "PidsLimit": spec.pids,
        "Ulimits": [
            {"Name": "nofile", "Soft": spec.nofile, "Hard": spec.nofile},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "ShmSize": spec.shm_bytes,
        "Tmpfs": {
            "/tmp": f"{flags},mode=1777,size={spec.tmp_bytes}",  # noqa: S108 - inside the container
            "/run": f"noexec,nosuid,nodev,{owner},size={spec.run_bytes}",
        },
        "Mounts": [
            {
                "Type": "volume",
                "Source": mount.volume,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
                "VolumeOptions": {"NoCopy": True},
            }
            for mount in spec.mounts
        ],
        "NetworkMode": spec.network or "none",
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "PublishAllPorts": False,
        "PortBindings": {},
        "Devices": [],
        "Init": False,
        "OomKillDisable": False,
    }


_READ_BACK: Final = (
    "ReadonlyRootfs",
    "Privileged",
    "CapDrop",
    "SecurityOpt",
    "Memory",
    "MemorySwap",
    "CpuPeriod",
    "CpuQuota",
    "PidsLimit",
    "IpcMode",
    "ShmSize",
    "Tmpfs",
    "NetworkMode",
)


def read_back(request: Mapping[str, Any], inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """What the engine says it created differs from what was asked: one sentence each.

    ``inspected`` is the engine's answer to an inspect of the created container.  Empty means
    that every hardening option was taken over.
    """
    wanted, got = request["HostConfig"], inspected.get("HostConfig") or {}
    faults = [
        f"{key}: asked for {wanted[key]!r}, the engine has {got.get(key)!r}"
        for key in _READ_BACK
        if got.get(key) != wanted[key]
    ]
    for key in ("CapAdd", "Devices", "Binds", "VolumesFrom", "PortBindings", "DeviceRequests"):
        if got.get(key):
            faults.append(f"{key}: asked for none, the engine has {got[key]!r}")
    for key in ("PidMode", "UTSMode", "UsernsMode", "CgroupnsMode", "NetworkMode"):
        if got.get(key) == "host":
            faults.append(f"{key}: the engine has the host's namespace")
    log_type = (got.get("LogConfig") or {}).get("Type")
    if log_type != wanted["LogConfig"]["Type"]:
        faults.append(f"LogConfig: asked for none, the engine has {log_type!r}")
    config = inspected.get("Config") or {}
    if config.get("User") != request["User"]:
        faults.append(f"User: asked for {request['User']!r}, the engine has {config.get('User')!r}")
    wanted_mounts = {(m["Source"], m["Target"], not m["ReadOnly"]) for m in wanted["Mounts"]}
    got_mounts = {
        (m.get("Name") or m.get("Source"), m.get("Destination"), bool(m.get("RW")))
        for m in inspected.get("Mounts") or ()
        if m.get("Type") != "tmpfs"
    }
    if wanted_mounts != got_mounts:
        faults.append(f"Mounts: asked for {sorted(wanted_mounts)}, got {sorted(got_mounts)}")
    return tuple(faults)


def image_faults(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """Why an image is refused for use: what it declares that would change a container."""
    config = inspected.get("Config") or {}
    faults = []
    if config.get("Volumes"):
        faults.append(f"it declares VOLUME {sorted(config['Volumes'])}")
    if config.get("OnBuild"):
        faults.append("it declares ONBUILD")
    labels = sorted(k for k in config.get("Labels") or {} if k.startswith("dev.forge."))
    if labels:
        faults.append(f"it carries the labels {labels}")
    return tuple(faults)
