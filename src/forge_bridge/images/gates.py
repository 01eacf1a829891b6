"""The gates between a build and its use, in their order (B-30, B-31; sandbox.md, Images).

::

    before_build   signatures of every external image
    after_build    bill of materials → vulnerabilities → provenance, signed
    before_use     the evidence of an earlier build, under today's policy

Tools are given a tag of ours; before the first and after each of them the tag must name the very
image that was built, so that what was examined is what runs.

With ``FORGE_SANDBOX_IMAGE_POLICY_ENFORCED`` a gate that says no, or has no tool, refuses the
image.  Without it the gates that have a tool run all the same and only warn, so that one can see
what would be refused.  A signature that does not verify refuses in both cases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import anyio
import structlog

from forge_bridge import __version__
from forge_bridge.images.policy_file import load_policy
from forge_bridge.off_loop import off_loop
from forge_core.bill_of_materials import read_bill
from forge_core.errors import RefusedError
from forge_core.image_ports import (
    DEDICATED_BUILDER,
    BuiltImage,
    Evidence,
    EvidenceReader,
    GateRefused,
    SignatureVerifier,
)
from forge_core.provenance import (
    PROVENANCE_NAME,
    BuildPlatform,
    Expected,
    signed_provenance,
    verify_provenance,
)
from forge_core.signing import PrivateKey, PublicKey
from forge_core.vulnerability_policy import MAX_POLICY_BYTES, Verdict, judge
from forge_core.vulnerability_report import VulnerabilityReport, read_report

SBOM: Final = "sbom"
VULNERABILITIES: Final = "vulnerabilities"
PROVENANCE: Final = "provenance"
BILL_NAME: Final = "sbom.spdx.json"
REPORT_NAME: Final = "vulnerabilities.json"

AT_ONCE_BYTES: Final = 16_384
"""Of documents in JSON, which are read, hashed and signed in less than a millisecond."""

T = TypeVar("T")
logger = structlog.get_logger(__name__)


class ImageScanner(Protocol):
    """Looks into an image of the engine and prints a document about it."""

    async def scan(self, reference: str) -> bytes:
        """The document as it is; raises RefusedError where there is none."""


class ImageSource(Protocol):
    """The part of the engine that says which image a name stands for."""

    async def inspect_image(self, reference: str) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class GateTools:
    """What the operator has configured; None: not."""

    signatures: SignatureVerifier | None = None
    bill: ImageScanner | None = None
    vulnerabilities: ImageScanner | None = None
    signing_key: PrivateKey | None = None
    policy_file: Path | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The gates that have no tool; ``sandbox_required`` needs all (B-51)."""
        tools = {
            "signatures": self.signatures,
            SBOM: self.bill,
            VULNERABILITIES: self.vulnerabilities,
            PROVENANCE: self.signing_key,
        }
        return tuple(gate for gate, tool in tools.items() if tool is None)


