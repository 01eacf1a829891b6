"""Stage ``output``: a helper container makes one commit, the host treats it as hostile.

The helper has the agent's hardening, no network, no secrets, and the workspace read-only.  It
is created and started while the agent runs, since starting a container is most of its cost;
it waits on its stdin until the agent is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import anyio

from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_bridge.sandbox.workspace import INTERPRETER
from forge_core.attempt_events import Happened, OutputAccepted
from forge_core.ports import Attachment, ImportedOutput
from forge_core.sandbox_spec import WORKSPACE, ContainerSpec, VolumeMount
from forge_core.wire.codes import EventType, FailureCode
from forge_core.wire.events import Warning_

MAX_ANSWER_BYTES: Final = 65_536
MAX_OUTPUT_FILES: Final = 100_000
MAX_OUTPUT_BYTES: Final = 1 << 30
HELPER_MEMORY_BYTES: Final = 512 * 2**20
HELPER_PIDS: Final = 64
AUTHOR: Final = {"name": "forge", "email": "forge@localhost"}


def attempt_ref(attempt_id: str, fence: int) -> str:
    """The ref of a result commit; it never contains an id as it came (protocol.md, Ids)."""
    digest = hashlib.sha256(attempt_id.encode()).hexdigest()[:32]
    return f"refs/forge/attempts/{digest}/{fence}"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the helper claims before any bundle."""

    result_commit: str | None
    files: int
    size_bytes: int
    warnings: tuple[str, ...]


class OutputCollector:
    """The helper of one dispatch, from its creation to the imported commit."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._agent_gone = anyio.Event()
        self._rest = b""

    def agent_is_gone(self) -> None:
        """Only now may the workspace be read."""
        self._agent_gone.set()

    async def run(self) -> None:
        """Create, start, wait for the agent's end, collect and import.

        :raises StageFailed: ``output_invalid``.
        """
        context = self._context
        owner = context.run.state.owner
        container = await context.create_container(self._spec())
        async with context.engine.attach(container) as stream:
            await context.engine.start_container(container)
            listing = await context.runner.git.tree_listing(
                context.start.repository, context.start.input_commit
            )
            await self._agent_gone.wait()
            with anyio.move_on_after(context.settings.output_ms / 1000):
                output = await self._collect(stream, listing)
                await context.run.feed(OutputAccepted(output))
                return
        raise _invalid(
            f"cannot take the output of attempt {owner.attempt_id}: the helper was not done "
            f"within {context.settings.output_ms} ms"
        )

    def _spec(self) -> ContainerSpec:
        context = self._context
        return ContainerSpec(
            owner=context.run.state.owner,
            role="helper",
            image=context.settings.tooling_image,
            argv=(INTERPRETER, "-I", "-S", "-c", context.settings.bundle_source),
            memory_bytes=HELPER_MEMORY_BYTES,
            cpu_millis=context.resources.cpu_millis,
            pids=HELPER_PIDS,
            tmp_bytes=HELPER_MEMORY_BYTES // 2,
            mounts=(VolumeMount(context.volume, WORKSPACE, read_only=True),),
        )

    async def _collect(self, stream: Attachment, listing: bytes) -> ImportedOutput:
        context, start = self._context, self._context.start
        ref = attempt_ref(start.attempt_id, start.fence)
        await stream.send(json.dumps(self._request(ref, listing)).encode() + b"\n" + listing)
        answer = await self._read_answer(stream)
        for detail in answer.warnings:
            warning = Warning_(code="output", detail=context.run.masker.mask(detail))
            await context.run.feed(Happened(EventType.WARNING, warning))
        if answer.result_commit is None:
            return ImportedOutput(None, 0, 0)
        return await context.runner.git.import_bundle(
            start.repository,
            self._bundle(stream),
            input_commit=start.input_commit,
            bundle_ref=ref,
            claimed_commit=answer.result_commit,
            target_ref=ref,
        )

    def _request(self, ref: str, listing: bytes) -> dict[str, Any]:
        start = self._context.start
        return {
            "inputCommit": start.input_commit,
            "ref": ref,
            "author": AUTHOR,
            "date": self._context.runner.clock.unix_seconds(),
            "message": f"Result of attempt {start.attempt_id}",
            "maxFiles": MAX_OUTPUT_FILES,
            "maxBytes": MAX_OUTPUT_BYTES,
            "listingBytes": len(listing),
        }

    async def _read_answer(self, stream: Attachment) -> _Answer:
        buffer, complaint = bytearray(), bytearray()
        while b"\n" not in buffer:
            piece = await stream.receive()
            if piece is None or len(buffer) > MAX_ANSWER_BYTES:
                said = complaint.decode("utf-8", "replace").strip()[-500:]
                raise _invalid(f"cannot take the output: the helper gave no answer; {said}")
            channel, data = piece
            if channel == 1:
                buffer += data
            else:
                complaint = (complaint + data)[-MAX_ANSWER_BYTES:]
        line, _, self._rest = bytes(buffer).partition(b"\n")
        return _parse_answer(line)

    async def _bundle(self, stream: Attachment) -> AsyncIterator[bytes]:
        """The rest of the helper's stdout; the importer bounds it."""
        if self._rest:
            yield self._rest
        while (piece := await stream.receive()) is not None:
            channel, data = piece
            if channel == 1:
                yield data


def _parse_answer(line: bytes) -> _Answer:
    try:
        value = json.loads(line)
        refused = value.get("refused")
        if isinstance(refused, dict):
            rule, detail = str(refused.get("rule"))[:64], str(refused.get("detail"))[:500]
            raise _invalid(f"cannot take the output: {rule}: {detail}")
        commit, warnings = value["resultCommit"], value.get("warnings", [])
        if commit is not None and not isinstance(commit, str):
            raise TypeError
        texts = tuple(str(text)[:500] for text in list(warnings)[:20])
        return _Answer(commit, int(value["files"]), int(value["bytes"]), texts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _invalid("cannot take the output: the helper's answer makes no sense") from None


def _invalid(detail: str) -> StageFailed:
    return StageFailed(FailureCode.OUTPUT_INVALID, detail)
