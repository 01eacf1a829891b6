"""From a typed spec to the engine's request: the whole hardening list in one pure function.

sandbox.md, *Every container*.  The result is the body of ``POST /containers/create`` of the
Engine API (1.41 and later).  A request that was accepted is not a request that was obeyed:
:mod:`forge_core.read_back` compares it with what the engine says it created, and the doctor
looks from inside a container.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import Any, Final

from forge_core.errors import RefusedError
from forge_core.labels import PREFIX, Owner

SANDBOX_UID: Final = 1000
SANDBOX_GID: Final = 1000
HOSTNAME: Final = "sandbox"
WORKSPACE_VOLUME: Final = "/workspace"
"""Where the workspace volume is mounted; its root belongs to root."""

WORKSPACE: Final = "/workspace/tree"
"""Where the agent works.  One level down, because the engine unpacks an archive into a volume
but never changes the owner of the volume's own root: the archive brings this directory."""

TOOLING_MOUNT: Final = "/.forge/tooling"
"""Where PID 1 finds its interpreter in an image of a project."""

CPU_PERIOD_US: Final = 100_000
MIN_CPU_MILLIS: Final = 10
MIN_MEMORY_BYTES: Final = 6 * 2**20
NO_CORE_BYTES: Final = 1
"""No core file fits into it.  0 would not do: where the host pipes cores to a program, the kernel
ignores every limit but 1 (core(5), fs/coredump.c), and that program writes secrets to disk."""

PRELOAD_FILE: Final = "/etc/ld.so.preload"
"""An image that has it is refused: the loader would run its libraries in every process."""

NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_TAG = re.compile(r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(?=@)")
_REPOSITORY = re.compile(
    r"(?:[A-Za-z0-9]+(?:(?:\.|-+)[A-Za-z0-9]+)*(?::[0-9]{1,5})?/)?"
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*\Z"
)
_ENGINE_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,254}\Z")
_TARGET = re.compile(r"(?:/\.?[A-Za-z0-9_][A-Za-z0-9_.-]*)+\Z")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LSM_OPTION = re.compile(r"(?:apparmor|label)[=:](?!(?:unconfined|disable)\Z)[\x21-\x7e]{1,255}\Z")
_RESERVED_TARGETS: Final = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr"}
)
_FOREIGN_NETWORKS: Final = frozenset({"host", "none", "default"})

