"""Signatures of images, verified by Cosign or a program that is called like it (B-31).

The call is the same for Cosign 2 and 3; flags that only one of them has are not used::

    cosign verify --key KEY --insecure-ignore-tlog=true --output json REPOSITORY@DIGEST

The trust is in the key alone: no transparency log, no certificate, no service of Sigstore is
asked.  Exit codes (cosign ``pkg/errors``, and measured): 0 verified, 10 no
signature or no such image, 12 none of the signatures is by the key, anything else: no answer.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import Any, Final

from forge_core.errors import RefusedError
from forge_core.sandbox_spec import require_pinned, without_tag
from forge_edges.gate_tools import ToolFailed, ToolSetting, complaint, run_tool
from forge_edges.process import Bounds
from forge_edges.signing_key import VerifierKey, new_verifier_key

BOUNDS: Final = Bounds(timeout_ms=120_000, stdout_bytes=4 << 20)
VERSION_BOUNDS: Final = Bounds(timeout_ms=10_000, stdout_bytes=1 << 16)
MAX_REMEMBERED: Final = 1_024
_VERSION = re.compile(r"GitVersion:\s*(\S{1,64})")


class CosignVerifier:
    """Implements :class:`forge_core.image_ports.SignatureVerifier`.

    A digest that was found signed stays so for as long as this process has the same key; it is
    not asked about again.
    """

    def __init__(
        self, executable: str, key: VerifierKey, setting: ToolSetting, *, bounds: Bounds = BOUNDS
    ) -> None:
        self.key = key
        self._executable = executable
        self._setting = setting
        self._bounds = bounds
        self._verified: OrderedDict[str, None] = OrderedDict()

    async def verify(self, reference: str) -> None:
        """Return when ``reference`` is signed with the key.

        :raises RefusedError: ``signature_invalid``; the message tells an unsigned image from a
            verifier that gave no answer.
        """
        if reference in self._verified:
            self._verified.move_to_end(reference)
            return
        try:
            await self._verify(reference)
        except ToolFailed as error:
            raise _invalid(reference, f"the verifier gave no answer: {error}") from None
        self._verified[reference] = None
        if len(self._verified) > MAX_REMEMBERED:
            self._verified.popitem(last=False)

    async def prove(self, reference: str) -> str:
        """Show that the program really verifies: with the key it says yes, with a new one no.

        :returns: what was seen, in one sentence.
        :raises RefusedError: ``signature_invalid``.
        """
        try:
            version = await self._version()
            await self._verify(reference)
        except ToolFailed as error:
            raise _invalid(reference, f"the verifier gave no answer: {error}") from None
        stranger = CosignVerifier(
            self._executable, new_verifier_key(), self._setting, bounds=self._bounds
        )
        try:
            await stranger._verify(reference)
        except RefusedError:
            return (
                f"{self._executable} {version} verified {reference} with the key "
                f"{self.key.digest}, and not with another"
            )
        raise _invalid(reference, "the verifier accepts a key that has signed nothing")

    async def _verify(self, reference: str) -> None:
        subject = require_pinned(without_tag(reference), field_name="image")
        if "@" not in subject:
            raise _invalid(reference, "it is in no registry, and a signature is kept beside it")
        outcome = await run_tool(
            self._executable,
            lambda directory: [
                "verify",
                *("--key", str(directory / "key.pub")),
                "--insecure-ignore-tlog=true",
                *("--output", "json"),
                subject,
            ],
            self._setting,
            self._bounds,
            files={"key.pub": self.key.pem},
        )
        match outcome.exit_code:
            case 0:
                _require_digest(reference, outcome.stdout)
            case 10:
                raise _invalid(reference, "it has no signature, or the registry has no such image")
            case 12:
                raise _invalid(reference, f"no signature on it is by the key {self.key.digest}")
            case _:
                raise ToolFailed(complaint(outcome))

    async def _version(self) -> str:
        outcome = await run_tool(
            self._executable, lambda _: ["version"], self._setting, VERSION_BOUNDS
        )
        match = _VERSION.search(outcome.stdout.decode("utf-8", "replace"))
        return "of unknown version" if match is None else match[1]


def _require_digest(reference: str, output: bytes) -> None:
    """What was verified must be what will run; every signature that is told of says so."""
    digest = reference.rpartition("@")[2]
    try:
        signatures = json.loads(output)
    except (ValueError, RecursionError):
        raise ToolFailed("it said that all is well and printed no JSON") from None
    if not isinstance(signatures, list) or not signatures:
        raise ToolFailed("it said that all is well and named no signature")
    for signature in signatures:
        if (told := _digest_in(signature)) != digest:
            raise _invalid(reference, f"the verifier verified {told[:80] or 'something else'}")


def _digest_in(signature: Any) -> str:
    for step in ("critical", "image", "docker-manifest-digest"):
        signature = signature.get(step) if isinstance(signature, dict) else None
    return signature if isinstance(signature, str) else ""


def _invalid(reference: str, why: str) -> RefusedError:
    return RefusedError(
        f"cannot trust the image {reference[:300]}: {why}", code="signature_invalid"
    )
