"""Projects with images of their own: what their commits have, who builds, and who judges.

The builder is a daemon beside the engine: a build belongs to the life that asked for it, may be
slow, fail, lose its answer, and, once nobody waits for it any more, end all the same.  The gates
are the real ones; their tools know one verdict for each image.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_bridge.images.gates import GateTools
from forge_core.contract import CONTRACT_PATH, DOCKERFILE_PATH
from forge_core.errors import EngineUnreachable, RefusedError
from forge_core.image_names import IMAGE_KEY
from forge_core.image_ports import BuilderFacts, BuildRequest, ImageNotBuilt
from forge_core.ports import EngineImage

from .engine import PROCESS, SimulatedEngine
from .engine_door import Before
from .faults import Faults
from .world import World

BASE: Final = "base@sha256:" + "5" * 64
BUILT: Final = "b" * 40
"""A commit whose image takes nothing from the repository."""

COPIED: Final = "d" * 40
"""Its image does."""

REFERRED: Final = "e" * 40
"""Its image is that of somebody else."""

UNBUILT: Final = "9" * 40
"""Its contract asks for no image."""

_OWN: Final = b"version: 1\nimage:\n  dockerfile: .forge/Dockerfile\n"
PROJECTS: Final[Mapping[str, Mapping[str, bytes]]] = {
    BUILT: {CONTRACT_PATH: _OWN, DOCKERFILE_PATH: f"FROM {BASE}\nRUN make\n".encode()},
    COPIED: {CONTRACT_PATH: _OWN, DOCKERFILE_PATH: f"FROM {BASE}\nCOPY . /there\n".encode()},
    REFERRED: {CONTRACT_PATH: f"version: 1\nimage:\n  reference: {BASE}\n".encode()},
    UNBUILT: {CONTRACT_PATH: b"version: 1\n"},
}
"""Every approved commit, and what it has."""

BUILDS_S: Final = ((0.2, 1.0), (1.0, 5.0), (5.0, 60.0))
KEY: Final = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
BILL: Final = json.dumps(
    {
        "spdxVersion": "SPDX-2.3",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "image",
        "dataLicense": "CC0-1.0",
        "documentNamespace": "https://example.invalid/image",
        "creationInfo": {"created": "2026-11-29T14:00:00Z", "creators": ["Tool: simulated-1"]},
        "packages": [
            {"SPDXID": f"SPDXRef-{name}", "name": name, "downloadLocation": "NOASSERTION"}
            for name in ("image", "a")
        ],
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relatedSpdxElement": "SPDXRef-image",
                "relationshipType": "DESCRIBES",
            }
        ],
    }
).encode()


@dataclass(eq=False, slots=True)
class Running:
    """A build under way.

    :ivar process: the life that asked for it.
    :ivar outlives: whether it goes on when that life has been killed.
    """

    process: str
    request: BuildRequest
    epoch: tuple[str, int]
    outlives: bool
    answer: asyncio.Future[str]


class SimulatedBuilds:
    """The daemon that builds.

    :ivar running: what it is at.
    :ivar verdicts: by image id: whether its tools find nothing in it.
    :ivar on_build: told of the life and its request before the build begins.
    """

    def __init__(self, world: World, faults: Faults, engine: SimulatedEngine) -> None:
        self.world = world
        self.faults = faults
        self.engine = engine
        self.rng = world.rng("builds")
        self.running: list[Running] = []
        self.verdicts: dict[str, bool] = {}
        self.on_build: Callable[[str, BuildRequest], None] = lambda *_: None

    @property
    def epoch(self) -> tuple[str, int]:
        """A build does not outlive the daemon that it began with."""
        return self.engine.id, self.engine.epoch

    def require_up(self) -> None:
        """:raises EngineUnreachable: there is nobody to ask."""
        if not self.engine.up or self.rng.random() < self.faults.builder_away:
            raise EngineUnreachable("cannot reach the builder: it does not answer")

    def begin(self, process: str, request: BuildRequest) -> Running:
        """Build; the answer comes when it is over."""
        self.require_up()
        self.on_build(process, request)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        build = Running(process, request, self.epoch, self.rng.random() < 0.5, answer)
        self.running.append(build)
        self.world.note("builder", f"begins {request.tag[-8:]} for {process}")
        duration_s = self.rng.uniform(*self.rng.choice(BUILDS_S))
        self.world.later(PROCESS, duration_s, self._finish, build)
        return build

    def end(self, build: Running) -> None:
        """Nobody waits any more, and has said so."""
        if build in self.running:
            self.running.remove(build)
            self.world.note("builder", f"ends {build.request.tag[-8:]}")

    def look_into(self, reference: str) -> str:
        """The id of what a tool examines, whose verdict is one for all time."""
        image_id = str(self.engine.inspect_image(reference)["Id"])
        if image_id not in self.verdicts:
            self.verdicts[image_id] = self.rng.random() >= self.faults.gate_refuses
        return image_id

    def _finish(self, build: Running) -> None:
        if build not in self.running:
            return
        self.running.remove(build)
        is_dead = self.world.processes.is_dead(build.process)
        if build.epoch != self.epoch:
            _answer(build, EngineUnreachable("cannot build: the builder has gone away"))
        elif is_dead and not build.outlives:
            self.world.note("builder", f"drops {build.request.tag[-8:]}")
        elif self.rng.random() < self.faults.build_fails:
            _answer(build, ImageNotBuilt("cannot build: make: *** [all]", reason="a step failed"))
        else:
            self._make(build)

    def _make(self, build: Running) -> None:
        request = build.request
        # The cache may give the very same image again.
        inputs = f"{request.labels[IMAGE_KEY]} {self.rng.randrange(3)}"
        image_id = f"sha256:{hashlib.sha256(inputs.encode()).hexdigest()}"
        self.world.note("builder", f"has built {image_id[:15]} for {build.process}")
        self.engine.images.setdefault(image_id, EngineImage(image_id, (), dict(request.labels)))
        self.engine.tag_image(image_id, request.tag)
        if self.rng.random() < self.faults.build_lost:
            _answer(build, EngineUnreachable("cannot build: the connection to the builder broke"))
        elif not build.answer.done():
            build.answer.set_result(image_id)


def _answer(build: Running, error: Exception) -> None:
    if not build.answer.done():
        build.answer.set_exception(error)


class BuilderDoor:
    """:class:`forge_core.image_ports.ImageBuilder` of one life."""

    def __init__(self, builds: SimulatedBuilds, process: str, before: Before) -> None:
        self._builds = builds
        self._process = process
        self._before = before

    async def facts(self) -> BuilderFacts:
        """See the port."""
        await anyio.sleep(self._builds.rng.uniform(0.01, 0.5))
        self._builds.require_up()
        return BuilderFacts("simulated", dedicated=True, limits_hold=True)

    async def build(
        self,
        request: BuildRequest,
        context: AsyncIterable[bytes],
        *,
        on_output: Callable[[bytes], None],
    ) -> str:
        """See the port."""
        content = b"".join([piece async for piece in context])
        await self._before("build", (request, content))
        build = self._builds.begin(self._process, request)
        try:
            on_output(b"#1 begun\n")
            return await build.answer
        finally:
            on_output(b"#1 over\n")
            self._builds.end(build)

    async def prune_cache(self, *, keep_bytes: int, free_bytes: int) -> None:
        """See the port."""
        await anyio.sleep(self._builds.rng.uniform(0.01, 2.0))
        self._builds.require_up()


class Tool:
    """One of the gate tools: sees what a name stands for, prints a document, or fails."""

    def __init__(self, builds: SimulatedBuilds, print_about: Callable[[str], bytes]) -> None:
        self._builds = builds
        self._print_about = print_about

    async def scan(self, reference: str) -> bytes:
        """See :class:`forge_bridge.images.gates.ImageScanner`."""
        builds = self._builds
        await anyio.sleep(builds.rng.uniform(0.01, 3.0))
        if builds.rng.random() < builds.faults.gate_refuses:
            raise RefusedError(f"cannot examine {reference}: it ended with 2", code="tool_failed")
        return self._print_about(builds.look_into(reference))


class Signatures:
    """:class:`forge_core.image_ports.SignatureVerifier`."""

    def __init__(self, builds: SimulatedBuilds) -> None:
        self._builds = builds

    async def verify(self, reference: str) -> None:
        """See the port."""
        builds = self._builds
        await anyio.sleep(builds.rng.uniform(0.01, 0.5))
        if builds.rng.random() < builds.faults.gate_refuses:
            raise RefusedError(f"cannot use {reference}: not signed", code="signature_invalid")

    async def prove(self, reference: str) -> str:
        """No doctor asks here."""
        raise AssertionError(reference)


def gate_tools(builds: SimulatedBuilds) -> GateTools:
    """All of them, with the default policy."""

    def report(image_id: str) -> bytes:
        return json.dumps(_report(image_id, passes=builds.verdicts[image_id])).encode()

    return GateTools(
        signatures=Signatures(builds),
        bill=Tool(builds, lambda _: BILL),
        vulnerabilities=Tool(builds, report),
        signing_key=KEY,
    )


def _report(image_id: str, *, passes: bool) -> Mapping[str, Any]:
    found: Sequence[Mapping[str, str]] = ()
    if not passes:
        found = (
            {
                "VulnerabilityID": "CVE-2026-1",
                "PkgName": "a",
                "InstalledVersion": "1",
                "FixedVersion": "2",
                "Severity": "CRITICAL",
            },
        )
    result = {"Class": "os-pkgs", "Packages": [{"Name": "a"}], "Vulnerabilities": found}
    return {
        "SchemaVersion": 2,
        "ArtifactType": "container_image",
        "Metadata": {"ImageID": image_id, "OS": {"Family": "debian", "Name": "13"}},
        "Results": [result],
    }