BLANKED_VARIABLES: Final = (
    "BASH_ENV",
    "ENV",
    "GCONV_PATH",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NODE_OPTIONS",
    "PYTHONBREAKPOINT",
    "PYTHONEXECUTABLE",
    "PYTHONHOME",
    "PYTHONINSPECT",
    "PYTHONPATH",
    "PYTHONPLATLIBDIR",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "PYTHONWARNINGS",
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


def without_tag(reference: str) -> str:
    """A pinned reference without the tag beside its digest, which means nothing there."""
    return _TAG.sub("", reference, count=1)


def _is_reserved(path: str) -> bool:
    return path.split("/")[1] in _RESERVED_TARGETS


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A named volume of the attempt, mounted in a container; never a host path."""

    volume: str
    target: str
    read_only: bool

    def __post_init__(self) -> None:
        if not _ENGINE_NAME.match(self.volume):
            raise _malformed("mounts", f"{self.volume[:100]!r} is no volume name")
        if not _TARGET.match(self.target) or _is_reserved(self.target):
            raise _malformed("mounts", f"a volume cannot be mounted at {self.target[:100]!r}")


@dataclass(frozen=True, slots=True)
class Hardening:
    """What the operator configured for every container (B-35); values, not paths.

    :raises RefusedError: a value that would weaken the engine's defaults, or no JSON.
    """

    seccomp_profile_json: str | None = None
    lsm_security_opt: str | None = None

    def __post_init__(self) -> None:
        if self.seccomp_profile_json is not None and not _is_object(self.seccomp_profile_json):
            raise _malformed("seccomp_profile_json", "the seccomp profile is no JSON object")
        if self.lsm_security_opt is not None and not _LSM_OPTION.match(self.lsm_security_opt):
            raise _malformed(
                "lsm_security_opt",
                f"{self.lsm_security_opt[:100]!r} is neither apparmor=PROFILE nor label=OPTION",
            )

    @property
    def seccomp_digest(self) -> str | None:
        """``sha256:<hex>`` of the profile's text, as the runner advertises it (B-06)."""
        if self.seccomp_profile_json is None:
            return None
        return f"sha256:{hashlib.sha256(self.seccomp_profile_json.encode()).hexdigest()}"

    def security_opt(self) -> list[str]:
        """The engine's ``SecurityOpt``; the engine's own seccomp default where none is given."""
        options = ["no-new-privileges"]
        if self.seccomp_profile_json is not None:
            options.append(f"seccomp={self.seccomp_profile_json}")
        if self.lsm_security_opt is not None:
            options.append(self.lsm_security_opt)
        return options


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _malformed(field_name: str, why: str) -> RefusedError:
    return RefusedError(f"cannot build a container: {why}", code="malformed", field=field_name)


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container of an attempt, as the sandbox means it.  Sizes in bytes.

    :param environment: for PID 1, visible to whoever may inspect the container: no secrets.
    :param blanked: variables of the image that PID 1 must not get, besides those that none may.
    :param uid: numeric, never root; with ``gid`` also the owner of what is in memory.
    :param tmpfs: size of each directory kept in memory besides /tmp and /run, by its path.
    :param network: a network of the attempt; None is network policy ``none``.
    :param aliases: names under which others on that network find it, besides its own.
    :param address: its own on that network; None: the engine chooses.
    :param name_servers: whom the engine's resolver asks about names of elsewhere on its behalf;
        none: the engine chooses.
    :param resolves_localhost: without a network, whether ``/etc/hosts`` is filled.  False spares
        the engine its network set-up, a third of the time that a start takes; the container
        then has a network namespace with only ``lo``, and ``localhost`` does not resolve.
    :raises RefusedError: a value that no container of ours may have.
    """

    owner: Owner
    role: str
    image: str
    argv: tuple[str, ...]
    memory_bytes: int
    cpu_millis: int
    pids: int
    environment: Mapping[str, str] = field(default_factory=dict)
    blanked: tuple[str, ...] = ()
    working_directory: str = "/"
    mounts: tuple[VolumeMount, ...] = ()
    tmp_bytes: int = 64 * 2**20
    run_bytes: int = 16 * 2**20
    shm_bytes: int = 64 * 2**20
    nofile: int = 4096
    tmp_exec: bool = False
    network: str | None = None
    aliases: tuple[str, ...] = ()
    address: IPv4Address | None = None
    name_servers: tuple[IPv4Address, ...] = ()
    resolves_localhost: bool = True
    uid: int = SANDBOX_UID
    gid: int = SANDBOX_GID
    tmpfs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_pinned(self.image, field_name="image")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise _malformed(name, f"{name} of {self.name} must be at least {least}")
        if not self.argv:
            raise _malformed("argv", f"{self.name} has no command, so the image's would run")
        if any("\0" in text for text in (*self.argv, *self.environment.values())):
            raise _malformed("argv", f"{self.name} has a NUL in its command or environment")
        if any("=" in name or "\0" in name for name in self.blanked):
            raise _malformed("blanked", f"{self.name} blanks what is no variable name")
        if not all(_VARIABLE.match(name) for name in self.environment):
            raise _malformed("environment", f"{self.name} has an ill-formed variable name")
        if self.working_directory != "/" and not _TARGET.match(self.working_directory):
            raise _malformed("working_directory", f"{self.working_directory[:100]!r} is no path")
        if self.network is not None and (
            self.network in _FOREIGN_NETWORKS or not _ENGINE_NAME.match(self.network)
        ):
            raise _malformed("network", f"{self.name} cannot join {self.network[:100]!r}")
        if not all(map(_ALIAS.match, self.aliases)) or (self.aliases and self.network is None):
            raise _malformed("aliases", f"{self.name} cannot be called {self.aliases!r:.100}")
        if self.network is None and (self.address or self.name_servers):
            raise _malformed("address", f"{self.name} has an address or name servers in no network")
        if len(coverable(self.tmpfs)) < len(self.tmpfs) or min(self.tmpfs.values(), default=1) < 1:
            raise _malformed(
                "tmpfs", f"{self.name} cannot have {dict(self.tmpfs)!r:.200} in memory"
            )

    @property
    def name(self) -> str:
        """Derived from the labels, so that a late create is found by it."""
        return self.owner.name(self.role)


_LEAST: Final = {
    "memory_bytes": MIN_MEMORY_BYTES,
    "cpu_millis": MIN_CPU_MILLIS,
    "pids": 1,
    "tmp_bytes": 1,
    "run_bytes": 1,
    "shm_bytes": 1,
    "nofile": 1,
    "uid": 1,
    "gid": 1,
}
"""The engine takes 0 for "no limit", and refuses less memory or CPU than this."""


def container_request(spec: ContainerSpec, hardening: Hardening) -> dict[str, Any]:
    """The body of the create request; every line of the hardening list is here."""
    environment = [f"{name}={value}" for name, value in sorted(spec.environment.items())]
    blanked = dict.fromkeys((*BLANKED_VARIABLES, *spec.blanked))
    environment += [name for name in blanked if name not in spec.environment]
    return {
        "Image": spec.image,
        "Entrypoint": list(spec.argv),
        "Cmd": [],
        "Env": environment,
        "User": f"{spec.uid}:{spec.gid}",
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
        "NetworkDisabled": spec.network is None and not spec.resolves_localhost,
        "HostConfig": _host_config(spec, hardening),
        **_networking(spec),
    }


def _networking(spec: ContainerSpec) -> dict[str, Any]:
    if spec.network is None:
        return {}
    own = endpoint(spec.address, spec.aliases)
    return {"NetworkingConfig": {"EndpointsConfig": {spec.network: own}}}


def endpoint(address: IPv4Address | None, aliases: Iterable[str] = ()) -> dict[str, Any]:
    """How a container is connected to a network (Engine API, EndpointSettings)."""
    chosen = {} if address is None else {"IPAMConfig": {"IPv4Address": str(address)}}
    return {"Aliases": list(aliases), **chosen}


def _host_config(spec: ContainerSpec, hardening: Hardening) -> dict[str, Any]:
    # The engine adds noexec, nosuid and nodev by itself unless their opposites are asked for.
    flags = "exec,nosuid,nodev" if spec.tmp_exec else "noexec,nosuid,nodev"
    private = f"noexec,nosuid,nodev,uid={spec.uid},gid={spec.gid},mode=0700"
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
            {"Name": "core", "Soft": NO_CORE_BYTES, "Hard": NO_CORE_BYTES},
        ],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "ShmSize": spec.shm_bytes,
        "Tmpfs": {
            "/tmp": f"{flags},mode=1777,size={spec.tmp_bytes}",  # noqa: S108 - inside the container
            "/run": f"{private},size={spec.run_bytes}",
            **{path: f"{private},size={size}" for path, size in spec.tmpfs.items()},
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
        "Dns": [str(address) for address in spec.name_servers],
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "PublishAllPorts": False,
        "PortBindings": {},
        "Devices": [],
        "Init": False,
        "OomKillDisable": False,
    }


def image_faults(
    inspected: Mapping[str, Any],
    *,
    ours: Mapping[str, str] = NO_LABELS,
    covered: Collection[str] = (),
) -> tuple[str, ...]:
    """Why an image is refused for use: what it declares that would change a container.

    Its files are not seen here: look for :data:`PRELOAD_FILE` in a container made from it.

    :param ours: the labels that we gave it ourselves.
    :param covered: paths at which the container gets a directory in memory: at a ``VOLUME`` there
        the engine makes no volume of its own, which nothing would bound.
    """
    config = inspected.get("Config") or {}
    faults = []
    if inspected.get("Os", "linux") != "linux":
        faults.append(f"it is for {inspected['Os']}")
    if volumes := sorted({*image_volumes(inspected)} - {*covered}):
        faults.append(f"it declares VOLUME {volumes}")
    if config.get("OnBuild"):
        faults.append("it declares ONBUILD")
    has = config.get("Labels") or {}
    labels = sorted(k for k in has if k.startswith(PREFIX) and has[k] != ours.get(k))
    if labels:
        faults.append(f"it carries the labels {labels}")
    return tuple(faults)


def image_volumes(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths that an image declares as ``VOLUME``."""
    return tuple(sorted((inspected.get("Config") or {}).get("Volumes") or ()))


def coverable(paths: Iterable[str]) -> tuple[str, ...]:
    """Those at which a directory in memory takes nothing away that a program needs."""
    return tuple(path for path in paths if _TARGET.match(path) and not _is_reserved(path))


def image_variables(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the environment variables that an image sets."""
    entries = (inspected.get("Config") or {}).get("Env") or ()
    return tuple(sorted({entry.partition("=")[0] for entry in entries}))
