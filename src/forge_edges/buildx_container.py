"""The dedicated builder: a BuildKit container of our own (B-32, B-33).

Made through the engine's door and not by buildx, which has no option for processes, open files
and labels.  It is privileged, for it makes containers itself; what runs in it is bounded by its
cgroup, in which every build step is, and it has no network unless builds may have one.
What counts is not what was asked for but what is read back: from the engine, and from inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio

from forge_core.errors import EngineConflict, EngineNotFound, EngineTimedOut, RefusedError
from forge_core.image_ports import BuildLimits
from forge_core.labels import BUILDER, Owner, build_cache
from forge_core.ports import Engine
from forge_core.sandbox_spec import CPU_PERIOD_US, NO_CORE_BYTES, require_pinned
from forge_edges.buildx_cli import UNUSABLE, DockerCli
from forge_edges.process import Outcome

ROLE: Final = BUILDER
CACHE: Final = "/var/lib/buildkit"
START_MS: Final = 90_000
ANSWER_MS: Final = 10_000
_MIB: Final = 2**20
_TMPFS: Final = {"/run": f"exec,mode=0755,size={64 * _MIB}", "/tmp": f"exec,size={256 * _MIB}"}  # noqa: S108
_LIMITS_FILE: Final = "/proc/1/limits"
_CGROUP: Final = "/sys/fs/cgroup"
_NOFILE = re.compile(r"Max open files\s+(\d+)\s+(\d+)\s")
_UNLIMITED: Final = "no limit"
_MEMORY: Final = "memory"
_WITH_SWAP: Final = "memory with swap"
_OF_MEMORY: Final = frozenset({_MEMORY, _WITH_SWAP})
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Running:
    """The builder as it runs.

    :param started_at: the engine's word; another one is another life of the container.
    :param image_id: of BuildKit.
    :param shortcomings: what was not found as asked.
    """

    container: str
    started_at: str
    image_id: str
    shortcomings: tuple[str, ...]


class BuilderContainer:
    """Makes, checks and removes it.

    :param image: BuildKit, pinned by digest; never pulled.
    :param network: whether build steps may have a network: the engine's default bridge.
    """

    def __init__(
        self,
        engine: Engine,
        cli: DockerCli,
        owner: Owner,
        *,
        image: str,
        limits: BuildLimits,
        network: bool,
    ) -> None:
        self.name = owner.name(ROLE)
        self._engine = engine
        self._cli = cli
        self._image = require_pinned(image, field_name="FORGE_SANDBOX_BUILDKIT_IMAGE")
        self._limits = limits
        self._request = builder_request(owner, image, limits, network=network)
        self._running: Running | None = None

    async def ensure(self) -> Running:
        """The running builder; a container that has ended is made anew.

        :raises RefusedError: it cannot be made or does not answer; says what to do.
        :raises EngineTimedOut: BuildKit did not come up in time.
        """
        if self._running is None or not await self.is_running():
            await self.remove()
            self._running = await self._make()
        return self._running

    async def is_running(self) -> bool:
        """Whether the container of the last :meth:`ensure` still runs."""
        state = await self._state()
        running = self._running
        return (
            running is not None
            and bool(state.get("Running"))
            and state.get("StartedAt") == running.started_at
        )

    async def remove(self) -> None:
        """Remove the container, and all that runs in it; its cache stays."""
        self._running = None
        try:
            await self._engine.remove_container(self.name)
        except EngineNotFound:
            return

    async def _state(self) -> Mapping[str, Any]:
        try:
            return (await self._engine.inspect_container(self.name)).get("State") or {}
        except EngineNotFound:
            return {}

    async def _make(self) -> Running:
        try:
            image = await self._engine.inspect_image(self._image)
            container = await self._engine.create_container(self.name, self._request)
        except EngineNotFound as error:
            raise RefusedError(
                f"cannot make the builder: {error}; fetch it: docker pull {self._image}",
                code=UNUSABLE,
                field="FORGE_SANDBOX_BUILDKIT_IMAGE",
            ) from None
        except EngineConflict as error:
            raise RefusedError(f"cannot make the builder: {error}", code=UNUSABLE) from None
        await self._engine.start_container(container)
        await self._await_answer()
        inspected = await self._engine.inspect_container(container)
        shortcomings = (
            *differences(self._request["HostConfig"], inspected.get("HostConfig") or {}),
            *(await self._look_inside()),
        )
        started_at = str((inspected.get("State") or {}).get("StartedAt"))
        return Running(container, started_at, str(image["Id"]), shortcomings)

    async def answers(self) -> bool:
        """Whether BuildKit does."""
        try:
            return (await self._ask()).exit_code == 0
        except EngineTimedOut:
            return False

    async def _ask(self, timeout_ms: int = ANSWER_MS) -> Outcome:
        question = ("exec", self.name, "buildctl", "debug", "workers")
        return await self._cli.run(question, timeout_ms=timeout_ms)

    async def _await_answer(self) -> None:
        """Each question takes the client a moment, so that asking again is no busy loop."""
        with anyio.move_on_after(START_MS / 1000):
            while True:
                asked = await self._ask(START_MS)
                if asked.exit_code == 0:
                    return
                if not (await self._state()).get("Running"):
                    raise RefusedError(
                        f"cannot run BuildKit from {self._image}: {asked.complaint()}; try it: "
                        f"docker run --rm --privileged {self._image}",
                        code=UNUSABLE,
                        field="FORGE_SANDBOX_BUILDKIT_IMAGE",
                    )
        raise EngineTimedOut(f"cannot reach BuildKit in {self.name} within {START_MS} ms")

    async def _look_inside(self) -> tuple[str, ...]:
        paths = (_LIMITS_FILE, *(f"{_CGROUP}/{path}" for path in _FILES))
        # "path:line" for each line; what is missing says so on standard error only.
        answer = await self._cli.run(("exec", self.name, "grep", "-H", "", *paths))
        return tuple(inside_faults(answer.stdout.decode("utf-8", "replace"), self._limits))


def builder_request(
    owner: Owner, image: str, limits: BuildLimits, *, network: bool
) -> dict[str, Any]:
    """The body of ``POST /containers/create`` for BuildKit."""
    volume, labels = build_cache(owner.runner_id, owner.trust_domain_id)
    return {
        "Image": image,
        # Steps share the container's network, which is none: there is nobody to be kept from.
        "Entrypoint": ["buildkitd", "--oci-worker-net", "host"],
        "Cmd": [],
        # Its own processes leave the root of its cgroup, where version 2 lets steps be below it.
        "Env": ["BUILDKIT_SETUP_CGROUPV2_ROOT=1"],
        "Labels": owner.labels(ROLE),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "Privileged": True,
            "ReadonlyRootfs": True,
            "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes,
            "CpuPeriod": CPU_PERIOD_US,
            "CpuQuota": limits.cpu_quota_us,
            "PidsLimit": limits.pids,
            "Ulimits": [
                {"Name": "nofile", "Soft": limits.nofile, "Hard": limits.nofile},
                {"Name": "core", "Soft": NO_CORE_BYTES, "Hard": NO_CORE_BYTES},
            ],
            # With the host's, BuildKit would put its steps outside of its own limits.
            "CgroupnsMode": "private",
            "IpcMode": "private",
            "NetworkMode": "bridge" if network else "none",
            "LogConfig": {"Type": "none", "Config": {}},
            "RestartPolicy": {"Name": "no"},
            "Init": True,
            "Tmpfs": dict(_TMPFS),
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": volume,
                    "Target": CACHE,
                    "VolumeOptions": {"NoCopy": True, "Labels": labels},
                }
            ],
        },
    }


def differences(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[str]:
    """What the engine says it made otherwise than asked."""
    for key, value in wanted.items():
        if key in {"Tmpfs", "Mounts", "LogConfig", "RestartPolicy", "Ulimits"}:
            continue
        if got.get(key) != value:
            yield f"{key}: asked for {value!r}, the engine has {got.get(key)!r}"
    if (policy := (got.get("RestartPolicy") or {}).get("Name")) != "no":
        yield f"RestartPolicy: asked for 'no', the engine has {policy!r}"


_FILES: Final = (
    *("memory.max", "memory.swap.max", "cpu.max", "pids.max"),
    *("memory/memory.limit_in_bytes", "memory/memory.memsw.limit_in_bytes"),
    *("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us", "pids/pids.max"),
)
"""The limits of a container's own cgroup: version 2, then version 1 (cgroups(7))."""


