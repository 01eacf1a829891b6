"""A builder and gates that do what a test tells them to, over an engine in memory."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from typing import Any

import anyio
from memory_engine import MemoryEngine

from forge_core.errors import ForgeError
from forge_core.image_ports import (
    BuilderFacts,
    BuildRequest,
    BuiltImage,
    Evidence,
    EvidenceReader,
    GateRefused,
)
from forge_core.ports import EngineImage

EVIDENCE = (Evidence("sbom.spdx.json", b"{}"), Evidence("provenance.dsse.json", b"signed"))


class ScriptedBuilder:
    """Implements :class:`forge_core.image_ports.ImageBuilder`.

    :ivar requests: what was built, and ``contexts`` what of; ``began`` is set by each.
    :ivar may_end: what every build waits for.
    :ivar output: what a build prints.
    :ivar failure: what a build raises instead of an image.
    :ivar config: what the images declare besides their labels.
    :ivar cancelled: how many builds were cut short.
    :ivar pruned: ``(keep_bytes, free_bytes)`` of every pruning.
    """

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.identity = "scripted"
        self.requests: list[BuildRequest] = []
        self.contexts: list[bytes] = []
        self.began = anyio.Event()
        self.may_end = anyio.Event()
        self.may_end.set()
        self.output: Sequence[bytes] = (b"#1 building\n",)
        self.failure: ForgeError | None = None
        self.config: Mapping[str, Any] = {}
        self.at_once = 0
        self.most_at_once = 0
        self.cancelled = 0
        self.pruned: list[tuple[int, int]] = []

    async def facts(self) -> BuilderFacts:
        await anyio.lowlevel.checkpoint()
        return BuilderFacts(self.identity, dedicated=True, limits_hold=True)

    async def build(
        self,
        request: BuildRequest,
        context: AsyncIterable[bytes],
        *,
        on_output: Callable[[bytes], None],
    ) -> str:
        self.requests.append(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.contexts.append(b"".join([piece async for piece in context]))
            for piece in self.output:
                on_output(piece)
            self.began.set()
            await self.may_end.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        if self.failure is not None:
            raise self.failure
        return self._image(request)

    async def prune_cache(self, *, keep_bytes: int, free_bytes: int) -> None:
        self.pruned.append((keep_bytes, free_bytes))

    def _image(self, request: BuildRequest) -> str:
        identity = f"sha256:{0xB0000 + len(self.requests):064x}"
        self.engine.images[identity] = EngineImage(identity, (request.tag,), dict(request.labels))
        self.engine.configs[identity] = {"Labels": dict(request.labels), **self.config}
        return identity


class ScriptedGates:
    """Implements :class:`forge_core.image_ports.ImageGates`.

    :ivar asked: what each gate was asked about, in order.
    :ivar refuses: by gate (``before_build``, ``after_build``, ``before_use``), what it raises.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []
        self.refuses: dict[str, Exception] = {}
        self.evidence: Sequence[Evidence] = EVIDENCE

    async def before_build(self, sources: Sequence[str]) -> None:
        await self._ask("before_build", tuple(sources))

    async def after_build(self, image: BuiltImage) -> Sequence[Evidence]:
        await self._ask("after_build", image)
        return self.evidence

    async def before_use(self, image_id: str, read: EvidenceReader) -> None:
        await self._ask("before_use", (image_id, tuple(await read())))

    async def _ask(self, gate: str, about: object) -> None:
        await anyio.lowlevel.checkpoint()
        self.asked.append((gate, about))
        if gate in self.refuses:
            raise self.refuses[gate]


def refusal(gate: str) -> GateRefused:
    """What a gate says that has found something."""
    evidence = (Evidence("vulnerabilities.json", b"[]"),)
    return GateRefused(f"cannot use it: {gate} says no", gate=gate, evidence=evidence)
