"""One hardened container that looks at itself: the only evidence that counts (sandbox.md).

The probe is made exactly as an agent's container is, from the same image, and everything it
makes is removed again, whatever happens.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import resources
from typing import Annotated, Final

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from forge_bridge.containers import create_as_asked
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_core.errors import (
    EngineNotFound,
    EngineRefused,
    EngineTimedOut,
    RefusedError,
)
from forge_core.ports import Attachment, Engine
from forge_core.sandbox_spec import (
    PRELOAD_FILE,
    ContainerSpec,
    VolumeMount,
    container_request,
)

ROLE: Final = "helper"
QUOTA_MOUNT: Final = "/quota"
QUOTA_BYTES: Final = 16 * 2**20
PROBE_MEMORY_BYTES: Final = 64 * 2**20
PROBE_CPU_MILLIS: Final = 500
PROBE_PIDS: Final = 32
PROBE_TIMEOUT_S: Final = 60.0
CLEANUP_TIMEOUT_S: Final = 30.0
MAX_ANSWER_BYTES: Final = 256 * 1024

Word = Annotated[str, Field(max_length=4096)]


class Inside(BaseModel):
    """What the probe saw (``inside.py``); a claim of a container, so every part is bounded."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, extra="ignore", hide_input_in_errors=True
    )

    status: dict[str, Word]
    pid: int
    uid: int
    uid_map: Annotated[tuple[tuple[int, int, int], ...], Field(max_length=340)]
    gid: int
    groups: Annotated[tuple[int, ...], Field(max_length=64)]
    lsm: Word
    mounts: Annotated[tuple[tuple[Word, Word, Word], ...], Field(max_length=512)]
    devices: Annotated[tuple[Word, ...], Field(max_length=512)]
    interfaces: Annotated[tuple[Word, ...], Field(max_length=64)]
    resolves_localhost: bool
    root_write_error: Word | None
    tmp_exec_error: Word | None
    user_namespace_error: Word | None
    limits: dict[str, Word]
    throttled: bool
    processes_until_refused: int | None
    memory_is_killed: bool
    nofile: int
    core_pattern: Word | None
    core: int
    volume_bytes: int | None
    python: tuple[int, int, int]
    git: Word


def probe_spec(settings: PreflightSettings, quota_volume: str | None) -> ContainerSpec:
    """The probe's container: the agent's hardening with small limits that can be pushed against."""
    assert settings.tooling_image is not None
    source = resources.files(__package__).joinpath("inside.py").read_text("utf-8")
    arguments = (str(PROBE_MEMORY_BYTES), str(PROBE_PIDS), QUOTA_MOUNT)
    mounts = () if quota_volume is None else (VolumeMount(quota_volume, QUOTA_MOUNT, True),)
    return ContainerSpec(
        owner=settings.owner,
        role=ROLE,
        image=settings.tooling_image,
        argv=("/usr/bin/python3", "-I", "-S", "-c", source, *arguments),
        memory_bytes=PROBE_MEMORY_BYTES,
        cpu_millis=PROBE_CPU_MILLIS,
        pids=PROBE_PIDS,
        mounts=mounts,
    )


async def look_inside(engine: Engine, settings: PreflightSettings) -> Inside:
    """Run the probe and read what it saw.

    :raises RefusedError: code ``image_refused``: the image must not be used;
        code ``engine_refused``: the engine did not do what it was asked, or cannot run it.
    :raises RetryableError: the engine went away or was too slow.
    """
    volume = await _quota_volume(engine, settings)
    spec = probe_spec(settings, volume)
    try:
        with anyio.move_on_after(PROBE_TIMEOUT_S):
            return await _run(engine, spec, settings)
        raise EngineTimedOut(f"cannot finish the probe container in {PROBE_TIMEOUT_S:.0f} s")
    finally:
        with anyio.move_on_after(CLEANUP_TIMEOUT_S, shield=True):
            await _remove(engine, spec.name, volume)


async def _run(engine: Engine, spec: ContainerSpec, settings: PreflightSettings) -> Inside:
    request = container_request(spec, settings.hardening)
    container = await create_as_asked(engine, spec.name, request)
    if await engine.path_kind(container, PRELOAD_FILE):
        raise RefusedError(
            f"cannot use image {spec.image}: it has {PRELOAD_FILE}", code="image_refused"
        )
    async with engine.attach(container) as streams:
        await engine.start_container(container)
        answer, complaint = await _read(streams)
    status = await engine.wait_container(container, timeout_ms=10_000)
    try:
        return Inside.model_validate_json(answer)
    except ValidationError as error:
        said = " ".join(complaint.decode(errors="replace").split())[-500:]
        raise EngineRefused(
            f"cannot read what the probe container saw (exit {status.exit_code}): "
            f"{said or error.errors()[0]['msg']}"
        ) from None


async def _read(streams: Attachment) -> tuple[bytes, bytes]:
    answer, complaint = bytearray(), bytearray()
    while (piece := await streams.receive()) is not None:
        channel, data = piece
        kept = answer if channel == 1 else complaint
        kept += data[: MAX_ANSWER_BYTES - len(kept)]
    return bytes(answer), bytes(complaint)


async def _quota_volume(engine: Engine, settings: PreflightSettings) -> str | None:
    """A volume with a quota, where the engine's storage can keep one."""
    labels = settings.owner.labels(ROLE)
    try:
        return await engine.create_volume(settings.owner.name(ROLE), labels, size_bytes=QUOTA_BYTES)
    except EngineRefused:
        return None


async def _remove(engine: Engine, container: str, volume: str | None) -> None:
    with suppress(EngineNotFound):
        await engine.remove_container(container)
    if volume is not None:
        with suppress(EngineNotFound):
            await engine.remove_volume(volume)
