"""Stages ``workspace`` and ``agent``: PID 1 starts while the commit is unpacked; then it gets
its orders, its renewals, and is believed only so far.

Every frame is a claim of a hostile container.  The host's own deadlines decide; an engine
that says "exit 0" without the agent's status having been read is ``supervisor_lost``.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import anyio

from forge_bridge.groups import first_error
from forge_bridge.log_stream import LogStream
from forge_bridge.sandbox.pid_1 import Command, Renewals, is_plausible, orders
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_core.attempt_events import AgentEnded, AgentStarted, EndRequested, OutputSeen
from forge_core.errors import EngineNotFound, EngineTimedOut, EngineUnreachable, ForgeError
from forge_core.lease import Deadline
from forge_core.ports import Attachment
from forge_core.supervisor_frames import (
    DEADLINE_EXIT_CODES,
    STILL_PREPARING,
    DeadlinePassed,
    Frame,
    FrameReader,
    FrameRefused,
    LogChunk,
    ProcessEnded,
    ProcessStarted,
    SupervisorReady,
    cancel_frame,
)
from forge_core.wire.codes import FailureCode, OutputStream

PREPARING_MS: Final = 15_000
"""How often PID 1 is told that its orders are still to come; it waits four times as long."""

STDERR_TAIL_BYTES: Final = 4_096
KILLED_EXIT_CODE: Final = 137


async def run_agent(context: StageContext) -> None:
    """Start PID 1 and fill the workspace, then hand over the lease and the command, and wait.

    :raises StageFailed: the agent failed, or PID 1 was lost.
    """
    conversation = _Conversation(context)
    async with context.place.programs.attach(context.agent_container) as stream:
        try:
            await conversation.hold(stream)
        except anyio.get_cancelled_exc_class():
            await conversation.end_gently(stream)
            raise
    await conversation.judge()


class _Conversation:
    """What was said between the host and PID 1 of one container."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._reader = FrameReader()
        self._logs = LogStream(context.run)
        self._sending = anyio.Lock()
        self._ended: ProcessEnded | None = None
        self._claimed: Deadline | None = None
        self._ready = False
        self._ready_ms = 0
        self._has_orders = False
        self._started = anyio.Event()
        self._over = anyio.Event()
        self._unanswered = 0
        self._renewals = Renewals(context.run)
        self._refused_frames = 0
        self._output_bytes = 0
        self._stderr_tail = bytearray()

    async def hold(self, stream: Attachment) -> None:
        """Everything from ``ready`` to the end of the container's output."""
        ready_ms = self._context.settings.supervisor_ready_ms
        with first_error():
            await self._hold(stream, ready_ms)

    async def _hold(self, stream: Attachment, ready_ms: int) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._logs.send)
            async with anyio.create_task_group() as preparing:
                filled = anyio.Event()
                preparing.start_soon(self._fill, filled)
                with anyio.move_on_after(ready_ms / 1000):
                    await self._until_ready(stream)
                if not self._ready:
                    raise self._lost(f"it did not say that it is ready within {ready_ms} ms")
                tasks.start_soon(self._listen, stream, preparing.cancel_scope)
                await self._bid_wait(stream, filled)
                if not filled.is_set():
                    preparing.cancel_scope.cancel()
            if filled.is_set() and not self._over.is_set():
                await self._context.enter_agent()
                tasks.start_soon(self._require_start, ready_ms)
                # From here on renewals are handed on; one that came before is in the orders.
                with self._renewals.taken():
                    await self._give_orders(stream)
                    tasks.start_soon(self._renewals.hand_on, partial(self._send, stream))
                    await self._over.wait()
            self._logs.end()
            await self._logs.flush()
            tasks.cancel_scope.cancel()

    async def end_gently(self, stream: Attachment) -> None:
        """TERM, the grace, KILL by PID 1; teardown kills whatever is left after that.

        Before PID 1 has its orders there is no agent to be gentle with, and a bridge that goes down
        at once is not.
        """
        if not self._has_orders:
            return
        grace_ms = self._context.settings.kill_grace_ms
        with anyio.move_on_after((grace_ms + 1_000) / 1000, shield=True):
            with first_error():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._cancel, stream, grace_ms, tasks.cancel_scope)
                    await self._context.run.runner.at_once.wait()
                    tasks.cancel_scope.cancel()

    async def _cancel(self, stream: Attachment, grace_ms: int, done: anyio.CancelScope) -> None:
        try:
            await self._send(stream, cancel_frame(grace_ms))
            while await stream.receive() is not None:
                continue
        except ForgeError as error:
            self._context.run.log.info("cannot end gently", error=str(error))
        done.cancel()

    async def judge(self) -> None:
        """What the end of the container means."""
        context = self._context
        if self._reader.unreadable:
            context.run.log.warning("PID 1 wrote what is no frame", lines=self._reader.unreadable)
        status_code, oom_killed = await self._engine_status()
        if self._ended is not None:
            await context.run.feed(AgentEnded(self._ended.exit_code, self._ended.signal))
            if self._ended.exit_code == 0:
                return
            killed = self._ended.signal == 9 or self._ended.exit_code == KILLED_EXIT_CODE
            if killed and oom_killed:
                raise StageFailed(
                    FailureCode.OUT_OF_MEMORY,
                    "the agent was killed; the engine suspects that memory ran out",
                )
            raise StageFailed(FailureCode.AGENT_FAILED, f"the agent {self._ended.in_words}")
        claimed = self._claimed or DEADLINE_EXIT_CODES.get(status_code)
        if claimed is not None and is_plausible(context, claimed):
            await context.run.feed(EndRequested(claimed.failure_code))
            return
        if status_code == KILLED_EXIT_CODE and oom_killed:
            raise StageFailed(
                FailureCode.OUT_OF_MEMORY,
                "the container was killed; the engine suspects that memory ran out",
            )
        raise self._lost(f"it ended with {status_code} and without the agent's status")

    async def _fill(self, filled: anyio.Event) -> None:
        await self._context.place.fill(self._context)
        filled.set()

    async def _bid_wait(self, stream: Attachment, filled: anyio.Event) -> None:
        """Keep PID 1 waiting for as long as the workspace takes, or until it answers no more.

        That has bounds of its own, and the lease ends it.  PID 1's bound is for a bridge that
        dies, or stands still, meanwhile: then nobody says this any more.  Ours is for a PID 1 that
        has died: Docker ends its output only when nothing is unpacked into the container any more.
        """
        while not filled.is_set():
            if self._unanswered * PREPARING_MS >= self._context.settings.supervisor_ready_ms:
                self._context.run.log.warning("PID 1 does not answer; its end is looked at")
                return
            with anyio.move_on_after(PREPARING_MS / 1000):
                await filled.wait()
                return
            self._unanswered += 1
            await self._tell(stream, STILL_PREPARING, "bid PID 1 wait")

    async def _listen(self, stream: Attachment, preparing: anyio.CancelScope) -> None:
        """To the end of its output, which is the end of the preparations as well."""
        while (piece := await stream.receive()) is not None:
            await self._take(piece)
        self._over.set()
        preparing.cancel()

    async def _until_ready(self, stream: Attachment) -> None:
        context = self._context
        await context.place.programs.start_container(context.agent_container)
        context.pid_1_runs.set()
        while not self._ready:
            piece = await stream.receive()
            if piece is None:
                return
            await self._take(piece)

    async def _give_orders(self, stream: Attachment) -> None:
        self._has_orders = True
        given = orders(self._context, self._command(), ready_ms=self._ready_ms)
        await self._tell(stream, given, "give PID 1 its orders")

    async def _tell(self, stream: Attachment, said: bytes, what: str) -> None:
        try:
            await self._send(stream, said)
        except EngineUnreachable as error:
            # PID 1 is gone, or the engine: which of them is seen when its end is looked at.
            self._context.run.log.info(f"cannot {what}", error=str(error))

    async def _require_start(self, within_ms: int) -> None:
        """The hard wall counts from the agent's start, so PID 1 must not keep that to itself."""
        with anyio.move_on_after(within_ms / 1000):
            await self._started.wait()
            return
        raise self._lost(f"it did not start the agent within {within_ms} ms")

    def _command(self) -> Command:
        lease, start = self._context.run.state.lease, self._context.start
        assert lease is not None
        return Command(
            argv=start.agent.argv,
            environment=self._environment(),
            directory=self._context.place.directory(self._context),
            hard_wall_ms=lease.hard_wall_ms,
            idle_ms=lease.idle_ms,
            max_output_bytes=start.limits.max_output_bytes,
        )

    def _environment(self) -> dict[str, str]:
        """Ours, contract, hub, secrets, the way out: each wins over those before it."""
        context, start = self._context, self._context.start
        contract = context.contract
        environment = {
            **context.place.environment(context),
            "FORGE_ATTEMPT_ID": start.attempt_id,
            "FORGE_BRANCH": start.branch,
            **context.service_environment,
            **({} if contract is None else contract.environment),
            **start.agent.env,
            **context.secrets,
            **({} if context.network is None else context.network.environment),
        }
        if start.agent.prompt is not None:
            environment["FORGE_PROMPT"] = start.agent.prompt
        return environment

    async def _send(self, stream: Attachment, frame: bytes) -> None:
        async with self._sending:
            await stream.send(frame)

    async def _take(self, piece: tuple[int, bytes]) -> None:
        channel, data = piece
        if channel != 1:
            self._stderr_tail = (self._stderr_tail + data)[-STDERR_TAIL_BYTES:]
            return
        for frame in self._reader.feed(data):
            await self._handle(frame)

    async def _handle(self, frame: Frame) -> None:
        run = self._context.run
        match frame:
            case SupervisorReady() if not self._ready:
                self._ready, self._ready_ms = True, self._context.runner.clock.now_ms()
            case SupervisorReady():
                self._unanswered = 0
            case _ if not self._has_orders:
                # It has nothing to run yet, so that it has nothing to tell either.
                return
            case ProcessStarted():
                self._started.set()
                if run.state.lease is not None and run.state.lease.hard_wall_at_ms is None:
                    await run.feed(AgentStarted())
            case LogChunk(stream, text, dropped_bytes):
                await self._log(stream, text, dropped_bytes)
            case ProcessEnded():
                self._started.set()
                self._ended = self._ended or frame
            case DeadlinePassed(which):
                self._claimed = self._claimed or which
            case FrameRefused(reason, count):
                self._refused_frames += 1
                if self._refused_frames == 1:
                    reason = run.masker.mask(reason)
                    run.log.warning("PID 1 refused a frame", reason=reason, count=count)

    async def _log(self, stream: OutputStream, text: str, dropped_bytes: int) -> None:
        run, limits = self._context.run, self._context.start.limits
        self._output_bytes += len(text.encode()) + dropped_bytes
        self._logs.put(stream, text, dropped_bytes)
        if self._output_bytes > limits.max_output_bytes:
            detail = f"the agent printed more than {limits.max_output_bytes} bytes"
            await run.feed(EndRequested(FailureCode.OUTPUT_LIMIT, detail))
        elif text:
            await run.feed(OutputSeen())

    async def _engine_status(self) -> tuple[int, bool]:
        context = self._context
        try:
            status = await context.place.programs.wait_container(
                context.agent_container, timeout_ms=context.settings.exit_ms
            )
        except EngineTimedOut:
            inspected = await context.place.programs.inspect_container(context.agent_container)
            if not inspected["State"]["Running"]:
                raise
            does = "closed its output" if self._over.is_set() else "answered no more"
            raise self._lost(f"it {does} and went on") from None
        except EngineNotFound as error:
            raise StageFailed(
                FailureCode.ENGINE_LOST, f"the agent's container is gone: {error}"
            ) from error
        return status.exit_code, status.oom_killed

    def _lost(self, why: str) -> StageFailed:
        tail = self._context.run.masker.mask(
            bytes(self._stderr_tail).decode("utf-8", "replace").strip()
        )
        said = f"; its last words: {tail[-500:]}" if tail else ""
        return StageFailed(
            FailureCode.SUPERVISOR_LOST,
            f"cannot follow PID 1 of attempt {self._context.start.attempt_id}: {why}{said}",
        )