class Gates:
    """Implements :class:`forge_core.image_ports.ImageGates`.

    :param enforced: FORGE_SANDBOX_IMAGE_POLICY_ENFORCED.
    :param utc: the wall clock as RFC 3339 in UTC; its date decides which exceptions count.
    """

    def __init__(
        self,
        engine: ImageSource,
        tools: GateTools,
        *,
        enforced: bool,
        trust_domain_id: str,
        runner_id: str,
        utc: Callable[[], str],
    ) -> None:
        self.tools = tools
        self.enforced = enforced
        self._engine = engine
        self._owner = trust_domain_id, runner_id
        self._utc = utc
        # A document of 32 MiB is read in one piece: one at a time, so that memory stays bounded.
        self._reading = anyio.CapacityLimiter(1)

    async def before_build(self, sources: Sequence[str]) -> None:
        """Check the signature of every external image.

        :raises RefusedError: ``signature_invalid``.
        """
        if self.tools.signatures is None:
            if sources:
                logger.warning("image signatures are not verified", images=list(sources))
            return
        for source in sources:
            await self.tools.signatures.verify(source)

    async def after_build(self, image: BuiltImage) -> Sequence[Evidence]:
        """Put the image through the gates; what they found, as far as they have tools.

        :raises GateRefused: the first that says no, where the policy is enforced.
        """
        evidence: list[Evidence] = []
        for gate, examine in (
            (SBOM, self._bill),
            (VULNERABILITIES, self._vulnerabilities),
            (PROVENANCE, self._provenance),
        ):
            if gate in self.tools.missing and not self.enforced:
                continue
            try:
                await examine(image, evidence)
            except RefusedError as error:
                self._refuse(image.image_id, gate, error, evidence)
        return evidence

    async def before_use(self, image_id: str, read: EvidenceReader) -> None:
        """Judge what an earlier build left: its provenance, and its findings as of today.

        :raises GateRefused: it is not what was signed, or an exception has expired meanwhile, or
            the policy has become stricter; where the policy is enforced.
        """
        if not self.enforced:
            return
        documents = {document.name: document.content for document in await read()}
        for gate, check in ((PROVENANCE, self._signed), (VULNERABILITIES, self._judged_again)):
            try:
                await check(image_id, documents)
            except RefusedError as error:
                self._refuse(image_id, gate, error, ())

    def _refuse(
        self, image_id: str, gate: str, error: RefusedError, evidence: Sequence[Evidence]
    ) -> None:
        if self.enforced:
            raise GateRefused(
                f"cannot use the image {image_id}: gate {gate}: {error}",
                gate=gate,
                evidence=evidence,
            ) from error
        logger.warning("image would be refused", image=image_id, gate=gate, reason=str(error))

    async def _bill(self, image: BuiltImage, evidence: list[Evidence]) -> None:
        content = await self._scan(self.tools.bill, image)
        await self._read(partial(read_bill, content), len(content))
        evidence.append(Evidence(BILL_NAME, content))

    async def _vulnerabilities(self, image: BuiltImage, evidence: list[Evidence]) -> None:
        content = await self._scan(self.tools.vulnerabilities, image)
        read = partial(read_report, content, image_id=image.image_id)
        report = await self._read(read, len(content))
        evidence.append(Evidence(REPORT_NAME, content))
        await self._judge(report, len(content))

    async def _provenance(self, image: BuiltImage, evidence: list[Evidence]) -> None:
        key = self._signing_key()
        await self._require_unmoved(image)
        dedicated = image.parameters.get(DEDICATED_BUILDER) is True
        platform = BuildPlatform.of_runner(*self._owner, dedicated=dedicated, version=__version__)
        sign = partial(signed_provenance, image, platform, evidence, key)
        evidence.append(await self._read(sign, sum(len(found.content) for found in evidence)))

    async def _signed(self, image_id: str, documents: Mapping[str, bytes]) -> None:
        key = self._signing_key().public_key()
        check = partial(_require_signed, image_id, documents, key)
        await self._read(check, sum(map(len, documents.values())))

    async def _judged_again(self, image_id: str, documents: Mapping[str, bytes]) -> None:
        content = _present(documents, REPORT_NAME)
        report = await self._read(partial(read_report, content, image_id=image_id), len(content))
        await self._judge(report, len(content))

    async def _judge(self, report: VulnerabilityReport, size_bytes: int) -> None:
        today, file = self._utc()[:10], self.tools.policy_file

        def decide() -> Verdict:
            return judge(report, load_policy(file, today=today), today=today)

        if file is not None:
            size_bytes += MAX_POLICY_BYTES
        verdict = await self._read(decide, size_bytes)
        if not verdict.passes:
            raise _unfit(verdict.reasons())

    def _signing_key(self) -> PrivateKey:
        if self.tools.signing_key is None:
            raise _unfit("no key is configured for it")
        return self.tools.signing_key

    async def _scan(self, scanner: ImageScanner | None, image: BuiltImage) -> bytes:
        if scanner is None:
            raise _unfit("no tool is configured for it")
        await self._require_unmoved(image)
        content = await scanner.scan(image.reference)
        await self._require_unmoved(image)
        return content

    async def _require_unmoved(self, image: BuiltImage) -> None:
        named = (await self._engine.inspect_image(image.reference)).get("Id")
        if named != image.image_id:
            raise _unfit(f"{image.reference} names {named} now: somebody has moved the tag")

    async def _read(self, read: Callable[[], T], size_bytes: int) -> T:
        return await off_loop(read, size_bytes, at_once_bytes=AT_ONCE_BYTES, limiter=self._reading)


def _require_signed(image_id: str, documents: Mapping[str, bytes], key: PublicKey) -> None:
    envelope = _present(documents, PROVENANCE_NAME)
    found = verify_provenance(envelope, key, Expected(image_id=image_id))
    for name in (BILL_NAME, REPORT_NAME):
        digest = hashlib.sha256(_present(documents, name)).hexdigest()
        if found.byproducts.get(name) != f"sha256:{digest}":
            raise _unfit(f"{name} is not the document that was signed")


def _present(documents: Mapping[str, bytes], name: str) -> bytes:
    if name not in documents:
        raise _unfit(f"{name} is not among what the build left")
    return documents[name]


def _unfit(why: str) -> RefusedError:
    return RefusedError(why, code="image_policy_denied")
