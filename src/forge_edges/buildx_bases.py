"""Where a build's external images come from: the engine, which has fetched and keeps them.

The engine's own builder finds them there.  The dedicated one has neither a network nor the
engine's store, so they are handed to it as OCI image layouts (image-spec, *Image Layout*), one
folder for each, through the session of the client.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import structlog

from forge_core.errors import EngineNotFound, EngineOutOfDisk, RefusedError
from forge_core.image_ports import ImageNotBuilt
from forge_core.ports import Engine
from forge_core.sandbox_spec import require_pinned, without_tag
from forge_edges.buildx_cli import UNUSABLE, DockerCli
from forge_edges.buildx_outcome import NO_SPACE
from forge_edges.buildx_policy import image_identifiers, layout_identifiers

FETCH_MS: Final = 10 * 60_000
EXPORT_MS: Final = 5 * 60_000
_MAX_JSON_BYTES: Final = 1 << 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """What a build may take from outside, in the words of its builder.

    :param arguments: ``--build-context`` options.
    :param identifiers: what the source policy allows.
    """

    arguments: tuple[str, ...]
    identifiers: tuple[str, ...]


async def fetch(engine: Engine, cli: DockerCli, reference: str) -> None:
    """Have a pinned image in the engine: fetched once, with the operator's credentials.

    :raises RefusedError: it is not pinned.
    :raises ImageNotBuilt: it is not to be had.
    :raises EngineOutOfDisk: the engine has no space for it.
    """
    name = require_pinned(without_tag(reference), field_name="the build's sources")
    try:
        await engine.inspect_image(name)
    except EngineNotFound:
        log.info("fetching a base image", reference=name)
        pulled = await cli.pull(name, timeout_ms=FETCH_MS)
        if pulled.exit_code == 0:
            return
        complaint = pulled.complaint()
        if NO_SPACE in complaint.lower():
            raise EngineOutOfDisk(f"cannot fetch base image {name}: {NO_SPACE}") from None
        raise ImageNotBuilt(
            f"cannot fetch base image {name}: {complaint}; see that the engine can: "
            f"docker pull {name}",
            reason=f"the base image {name} cannot be fetched",
        ) from None


def in_engine(sources: Sequence[str]) -> Sources:
    """For the engine's own builder: it looks into the engine's store by itself."""
    return Sources((), tuple(one for source in sources for one in image_identifiers(source)))


class Layouts:
    """Images of the engine as layouts, for a builder that has nothing.

    Each is exported once and kept, for every build with it reads its manifest again.
    """

    def __init__(self, engine: Engine, cli: DockerCli) -> None:
        self._engine = engine
        self._cli = cli
        self._folder = cli.directory / "layouts"
        self._one_at_a_time = anyio.Lock()

    async def sources(self, sources: Sequence[str]) -> Sources:
        """All that a build may take.

        :raises RefusedError: the engine gives no layout, or that of another image.
        """
        arguments: list[str] = []
        identifiers: list[str] = []
        for source in dict.fromkeys(sources):
            layout, digest = await self._layout(without_tag(source))
            arguments.append(f"--build-context={source}=oci-layout://{layout}@{digest}")
            identifiers += layout_identifiers(source, digest)
        return Sources(tuple(arguments), tuple(identifiers))

    async def clear(self) -> None:
        """Give their space back; no build may be under way."""
        async with self._one_at_a_time:
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._folder, True))

    async def _layout(self, reference: str) -> tuple[Path, str]:
        async with self._one_at_a_time:
            image_id = str((await self._engine.inspect_image(reference))["Id"])
            layout = self._folder / image_id.removeprefix("sha256:")
            if not await anyio.Path(layout).exists():
                partial = layout.with_suffix(".partial")
                await anyio.to_thread.run_sync(_make_empty, partial)
                await self._cli.save(reference, partial, timeout_ms=EXPORT_MS)
                await anyio.Path(partial).rename(layout)
            digest = await anyio.to_thread.run_sync(_manifest_of, layout, image_id, reference)
            return layout, digest


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)


def _manifest_of(layout: Path, image_id: str, reference: str) -> str:
    """The digest of the layout's one manifest, which must be that of the image itself."""
    try:
        manifests = _read(layout / "index.json")["manifests"]
        digests = [str(manifest["digest"]) for manifest in manifests]
        if len(digests) == 1:
            blob = layout / "blobs" / "sha256" / digests[0].removeprefix("sha256:")
            if image_id in {digests[0], _read(blob)["config"]["digest"]}:
                return digests[0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"cannot hand image {reference} to the builder: the engine's export is no OCI image "
            f"layout ({error}); that needs Docker Engine 25 or later",
            code=UNUSABLE,
        ) from None
    raise RefusedError(
        f"cannot hand image {reference} to the builder: the engine exports {len(digests)} images "
        f"and none of them is {image_id}",
        code=UNUSABLE,
    )


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"{path.name} is larger than {_MAX_JSON_BYTES} bytes")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} is no object")
    return value
