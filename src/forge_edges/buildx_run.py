"""One run of ``docker buildx build``: its arguments, its bounds and its result."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from forge_core.errors import EngineNotFound, EngineOutOfDisk
from forge_core.image_ports import BuildLimits, BuildRequest, ImageNotBuilt
from forge_core.ports import Clock, Disk, Engine
from forge_core.sandbox_spec import NO_CORE_BYTES
from forge_edges.buildx_bases import Sources
from forge_edges.buildx_cli import DockerCli
from forge_edges.buildx_policy import source_policy

LOOK_MS: Final = 500
"""How often a build looks at the disk that it fills."""

_POLICY: Final = "policy.json"
_METADATA: Final = "metadata.json"
_IMAGE_ID: Final = "image-id"
_MAX_METADATA_BYTES: Final = 1 << 20


def build_arguments(
    request: BuildRequest, folder: Path, *, builder: str, process_limits: BuildLimits | None
) -> list[str]:
    """Everything but the sources and the context, which is a tar on standard input.

    :param process_limits: bounds of each single process, for a builder that has no other.
    """
    arguments = [
        *("buildx", "build", f"--builder={builder}", "--load", "--progress=plain"),
        *("--provenance=false", "--sbom=false", f"--file={request.dockerfile}"),
        f"--network={'default' if request.network else 'none'}",
        f"--tag={request.tag}",
        # Cache mounts are writable: one build must not find what another has left there.
        f"--build-arg=BUILDKIT_CACHE_MOUNT_NS={request.tag}",
        f"--metadata-file={folder / _METADATA}",
        f"--iidfile={folder / _IMAGE_ID}",
        *(f"--label={name}={value}" for name, value in sorted(request.labels.items())),
    ]
    if process_limits is not None:
        ulimits = {
            "nofile": process_limits.nofile,
            "data": process_limits.memory_bytes,
            "core": NO_CORE_BYTES,
        }
        arguments += [f"--ulimit={name}={value}:{value}" for name, value in ulimits.items()]
    return arguments


async def run_build(
    cli: DockerCli,
    arguments: Sequence[str],
    sources: Sources,
    context: AsyncIterable[bytes],
    *,
    folder: Path,
    timeout_ms: int,
    on_output: Callable[[bytes], None],
) -> int:
    """Run it to its end: its status.

    :raises ProcessTimedOut: it took too long.
    """
    policy = folder / _POLICY
    await anyio.Path(policy).write_text(json.dumps(source_policy(sources.identifiers)))
    return await cli.build(
        [*arguments, *sources.arguments, "-"],
        context,
        environment={"EXPERIMENTAL_BUILDKIT_SOURCE_POLICY": str(policy)},
        timeout_ms=timeout_ms,
        on_output=on_output,
    )


@dataclass(frozen=True, slots=True)
class DiskGuard:
    """Ends what would fill the engine's disk, for every container on it shares that disk.

    :param minimum_free_bytes: what must remain (FORGE_MINIMUM_WORKSPACE_BYTES).
    """

    disk: Disk
    clock: Clock
    minimum_free_bytes: int

    async def watch(self, what: str) -> None:
        """Return never; look now and then for as long as the caller lets it.

        :raises EngineOutOfDisk: less is free than must remain.
        """
        while True:
            free_bytes = (await self.disk.usage()).free_bytes
            if free_bytes < self.minimum_free_bytes:
                raise EngineOutOfDisk(
                    f"cannot {what}: it leaves {free_bytes} bytes of the engine's disk free, and "
                    f"{self.minimum_free_bytes} must remain; make room, or lower "
                    "FORGE_MINIMUM_WORKSPACE_BYTES"
                )
            await self.clock.sleep_until_ms(self.clock.now_ms() + LOOK_MS)


async def image_of(engine: Engine, request: BuildRequest, folder: Path, what: str) -> str:
    """The id of the image that was built: the client and the engine must say the same.

    :raises ImageNotBuilt: they do not, or the labels are others.
    """
    metadata = await anyio.to_thread.run_sync(_read_metadata, folder / _METADATA)
    claimed = {metadata.get(f"containerimage.{key}") for key in ("config.digest", "digest")}
    try:
        image = await engine.inspect_image(request.tag)
    except EngineNotFound:
        image = {}
    if image.get("Id") not in claimed - {None}:
        raise ImageNotBuilt(
            f"cannot {what}: buildx says that it made {metadata}, and the engine has "
            f"{image.get('Id')} under that tag",
            reason="the engine has another image than the one that was built",
        )
    labels = (image.get("Config") or {}).get("Labels") or {}
    if not request.labels.items() <= labels.items():
        raise ImageNotBuilt(
            f"cannot {what}: its labels are {labels}", reason="it does not carry our labels"
        )
    return str(image["Id"])


def _read_metadata(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_MAX_METADATA_BYTES))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


async def context_of(name: str, content: bytes) -> AsyncGenerator[bytes]:
    """A context of one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    yield buffer.getvalue()
