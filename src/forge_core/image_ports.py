"""The doors through which an image is built, proven and looked up (sandbox.md, Images).

Stages see these Protocols only; ``forge_bridge.app`` hands in the edges that keep them.  Every
method may raise the errors of :mod:`forge_core.errors` and nothing else that is expected.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from forge_core.errors import RefusedError


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """What one build may take (B-33).

    :param memory_bytes: memory, and memory with swap, of one build step.
    :param cpu_quota_us: CFS quota in microseconds for each period of 100,000.
    :param nofile: open files of one build step.
    :param pids: processes of the dedicated builder's container together.
    """

    memory_bytes: int
    cpu_quota_us: int
    nofile: int
    pids: int


@dataclass(frozen=True, slots=True)
class BuilderFacts:
    """The builder that would build, as it was read back from what runs.

    :param identity: stable while the same builder would give the same image; part of the key.
    :param dedicated: a BuildKit container of its own; else the engine's builder.
    :param limits_hold: every one of :class:`BuildLimits` was read back from it.
    :param shortcomings: what was not found as asked, for people and for the blocker's text.
    """

    identity: str
    dedicated: bool
    limits_hold: bool
    shortcomings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One image to build.

    :param tag: ``name:tag`` of ours under which the engine keeps the image.
    :param dockerfile: its path in the context.
    :param sources: every external image that may be used, pinned by digest; the builder refuses
        all others, and everything that it would fetch by itself (``ADD`` of a URL or of git).
    :param network: whether ``RUN`` has one (B-32).
    """

    tag: str
    dockerfile: str
    sources: tuple[str, ...]
    labels: Mapping[str, str]
    timeout_ms: int
    network: bool = False


class ImageNotBuilt(RefusedError):  # noqa: N818 - says what is the case
    """A build gave no image.

    :param message: for the log of the build, which stays here: it may repeat what was printed.
    :ivar reason: for everybody else (B-90): nothing that a step, a registry or a Dockerfile said.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message, code="image_build_failed")
        self.reason = reason


class ImageBuilder(Protocol):
    """Builds images with BuildKit (B-33, B-34)."""

    async def facts(self) -> BuilderFacts:
        """Look at the builder; makes the dedicated one when it is not there."""

    async def build(
        self,
        request: BuildRequest,
        context: AsyncIterable[bytes],
        *,
        on_output: Callable[[bytes], None],
    ) -> str:
        """Build, and return the image's id (``sha256:…``); a cancelled call ends the build.

        :param context: a tar; read once.
        :param on_output: takes the build's output as it comes; never waits.
        :raises ImageNotBuilt: a step failed, was killed, or took too long.
        :raises EngineOutOfDisk: the engine has no space for it.
        :raises EngineUnreachable: the builder is not to be had.
        """

    async def prune_cache(self, *, keep_bytes: int, free_bytes: int) -> None:
        """Give cache back until it holds at most ``keep_bytes`` or the disk has ``free_bytes``."""


class SignatureVerifier(Protocol):
    """Says whether an image carries a good signature (B-31)."""

    async def verify(self, reference: str) -> None:
        """Return when ``reference`` (by digest) is signed with the configured key.

        :raises RefusedError: ``signature_invalid``: it is not, or the verifier could not tell.
        """

    async def prove(self, reference: str) -> str:
        """Show on a signed image that a signature is verified, and not just accepted.

        :returns: what was seen, in one sentence.
        :raises RefusedError: as above, or the verifier takes any key.
        """


@dataclass(frozen=True, slots=True)
class Evidence:
    """One document that a gate left: what it is called on disk, and its bytes.

    :param name: ``sbom.spdx.json``, ``vulnerabilities.json`` or ``provenance.dsse.json``.
    """

    name: str
    content: bytes


class GateRefused(RefusedError):  # noqa: N818 - says what is the case
    """A gate said no.

    :param gate: which of them: ``sbom``, ``vulnerabilities``, ``provenance``.
    :param evidence: what the gates had found by then; kept like that of a success.
    """

    def __init__(self, message: str, *, gate: str, evidence: Sequence[Evidence] = ()) -> None:
        super().__init__(message, code="image_policy_denied", field=gate)
        self.evidence = tuple(evidence)


DEDICATED_BUILDER: Final = "dedicatedBuilder"
"""Of :attr:`BuiltImage.parameters`: True where a BuildKit of its own has built."""


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """What was built, as the gates are told of it.

    :param image_id: ``sha256:…``; the digest that runs.
    :param reference: ``name:tag`` of ours that names the very same image in the engine.
    :param image_key: see :mod:`forge_core.image_key`.
    :param materials: every external image that went in, by digest.
    :param parameters: what else decided the result, for the provenance (limits, builder, paths).
    """

    image_id: str
    reference: str
    image_key: str
    project_id: str
    repository: str
    commit: str
    materials: tuple[str, ...]
    parameters: Mapping[str, object]
    started_at: str
    finished_at: str


EvidenceReader = Callable[[], Awaitable[Sequence[Evidence]]]


class ImageGates(Protocol):
    """The gates between a build and its use, in their order (B-30, B-31)."""

    async def before_build(self, sources: Sequence[str]) -> None:
        """Check the signature of every external image; raises ``signature_invalid``."""

    async def after_build(self, image: BuiltImage) -> Sequence[Evidence]:
        """Bill of materials, vulnerabilities, signed provenance: the evidence of all three.

        :raises GateRefused: one of them said no; carries the evidence that there is.
        """

    async def before_use(self, image_id: str, read: EvidenceReader) -> None:
        """Judge an image of an earlier build by its evidence, under the policy of today.

        :param read: its evidence; called where it counts, and what it raises comes through.
        :raises GateRefused: the evidence is not what was signed, or the image would not pass now.
        """
