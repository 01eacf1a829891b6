"""What a bridge builds and judges images with, as the settings name it (B-30 … B-34)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import structlog

from forge_bridge.doctor.image_checks import ImageProver
from forge_bridge.images.from_settings import open_gate_tools
from forge_bridge.images.gates import Gates
from forge_bridge.settings import BridgeSettings
from forge_core.errors import EngineNotFound, ForgeError, RefusedError
from forge_core.image_ports import (
    BuilderFacts,
    BuildRequest,
    ImageBuilder,
    ImageGates,
)
from forge_core.labels import BUILDER, PREFLIGHT, Owner, build_cache
from forge_core.ports import Clock, Disk, Engine
from forge_edges.buildx import BuilderConfig, BuildxBuilder
from forge_edges.clock import SystemClock
from forge_edges.docker_context import DockerEndpoint

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ImageDoors:
    """The doors, and who tries them."""

    builder: ImageBuilder
    gates: ImageGates
    prover: ImageProver


class NoBuilder:
    """Implements :class:`forge_core.image_ports.ImageBuilder` where there is nothing to build with.

    :param why: what stands in the way, and what to do.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    async def facts(self) -> BuilderFacts:
        """:raises RefusedError: code ``builder_unusable``, always."""
        raise RefusedError(self._why, code="builder_unusable")

    async def build(
        self,
        request: BuildRequest,
        context: AsyncIterable[bytes],
        *,
        on_output: Callable[[bytes], None],
    ) -> str:
        """:raises RefusedError: code ``builder_unusable``, always."""
        raise RefusedError(self._why, code="builder_unusable")

    async def prune_cache(self, *, keep_bytes: int, free_bytes: int) -> None:
        """There is none."""


@asynccontextmanager
async def image_doors(
    settings: BridgeSettings,
    engine: Engine,
    endpoint: DockerEndpoint,
    owner: Owner,
    directory: Path,
    *,
    clock: Clock,
    disk: Disk | None = None,
    environ: Mapping[str, str] = os.environ,
) -> AsyncIterator[ImageDoors]:
    """Open for the block; a builder of our own is made when it is first looked at.

    :param owner: ``Owner.of_runner(BUILDER, …)`` of this instance.
    :param directory: where builder and tools may write; nobody else does.
    :param disk: the engine's, where it can be looked at from here.
    :raises RefusedError: code ``configuration``: a key cannot be used.
    """
    scratch = directory / "gate-tools"
    await anyio.to_thread.run_sync(lambda: shutil.rmtree(scratch, ignore_errors=True))
    tools = await open_gate_tools(settings, endpoint, environ, scratch)
    enforced = settings.sandbox_image_policy_enforced
    gates = Gates(
        engine,
        tools,
        enforced=enforced,
        trust_domain_id=owner.trust_domain_id,
        runner_id=owner.runner_id,
        utc=clock.utc,
    )
    prover = ImageProver(tools, enforced=enforced, utc=clock.utc)
    config = builder_config(settings, directory / "builder")
    async with open_builder(engine, endpoint, owner, config, clock, disk, environ) as builder:
        yield ImageDoors(builder, gates, prover)


@asynccontextmanager
async def open_builder(
    engine: Engine,
    endpoint: DockerEndpoint,
    owner: Owner,
    config: BuilderConfig,
    clock: Clock,
    disk: Disk | None,
    environ: Mapping[str, str],
) -> AsyncIterator[ImageBuilder]:
    """The builder; where there is no Docker CLI, one that says so whenever it is needed."""
    async with AsyncExitStack() as stack:
        builder: ImageBuilder
        try:
            builder = await stack.enter_async_context(
                BuildxBuilder.open(
                    engine, endpoint, owner, config, clock=clock, disk=disk, environ=environ
                )
            )
        except RefusedError as error:
            logger.warning("images of projects cannot be built", error=str(error))
            builder = NoBuilder(str(error))
        yield builder


@asynccontextmanager
async def passing_builder(
    settings: BridgeSettings, engine: Engine, endpoint: DockerEndpoint, instance_id: str
) -> AsyncIterator[ImageBuilder]:
    """A builder for one look, where no bridge with a state root runs; nothing of it is left.

    :param instance_id: the runner id too, so that no other one has its cache.
    """
    trust_domain_id = settings.trust_domain_id or PREFLIGHT
    owner = Owner.of_runner(BUILDER, instance_id, instance_id, trust_domain_id)
    cache, _ = build_cache(instance_id, trust_domain_id)
    with tempfile.TemporaryDirectory(prefix="forge-doctor-") as scratch:
        config = builder_config(settings, Path(scratch) / "builder")
        async with open_builder(
            engine, endpoint, owner, config, SystemClock(), None, os.environ
        ) as builder:
            yield builder
        if config.buildkit_image is not None:
            try:
                await engine.remove_volume(cache)
            except EngineNotFound:
                return
            except ForgeError as error:
                logger.warning("cannot remove a build cache", volume=cache, error=str(error))


def builder_config(settings: BridgeSettings, directory: Path) -> BuilderConfig:
    """How builds are run (B-22, B-32, B-33)."""
    return BuilderConfig(
        directory=directory,
        docker_executable=settings.docker_executable,
        limits=settings.build_limits,
        buildkit_image=settings.sandbox_buildkit_image,
        network=settings.sandbox_build_egress_enforced,
        minimum_free_bytes=settings.minimum_workspace_bytes,
    )
