"""Protocol v1: one command on the host, one slot, one result (B-03)."""

from __future__ import annotations

import anyio
import structlog

from forge_bridge.runner import Runner
from forge_core.errors import DiskUnusable, ForgeError
from forge_core.ports import HostCommands, HostResult
from forge_core.ready import Message
from forge_core.wire.from_bridge import SubmitLegacyResult
from forge_core.wire.from_hub import Dispatch
from forge_core.wire.limits import MAX_MESSAGE_BYTES, cut_text

logger = structlog.get_logger(__name__)

MAX_OUTPUT_BYTES = MAX_MESSAGE_BYTES - 6_000
MAX_ERROR_BYTES = 2_000


class LegacyDispatches:
    """The v1 dispatches that run right now."""

    def __init__(self, runner: Runner, host: HostCommands) -> None:
        self._runner = runner
        self._host = host
        self._scopes: dict[str, anyio.CancelScope] = {}

    @property
    def is_idle(self) -> bool:
        """Nothing runs, and every result is in the outbox."""
        return not self._scopes

    async def handle(self, dispatch: Dispatch) -> None:
        """Take a slot and run, or say why not; a second packet with the same id is ignored."""
        runner, dispatch_id = self._runner, dispatch.dispatch_id
        if runner.admission.was_held((dispatch_id, 0)):
            return
        verdict = runner.admission.hold_legacy(dispatch_id, runner.facts())
        if not verdict.accepted:
            await self._refuse(dispatch_id, f"{verdict.code}: {verdict.detail or 'not now'}")
            return
        path = runner.repositories.paths().get(dispatch.repository)
        if path is None:
            runner.admission.free((dispatch_id, 0))
            await self._refuse(dispatch_id, f"unknown_repository: {dispatch.repository}")
            return
        self._scopes[dispatch_id] = anyio.CancelScope()
        runner.notify()
        runner.tasks.start_soon(self._run, dispatch, path)

    async def refuse(self, dispatch_id: str, error: str) -> None:
        """What cannot be taken is reported back, not dropped (B-03).

        One that runs or has run is not: this is a copy of it.
        """
        if not self._runner.admission.was_held((dispatch_id, 0)):
            await self._refuse(dispatch_id, error)

    async def cancel(self, dispatch_id: str) -> None:
        """End it if it runs."""
        scope = self._scopes.get(dispatch_id)
        if scope is not None:
            scope.cancel()

    def cancel_all(self) -> None:
        """The bridge stops."""
        for scope in self._scopes.values():
            scope.cancel()

    async def _run(self, dispatch: Dispatch, path: str) -> None:
        error: str | None = "the bridge was stopped at once"
        result = HostResult(None, b"", truncated=False, timed_out=False)
        try:
            with self._scopes[dispatch.dispatch_id] as scope:
                result = await self._host.run(
                    dispatch.command,
                    directory=path,
                    environment=dispatch.env,
                    timeout_ms=dispatch.timeout_ms,
                    max_output_bytes=MAX_OUTPUT_BYTES,
                )
            if scope.cancelled_caught:
                error = "cancelled"
            else:
                error = f"timed out after {dispatch.timeout_ms} ms" if result.timed_out else None
        except ForgeError as failure:
            error = str(failure)
        except Exception as bug:
            logger.exception("a v1 dispatch failed unexpectedly", dispatch_id=dispatch.dispatch_id)
            error = f"{type(bug).__name__} in the bridge; see its log"
        finally:
            with anyio.CancelScope(shield=True):
                await self._report(dispatch.dispatch_id, result, error)
                del self._scopes[dispatch.dispatch_id]
                self._runner.admission.free((dispatch.dispatch_id, 0))
                self._runner.notify()

    async def _report(self, dispatch_id: str, result: HostResult, error: str | None) -> None:
        text = result.output.decode("utf-8", "replace")
        output, cut = cut_text(text, MAX_OUTPUT_BYTES)
        await self._submit(
            SubmitLegacyResult(
                dispatch_id=dispatch_id,
                succeeded=error is None and result.exit_code == 0,
                exit_code=result.exit_code,
                output=output,
                truncated=cut or result.truncated,
                error=None if error is None else cut_text(error, MAX_ERROR_BYTES)[0],
            )
        )

    async def _refuse(self, dispatch_id: str, error: str) -> None:
        try:
            result = SubmitLegacyResult(
                dispatch_id=dispatch_id,
                succeeded=False,
                output="",
                truncated=False,
                error=cut_text(error, MAX_ERROR_BYTES)[0],
            )
        except ValueError:
            logger.warning("a malformed dispatch without a usable id", error=error)
            return
        await self._submit(result)

    async def _submit(self, result: SubmitLegacyResult) -> None:
        message = Message(f"{result.dispatch_id}.legacy", "SubmitLegacyResult", result.to_wire())
        try:
            await self._runner.outbox.put(message)
        except DiskUnusable as failure:
            logger.error(
                "cannot store a result", dispatch_id=result.dispatch_id, error=str(failure)
            )
