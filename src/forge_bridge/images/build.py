"""One build, from its recipe to a promoted image, or a reason and a log (B-30, B-31, B-90).

::

    signatures → project → contents → sbom → vulnerabilities → provenance → promotion

Until the last step the image is a candidate that nothing uses; whatever ends the build before
that takes it away again.  The evidence is durable before the record, the record makes the image
usable, and the next start removes every image that has none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from forge_bridge.images.leftovers import Leftovers
from forge_bridge.images.recipe import Recipe
from forge_bridge.images.records import ImageRecords
from forge_bridge.sandbox.stage import StageContext, StageFailed, failure_of
from forge_core.build_output import BuildOutput, KeptOutput
from forge_core.contract import CONTRACT_PATH, DOCKERFILE_PATH
from forge_core.errors import ForgeError, RefusedError
from forge_core.image_names import ImageIdentity
from forge_core.image_ports import (
    BuildRequest,
    BuiltImage,
    Evidence,
    GateRefused,
    ImageBuilder,
    ImageGates,
    ImageNotBuilt,
)
from forge_core.image_retention import CachedImage
from forge_core.ports import Engine
from forge_core.sandbox_spec import (
    MIN_CPU_MILLIS,
    MIN_MEMORY_BYTES,
    PRELOAD_FILE,
    TOOLING_MOUNT,
    WORKSPACE_VOLUME,
    ContainerSpec,
    image_faults,
)
from forge_core.wire.codes import EventType, FailureCode
from forge_core.wire.events import EMPTY, BuildFailed

SIGNATURES: Final = "signatures"
PROJECT: Final = "project"
CONTENTS: Final = "contents"
GATES: Final = "gates"
PROMOTION: Final = "promotion"

CHECK_ROLE: Final = "image-check"
TOOLING_PARENT: Final = TOOLING_MOUNT.rpartition("/")[0]
MOUNT_POINTS: Final = (TOOLING_PARENT, WORKSPACE_VOLUME, "/tmp", "/run")  # noqa: S108 - inside
"""Where a link in the image would lead what is mounted there to another place."""

BUILD_MS: Final = 2 * 3_600_000
"""A build that nobody ends; leases end it sooner as a rule."""

UNDO_S: Final = 30.0

_UNUSABLE_BUILDER: Final = "builder_unusable"


class ImageFailed(StageFailed):
    """A stage of a build said no; the runner has a log of it.

    :ivar told: what the hub is told of that log, which is never what it says.
    """

    def __init__(self, code: FailureCode, detail: str, told: BuildFailed) -> None:
        super().__init__(code, detail)
        self.told = told


@dataclass(slots=True)
class Build:
    """A build under way; used once.

    :param slots: how many builds run at once (B-22).
    """

    context: StageContext
    recipe: Recipe
    identity: ImageIdentity
    parameters: Mapping[str, object]
    builder: ImageBuilder
    gates: ImageGates
    records: ImageRecords
    slots: anyio.CapacityLimiter
    network: bool
    _stage: str = SIGNATURES
    _output: BuildOutput = field(init=False)
    _leftovers: Leftovers = field(init=False)
    _candidate: str = field(init=False)

    def __post_init__(self) -> None:
        self._output = BuildOutput(self.context.run.masker)
        self._leftovers = Leftovers(self.context.engine, self.identity)
        self._candidate = self.identity.candidate(self.context.runner.clock.new_id())

    async def run(self) -> CachedImage:
        """Build, prove, promote.

        :raises ImageFailed: it was not promoted, and why.
        """
        try:
            with self.records.in_work(self.identity.image_key):
                return await self._run()
        except ForgeError as error:
            raise await self._failed(error) from error
        finally:
            # Also when this attempt is cancelled: a candidate is nobody's image.
            with anyio.move_on_after(UNDO_S, shield=True):
                await self._leftovers.take_away()

    async def _run(self) -> CachedImage:
        tooling = self.context.settings.tooling_image
        await self.gates.before_build((*self.recipe.sources, tooling))
        self._stage = PROJECT
        image = await self._build()
        self._stage = CONTENTS
        await self._examine(image.image_id)
        self._stage = GATES
        evidence = await self.gates.after_build(image)
        self._stage = PROMOTION
        await self._require_unmoved(image.image_id)
        return await self._promote(image.image_id, evidence)

    async def _build(self) -> BuiltImage:
        context, recipe, identity = self.context, self.recipe, self.identity
        request = BuildRequest(
            tag=self._candidate,
            dockerfile=DOCKERFILE_PATH,
            sources=recipe.sources,
            labels=identity.labels,
            timeout_ms=BUILD_MS,
            network=self.network,
        )
        async with self.slots:
            await context.tell(EventType.BUILD_STARTED, EMPTY)
            started_at = context.runner.clock.utc()
            self._leftovers.names.append(self._candidate)
            async with aclosing(recipe.open_context()) as files:
                image_id = await self.builder.build(request, files, on_output=self._output.feed)
            self._leftovers.built = image_id
            finished_at = context.runner.clock.utc()
            await context.tell(EventType.BUILD_FINISHED, EMPTY)
        return BuiltImage(
            image_id=image_id,
            reference=self._candidate,
            image_key=identity.image_key,
            project_id=identity.project_id,
            repository=recipe.approved.repository,
            commit=recipe.approved.commit,
            materials=recipe.sources,
            parameters={
                **self.parameters,
                "contract": CONTRACT_PATH,
                "dockerfile": DOCKERFILE_PATH,
                "contextDigest": recipe.context_id,
            },
            started_at=started_at,
            finished_at=finished_at,
        )

    async def _examine(self, image_id: str) -> None:
        """What the image declares, and what it has that would come between PID 1 and its files."""
        inspected = await self._require_unmoved(image_id)
        faults = [*image_faults(inspected, ours=self.identity.labels)]
        if not faults:
            container = await self.context.create_container(self._check_spec(image_id))
            try:
                faults = [f async for f in _faults_in(self.context.engine, container)]
            finally:
                # A candidate cannot go while a container is made of it.
                with anyio.move_on_after(UNDO_S, shield=True):
                    await self.context.remove_container(container)
        if faults:
            raise _denied(f"cannot use the image of the project: {'; '.join(faults)}")

    def _check_spec(self, image_id: str) -> ContainerSpec:
        """A container that is looked into and never started."""
        return ContainerSpec(
            owner=self.context.run.state.owner,
            role=CHECK_ROLE,
            image=image_id,
            argv=("/never",),
            memory_bytes=MIN_MEMORY_BYTES,
            cpu_millis=MIN_CPU_MILLIS,
            pids=1,
            resolves_localhost=False,
        )

    async def _require_unmoved(self, image_id: str) -> Mapping[str, Any]:
        inspected = await self.context.engine.inspect_image(self._candidate)
        if inspected.get("Id") != image_id:
            raise _denied(
                f"cannot use the image of the project: {self._candidate} names "
                f"{inspected.get('Id')} now, and {image_id} was built"
            )
        return inspected

    async def _promote(self, image_id: str, evidence: Sequence[Evidence]) -> CachedImage:
        identity, now_ms = self.identity, self.context.runner.clock.unix_seconds() * 1000
        await self.records.attestations.put_set(identity.image_key, evidence)
        former = self.records.index.images.get(identity.image_key)
        if former is not None:
            await self._leftovers.supersede(former.image_id)
        # One whose record could not be written, and whose name could not be taken away.
        await self._leftovers.supersede(identity.promoted)
        await self.context.engine.tag_image(image_id, identity.promoted)
        self._leftovers.names.append(identity.promoted)
        image = CachedImage(identity.image_key, image_id, identity.project_id, now_ms, now_ms)
        await self.records.index.put(image)
        self._leftovers.names.remove(identity.promoted)
        await self.records.prune(now_ms)
        return image

    async def _failed(self, error: ForgeError) -> ImageFailed:
        """Keep a log of it, and say where it is."""
        key, stage = self.identity.image_key, self._stage
        if isinstance(error, GateRefused):
            stage = error.field or stage
        log = self._output.end(str(error))
        await self._keep(key, stage, log, error)
        told = BuildFailed(
            stage=stage,
            log_digest=log.digest,
            log_bytes=len(log.content),
            truncated=log.truncated,
        )
        code, detail = failure_of(error)
        if isinstance(error, ImageNotBuilt):
            detail = f"cannot build the image of the project: {error.reason}"
        elif isinstance(error, RefusedError) and error.code == _UNUSABLE_BUILDER:
            code = FailureCode.IMAGE_BUILD_FAILED
        where = f"the runner keeps the log in build-logs/{key}/{stage}.log"
        return ImageFailed(code, f"{detail}; {where}", told)

    async def _keep(self, key: str, stage: str, log: KeptOutput, error: ForgeError) -> None:
        try:
            await self.records.build_logs.put(key, Evidence(f"{stage}.log", log.content))
            if isinstance(error, GateRefused) and error.evidence:
                await self.records.keep_refused(key, error.evidence)
        except ForgeError as unkept:
            # Why the build failed is what counts.
            self.context.run.log.error("cannot keep the log of a build", error=str(unkept))
        await self.records.prune(self.context.runner.clock.unix_seconds() * 1000)


async def _faults_in(engine: Engine, container: str) -> AsyncIterator[str]:
    """What would come between PID 1 and its files."""
    if await engine.path_kind(container, PRELOAD_FILE) is not None:
        yield f"it has {PRELOAD_FILE}"
    kinds = {path: await engine.path_kind(container, path) for path in MOUNT_POINTS}
    for path, kind in kinds.items():
        if kind not in (None, "directory"):
            yield f"its {path} is no directory, and a sandbox mounts its own there"
    if (
        kinds[TOOLING_PARENT] == "directory"
        and await engine.path_kind(container, TOOLING_MOUNT) is not None
    ):
        yield f"it has {TOOLING_MOUNT}"


def _denied(why: str) -> RefusedError:
    return RefusedError(why, code=FailureCode.IMAGE_POLICY_DENIED)
