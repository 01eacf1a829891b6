"""Where a build's external images come from: the engine, which has fetched and keeps them.

The engine's own builder finds them there.  The dedicated one has neither a network nor the
engine's store, so they are handed to it as OCI image layouts (image-spec, *Image Layout*), one
folder for each, through the session of the client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import structlog

from forge_core.errors import EngineNotFound, EngineOutOfDisk, RefusedError
from forge_core.ports import Engine
from forge_core.sandbox_spec import require_pinned
from forge_edges.buildx_cli import UNUSABLE, DockerCli
from forge_edges.buildx_outcome import NO_SPACE
from forge_edges.buildx_policy import image_identifiers, layout_identifiers, without_tag

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

    :raises RefusedError: code ``image_build_failed``: it is not pinned, or not to be had.
    :raises EngineOutOfDisk: the engine has no space for it.
    """
    name = without_tag(require_pinned(reference, field_name="the build's sources"))
    try:
        await engine.inspect_image(name)
    except EngineNotFound:
        log.info("fetching a base image", reference=name)
        pulled = await cli.pull(name, timeout_ms=FETCH_MS)
        if pulled.exit_code == 0:
            return
        complaint = pulled.complaint()
        if NO_SPACE in complaint.lower():
            raise EngineOutOfDisk(f"cannot fetch base image {name}: {complaint}") from None
        raise RefusedError(
            f"cannot fetch base image {name}: {complaint}; see that the engine can: "
            f"docker pull {name}",
            code="image_build_failed",
        ) from None


def in_engine(sources: Sequence[str], contexts: Mapping[str, str]) -> Sources:
    """For the engine's own builder: it looks into the engine's store by itself."""
    arguments = [f"--build-context={n}=docker-image://{r}" for n, r in contexts.items()]
    references = (*sources, *contexts.values())
    identifiers = (one for reference in references for one in image_identifiers(reference))
    return Sources(tuple(arguments), tuple(identifiers))


async def as_layouts(
    engine: Engine,
    cli: DockerCli,
    folder: Path,
    sources: Sequence[str],
    contexts: Mapping[str, str],
) -> Sources:
    """For a builder that has nothing: each image as a layout in a subfolder of ``folder``.

    :raises RefusedError: the engine gives no layout, or that of another image.
    """
    arguments: list[str] = []
    identifiers: list[str] = []
    named = {source: without_tag(source) for source in sources} | dict(contexts)
    for number, (name, reference) in enumerate(named.items()):
        layout = folder / str(number)
        digest = await _export(engine, cli, reference, layout)
        arguments.append(f"--build-context={name}=oci-layout://{layout}@{digest}")
        identifiers += layout_identifiers(name, digest)
    return Sources(tuple(arguments), tuple(identifiers))


async def _export(engine: Engine, cli: DockerCli, reference: str, layout: Path) -> str:
    image_id = str((await engine.inspect_image(reference))["Id"])
    await anyio.Path(layout).mkdir(mode=0o700)
    await cli.save(reference, layout, timeout_ms=EXPORT_MS)
    return await anyio.to_thread.run_sync(_manifest_of, layout, image_id, reference)


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
