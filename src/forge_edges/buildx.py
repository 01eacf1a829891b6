"""Builds images with ``docker buildx``: :class:`forge_core.image_ports.ImageBuilder` (B-32 … B-34).

Two builders, chosen by what is configured: a BuildKit container of our own with limits that are
read back (:mod:`forge_edges.buildx_container`), or the engine's own builder, which nobody can
limit as a whole.  Either way a build has no network unless it is asked for, takes from outside
only what the request lists (:mod:`forge_edges.buildx_policy`), sees nothing of the bridge's
environment and of the operator's credentials, and ends with its client.  See
docs/explanation/builders.md.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import anyio
import structlog

from forge_core.errors import ForgeError, RefusedError
from forge_core.image_ports import BuilderFacts, BuildLimits, BuildRequest, ImageNotBuilt
from forge_core.labels import Owner
from forge_core.ports import Clock, Disk, Engine
from forge_edges.buildx_bases import Layouts, Sources, fetch, in_engine
from forge_edges.buildx_cli import UNUSABLE, DockerCli
from forge_edges.buildx_container import BuilderContainer
from forge_edges.buildx_outcome import Output, failure
from forge_edges.buildx_probe import PROBE, keeps_policies, prepare_buildx
from forge_edges.buildx_run import DiskGuard, build_arguments, context_of, image_of, run_build
from forge_edges.docker_context import DockerEndpoint
from forge_edges.process import ProcessTimedOut, first_failure

ENGINES_OWN: Final = "default"
DEDICATED: Final = "forge"
PRUNE_MS: Final = 10 * 60_000
PROBE_MS: Final = 60_000

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BuilderConfig:
    """What the operator configured for builds.

    :param directory: a folder of the builder's own; wiped at each start.
    :param docker_executable: FORGE_DOCKER_EXECUTABLE.
    :param buildkit_image: FORGE_SANDBOX_BUILDKIT_IMAGE; None: the engine's own builder.
    :param network: whether build steps may have one (FORGE_SANDBOX_BUILD_EGRESS_ENFORCED).
    :param minimum_free_bytes: a build that leaves less on the engine's disk is ended.
    """

    directory: Path
    docker_executable: str
    limits: BuildLimits
    buildkit_image: str | None = None
    network: bool = False
    minimum_free_bytes: int = 0


class BuildxBuilder:
    """Keeps :class:`forge_core.image_ports.ImageBuilder`; made by :meth:`open`."""

    def __init__(
        self,
        engine: Engine,
        cli: DockerCli,
        config: BuilderConfig,
        container: BuilderContainer | None,
        guard: DiskGuard | None,
    ) -> None:
        self._engine = engine
        self._cli = cli
        self._config = config
        self._container = container
        self._guard = guard
        self._layouts = Layouts(engine, cli)
        self._one_at_a_time = anyio.Lock()
        self._numbers = itertools.count(1)
        self._builds = 0
        self._keeps_policies: dict[str, bool] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        engine: Engine,
        endpoint: DockerEndpoint,
        owner: Owner,
        config: BuilderConfig,
        *,
        clock: Clock,
        disk: Disk | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> AsyncIterator[Self]:
        """A builder for the block; its container and its folder go with it, its cache stays.

        :param endpoint: of the same engine as ``engine``.
        :param owner: ``Owner.of_runner(BUILDER, …)`` of this instance.
        :param disk: the engine's, where it can be looked at from here.
        :raises RefusedError: there is no Docker CLI, or the folder cannot be made.
        """
        cli = DockerCli(config.docker_executable, endpoint, config.directory, environ)
        guard = None if disk is None else DiskGuard(disk, clock, config.minimum_free_bytes)
        container = None
        if config.buildkit_image is not None:
            container = BuilderContainer(
                engine,
                cli,
                owner,
                image=config.buildkit_image,
                limits=config.limits,
                network=config.network,
            )
        await cli.prepare()
        try:
            yield cls(engine, cli, config, container, guard)
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    if container is not None:
                        await container.remove()
                except ForgeError as error:
                    log.warning("cannot remove the builder; a later pass will", error=str(error))
                finally:
                    await cli.remove()

    async def facts(self) -> BuilderFacts:
        """The builder that would build; what it says was read back from what runs.

        :raises RefusedError: code ``builder_unusable``: it cannot be had; says what to do.
        :raises EngineUnreachable: the engine is not there.
        """
        async with self._one_at_a_time:
            if self._container is None:
                identity = f"engine:{(await self._engine.facts()).version}"
                shortcomings = [self._without_container()]
            else:
                running = await self._container.ensure()
                identity = f"buildkit:{running.image_id}"
                shortcomings = [*running.shortcomings]
            limits_hold = not shortcomings
            if identity not in self._keeps_policies:
                self._keeps_policies[identity] = await self._try()
            if not self._keeps_policies[identity]:
                shortcomings.append(
                    "it ignores source policies, so that a build could fetch what it likes, and "
                    "nothing is built with it; Docker Engine 24 and buildx 0.10 keep them"
                )
            dedicated = self._container is not None
            return BuilderFacts(identity, dedicated, limits_hold, tuple(shortcomings))

    async def build(
        self,
        request: BuildRequest,
        context: AsyncIterable[bytes],
        *,
        on_output: Callable[[bytes], None],
    ) -> str:
        """Build, and return the id of the image that the engine has under ``request.tag``.

        :raises ImageNotBuilt: a step failed or took too long, a source is not to be had, or this
            builder does not refuse what is not listed.
        :raises EngineOutOfDisk: the engine has no space, or less than must remain.
        :raises EngineUnreachable: the engine went away.
        """
        what = f"build image {request.tag}"
        facts = await self.facts()
        if not self._keeps_policies[facts.identity]:
            why = f"the builder cannot be used: {facts.shortcomings[-1]}"
            raise ImageNotBuilt(f"cannot {what}: {why}", reason=why)
        output = Output(on_output)
        async with self._under_way() as folder:
            async with self._leaving_space(what):
                for source in request.sources:
                    await fetch(self._engine, self._cli, source)
                sources = await self._sources(request)
            async with self._ended_for_certain(), self._leaving_space(what):
                exit_code = await self._run(request, sources, context, folder, output)
            if exit_code != 0:
                raise await self._failure(what, output, exit_code)
            return await image_of(self._engine, request, folder, what)

    async def prune_cache(self, *, keep_bytes: int, free_bytes: int) -> None:
        """Give back cache of the dedicated builder; the engine's own is the engine's affair.

        :raises RefusedError: code ``builder_unusable``: buildx would not.
        """
        if self._container is None:
            return
        await self.facts()
        if self._builds == 0:
            await self._layouts.clear()
        bounds = [f"--keep-storage={keep_bytes}"]
        about = await self._cli.run(("buildx", "prune", "--help"))
        if b"--reserved-space" in about.stdout:  # buildx 0.17 and later
            bounds = [f"--reserved-space={keep_bytes}", f"--min-free-space={free_bytes}"]
        arguments = ("buildx", "prune", f"--builder={DEDICATED}", "--all", "--force", *bounds)
        pruned = await self._cli.run(arguments, timeout_ms=PRUNE_MS)
        if pruned.exit_code != 0:
            raise RefusedError(f"cannot prune the build cache: {pruned.complaint()}", code=UNUSABLE)

    async def _try(self) -> bool:
        """Whether this builder keeps source policies."""
        container = self._container.name if self._container is not None else None
        await prepare_buildx(self._cli, builder=DEDICATED, container=container)
        said: list[bytes] = []
        request = BuildRequest("forge-probe:1", "Dockerfile", (), {}, PROBE_MS)
        context = context_of("Dockerfile", PROBE)
        async with self._folder() as folder:
            await self._run(request, Sources((), ()), context, folder, said.append)
        return keeps_policies(b"".join(said).decode("utf-8", "replace"))

    async def _run(
        self,
        request: BuildRequest,
        sources: Sources,
        context: AsyncIterable[bytes],
        folder: Path,
        on_output: Callable[[bytes], None],
    ) -> int:
        dedicated = self._container is not None
        arguments = build_arguments(
            request,
            folder,
            builder=DEDICATED if dedicated else ENGINES_OWN,
            process_limits=None if dedicated else self._config.limits,
        )
        try:
            return await run_build(
                self._cli,
                arguments,
                sources,
                context,
                folder=folder,
                timeout_ms=request.timeout_ms,
                on_output=on_output,
            )
        except ProcessTimedOut:
            why = f"it took longer than {request.timeout_ms} ms and was ended"
            raise ImageNotBuilt(f"cannot build image {request.tag}: {why}", reason=why) from None

    @asynccontextmanager
    async def _leaving_space(self, what: str) -> AsyncIterator[None]:
        """What is done in the block ends where it would fill the engine's disk."""
        with first_failure():
            async with anyio.create_task_group() as group:
                if self._guard is not None:
                    group.start_soon(self._guard.watch, what)
                yield
                group.cancel_scope.cancel()

    @asynccontextmanager
    async def _ended_for_certain(self) -> AsyncIterator[None]:
        """See that nothing of a build goes on whose client was ended.

        BuildKit ends such a step by itself, but not when the step has taken every process that
        BuildKit's container may have.  Then the container goes, which a build of its own does
        not mind, and one beside it could not go on either.
        """
        try:
            yield
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._drop_container()
            raise

    async def _drop_container(self) -> None:
        if self._container is None:
            return
        async with self._one_at_a_time:
            try:
                if self._builds == 1 or not await self._container.answers():
                    await self._container.remove()
            except ForgeError as error:
                # What ended the build is the news; the next build removes it before anything else.
                log.warning("cannot remove the builder of an ended build", error=str(error))

    async def _sources(self, request: BuildRequest) -> Sources:
        if self._container is None:
            return in_engine(request.sources)
        return await self._layouts.sources(request.sources)

    async def _failure(self, what: str, output: Output, exit_code: int) -> ForgeError:
        if self._container is not None and not await self._container.is_running():
            why = "the builder ended while it built; it ran out of memory or processes"
            return ImageNotBuilt(f"cannot {what}: {why} ({output.verdict()[:300]})", reason=why)
        return failure(what, output.verdict(), exit_code)

    @asynccontextmanager
    async def _under_way(self) -> AsyncIterator[Path]:
        self._builds += 1
        try:
            async with self._folder() as folder:
                yield folder
        finally:
            self._builds -= 1

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        folder = self._cli.directory / f"build-{next(self._numbers)}"
        await anyio.Path(folder).mkdir(mode=0o700)
        try:
            yield folder
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, True))

    def _without_container(self) -> str:
        limits = self._config.limits
        return (
            "builds run in the engine itself: each process is bounded "
            f"({limits.memory_bytes} bytes of memory, {limits.nofile} open files), but nothing "
            "bounds the memory, CPU and processes of a build as a whole; set "
            "FORGE_SANDBOX_BUILDKIT_IMAGE"
        )
