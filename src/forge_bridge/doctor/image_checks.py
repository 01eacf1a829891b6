"""Whether the image gates work, by using every one of them on the tooling image (B-51)."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from forge_bridge.doctor.policy_checks import IMAGE_POLICY, SIGNATURES
from forge_bridge.doctor.proofs import Proofs
from forge_bridge.images.from_settings import open_gate_tools
from forge_bridge.images.gates import GateTools, ImageSource
from forge_bridge.images.policy_file import load_policy
from forge_bridge.settings import BridgeSettings
from forge_core.bill_of_materials import BillOfMaterials, read_bill
from forge_core.dsse import read_envelope, seal
from forge_core.errors import ForgeError, RefusedError
from forge_core.provenance import PAYLOAD_TYPE
from forge_core.signing import PrivateKey, key_id
from forge_core.vulnerability_report import VulnerabilityReport, read_report
from forge_edges.clock import SystemClock
from forge_edges.docker_context import DockerEndpoint


class ImageProver:
    """Tries the gates, and remembers what was shown with an image for as long as it lives.

    The engine may come and go meanwhile; the same tools on the same image show nothing new.

    :param enforced: FORGE_SANDBOX_IMAGE_POLICY_ENFORCED.
    :param utc: the wall clock, RFC 3339 in UTC.
    """

    def __init__(self, tools: GateTools, *, enforced: bool, utc: Callable[[], str]) -> None:
        self._tools = tools
        self._enforced = enforced
        self._utc = utc
        self._shown: dict[tuple[str, str], str] = {}

    async def prove(self, engine: ImageSource, tooling_image: str | None) -> Proofs:
        """Use every configured gate on the tooling image; raises nothing that is expected."""
        if tooling_image is None:
            return Proofs()
        proofs = Proofs()

        async def attempt(check: str, show: Callable[[], Awaitable[str]]) -> None:
            nonlocal proofs
            try:
                evidence = self._shown.get((check, tooling_image)) or await show()
            except ForgeError as error:
                proofs |= Proofs.ended_by(error, check)
            else:
                self._shown[check, tooling_image] = evidence
                proofs |= Proofs(shown={check: evidence})

        async with anyio.create_task_group() as group:
            if self._tools.signatures is not None:
                verifier = self._tools.signatures
                group.start_soon(attempt, SIGNATURES.id, lambda: verifier.prove(tooling_image))
            if self._enforced:
                group.start_soon(
                    attempt,
                    IMAGE_POLICY.id,
                    lambda: check_image_policy(
                        self._tools, engine, tooling_image, today=self._utc()[:10]
                    ),
                )
        return proofs

    async def check_signatures(self, references: Sequence[str]) -> None:
        """Where signatures are verified at all, those of these images must be good.

        :raises RefusedError: ``signature_invalid``.
        """
        if self._tools.signatures is not None:
            for reference in references:
                await self._tools.signatures.verify(reference)


@asynccontextmanager
async def passing_prover(
    settings: BridgeSettings, endpoint: DockerEndpoint, environ: Mapping[str, str]
) -> AsyncIterator[ImageProver]:
    """A prover for one look, where no bridge with a state root of its own runs.

    :raises RefusedError: code ``configuration``: a key cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="forge-doctor-") as scratch:
        tools = await open_gate_tools(settings, endpoint, environ, Path(scratch))
        enforced = settings.sandbox_image_policy_enforced
        yield ImageProver(tools, enforced=enforced, utc=SystemClock().utc)


async def check_image_policy(
    tools: GateTools, engine: ImageSource, image: str, *, today: str
) -> str:
    """Have the gates look at an image that the engine has; what they find is not judged.

    :param today: ``YYYY-MM-DD`` in UTC.
    :returns: what was seen, in one sentence.
    :raises ForgeError: a gate has no tool, or does not do its work.
    """
    if tools.bill is None or tools.vulnerabilities is None or tools.signing_key is None:
        raise RefusedError(f"no tool for {', '.join(tools.missing)}", code="configuration")
    policy = await anyio.to_thread.run_sync(lambda: load_policy(tools.policy_file, today=today))
    signer = _signs(tools.signing_key)
    image_id = str((await engine.inspect_image(image)).get("Id"))
    bill = await _bill(await tools.bill.scan(image))
    report = await _report(await tools.vulnerabilities.scan(image), image_id)
    return (
        f"{bill.tool or 'the SBOM tool'} named {bill.packages} packages of {image}, the scanner "
        f"looked at {report.packages} and knew of {len(report.findings)} vulnerabilities; "
        f"{len(policy.exceptions)} exceptions; the key {signer} signed and verified"
    )


def _signs(key: PrivateKey) -> str:
    public = key.public_key()
    read_envelope(seal(PAYLOAD_TYPE, b"{}", key)).verified_payload(public, PAYLOAD_TYPE)
    return key_id(public)


async def _bill(content: bytes) -> BillOfMaterials:
    return await anyio.to_thread.run_sync(read_bill, content)


async def _report(content: bytes, image_id: str) -> VulnerabilityReport:
    return await anyio.to_thread.run_sync(lambda: read_report(content, image_id=image_id))
