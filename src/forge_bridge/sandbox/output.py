"""Stage ``output``: a helper container makes one commit, the host treats it as hostile.

The helper has the agent's hardening, no network, no secrets, and the workspace read-only.  It
is created and started while the agent runs, since starting a container is most of its cost;
it waits on its stdin until the agent is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import anyio

from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.attempt_events import Happened, OutputAccepted
from forge_core.errors import EngineUnreachable, RefusedError
from forge_core.output_exchange import (
    MAX_REPLY_LINE_BYTES,
    HelperReply,
    attempt_ref,
    helper_request,
    parse_helper_reply,
)
from forge_core.ports import Attachment, ImportedOutput
from forge_core.wire.codes import EventType, FailureCode, WarningCode
from forge_core.wire.events import Warning_

MAX_COMPLAINT_BYTES: Final = 4_096
MAX_OUTPUT_FILES: Final = 100_000
MAX_OUTPUT_BYTES: Final = 1 << 30
AUTHOR_NAME: Final = "forge"
AUTHOR_EMAIL: Final = "forge@localhost"
STDOUT: Final = 1


class OutputCollector:
    """The helper of one dispatch, from its creation to the imported commit."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._agent_gone = anyio.Event()

    def agent_is_gone(self) -> None:
        """Only now may the workspace be read."""
        self._agent_gone.set()

    async def run(self) -> None:
        """Create, start, wait for the agent's end, collect and import.

        :raises StageFailed: ``output_invalid``.
        """
        context = self._context
        owner = context.run.state.owner
        programs = context.place.programs
        container = await context.place.create_helper(context)
        async with programs.attach(container) as stream:
            # Two containers that start at once hold each other up; the agent's goes first.
            await context.pid_1_runs.wait()
            await programs.start_container(container)
            listing = await context.runner.git.tree_listing(
                context.start.repository, context.start.input_commit
            )
            await self._agent_gone.wait()
            with anyio.move_on_after(context.settings.output_ms / 1000):
                try:
                    output = await self._collect(stream, listing)
                except (StageFailed, RefusedError):
                    # An engine that went away ends a stream just as a helper that failed does.
                    await programs.inspect_container(container)
                    raise
                await context.run.feed(OutputAccepted(output))
                return
        raise _invalid(
            f"cannot take the output of attempt {owner.attempt_id}: the helper was not done "
            f"within {context.settings.output_ms} ms"
        )

    async def _collect(self, stream: Attachment, listing: bytes) -> ImportedOutput:
        context, start = self._context, self._context.start
        ref = attempt_ref(start.attempt_id, start.fence)
        request = helper_request(
            listing,
            input_commit=start.input_commit,
            ref=ref,
            author_name=AUTHOR_NAME,
            author_email=AUTHOR_EMAIL,
            date_seconds=context.runner.clock.unix_seconds(),
            message=f"Result of attempt {start.attempt_id}",
            max_bytes=MAX_OUTPUT_BYTES,
            max_files=MAX_OUTPUT_FILES,
        )
        try:
            await stream.send(request)
        except EngineUnreachable as error:
            context.run.log.info("cannot ask the helper for the output", error=str(error))
        reply, rest = await _read_reply(stream)
        if reply.refused is not None:
            raise _invalid(f"cannot take the output: {reply.refused}")
        for detail in reply.warnings:
            warning = Warning_(code=WarningCode.OUTPUT, detail=context.run.masker.mask(detail))
            await context.run.feed(Happened(EventType.WARNING, warning))
        if reply.result_commit is None:
            return ImportedOutput(None, 0, 0)
        return await context.runner.git.import_bundle(
            start.repository,
            _bundle(rest, stream),
            input_commit=start.input_commit,
            bundle_ref=ref,
            claimed_commit=reply.result_commit,
            target_ref=ref,
        )


async def _read_reply(stream: Attachment) -> tuple[HelperReply, bytes]:
    """The helper's first line, and what came with it of the bundle."""
    buffer, complaint = bytearray(), bytearray()
    while b"\n" not in buffer:
        piece = await stream.receive()
        if piece is None or len(buffer) > MAX_REPLY_LINE_BYTES:
            said = complaint.decode("utf-8", "replace").strip()[-500:]
            raise _invalid(f"cannot take the output: the helper gave no answer; {said}")
        channel, data = piece
        if channel == STDOUT:
            buffer += data
        else:
            complaint = (complaint + data)[-MAX_COMPLAINT_BYTES:]
    line, _, rest = bytes(buffer).partition(b"\n")
    return parse_helper_reply(line), rest


async def _bundle(rest: bytes, stream: Attachment) -> AsyncIterator[bytes]:
    """The rest of the helper's stdout; the importer bounds it."""
    if rest:
        yield rest
    while (piece := await stream.receive()) is not None:
        channel, data = piece
        if channel == STDOUT:
            yield data


def _invalid(detail: str) -> StageFailed:
    return StageFailed(FailureCode.OUTPUT_INVALID, detail)