def inside_faults(answer: str, limits: BuildLimits) -> Iterator[str]:
    """Which limits do not hold inside, by what the kernel says there.

    :param answer: lines ``path:content`` of :data:`_FILES` and ``/proc/1/limits``.
    """
    found: dict[str, str] = {}
    for line in answer.splitlines():
        path, colon, content = line.partition(":")
        if colon and path.startswith(_CGROUP):
            found[path.removeprefix(f"{_CGROUP}/")] = content.strip()
    nofile = _NOFILE.search(answer)
    quota = found.get("cpu.max")
    if quota is None and "cpu/cpu.cfs_quota_us" in found:
        quota = f"{found['cpu/cpu.cfs_quota_us']} {found.get('cpu/cpu.cfs_period_us')}"
    swap = found.get("memory/memory.memsw.limit_in_bytes")
    if swap is None and (beyond := found.get("memory.swap.max")) is not None:
        swap = str(limits.memory_bytes) if beyond == "0" else beyond
    memory = found.get("memory.max") or found.get("memory/memory.limit_in_bytes")
    pids = found.get("pids.max") or found.get("pids/pids.max")
    for what, wanted, got in (
        (_MEMORY, str(limits.memory_bytes), memory),
        (_WITH_SWAP, str(limits.memory_bytes), swap),
        ("CPU quota and period", f"{limits.cpu_quota_us} {CPU_PERIOD_US}", quota),
        ("processes", str(limits.pids), pids),
        ("open files", str(limits.nofile), nofile and nofile[2]),
    ):
        if got is None or _in_pages(got, what) != _in_pages(wanted, what):
            yield f"{what}: {wanted} was asked for, inside the builder there is {got or _UNLIMITED}"


def _in_pages(value: str, what: str) -> str:
    """The kernel keeps memory limits in whole pages, rounded down."""
    return str(int(value) // _PAGE_BYTES) if what in _OF_MEMORY and value.isdecimal() else value
