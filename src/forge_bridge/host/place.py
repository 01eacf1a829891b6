"""A dispatch on the host: the stages between its secrets and its agent, and what surrounds it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.sandbox.contract import adopt_contract
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_bridge.sandbox.workspace import tell_inventory
from forge_core.attempt_events import StageEntered
from forge_core.errors import EngineNotFound, RefusedError
from forge_core.offer_rules import refuse_host
from forge_core.ports import HostProgram, HostRuntime
from forge_core.wire.codes import (
    EventType,
    FailureCode,
    Policy,
    ResourceKind,
    Stage,
    WarningCode,
)
from forge_core.wire.events import Warning_

AGENT: Final = "host-agent"
HELPER: Final = "host-helper"
WORKSPACE: Final = "host-workspace"
TREE: Final = "tree"
HELPER_ADDRESS_BYTES: Final = 2 << 30

_INTERPRETER: Final = (sys.executable, "-I")
_SUPERVISOR: Final = (*_INTERPRETER, "-m", "forge_supervisor.host_agent")
_LAUNCHER: Final = (*_INTERPRETER, "-m", "forge_supervisor.host_command")


def refusal(run: AttemptRun) -> str | None:
    """Why the dispatch may not run on the host at this moment; None: it may.

    What allowed it when it was offered may have ended, or been taken back, since then.
    """
    assert run.offer is not None, run.state.key
    verdict = refuse_host(run.offer, run.runner.facts())
    return None if verdict is None else f"{verdict.code}: {verdict.detail}"


@dataclass(frozen=True, slots=True)
class OnHost:
    """Implements :class:`forge_bridge.sandbox.stage.Place`."""

    programs: HostRuntime
    _agent_gone: anyio.Event = field(default_factory=anyio.Event)

    def directory(self, context: StageContext) -> str:
        """The input commit, unpacked."""
        return f"{self.programs.path(context.volume)}/{TREE}"

    def environment(self, context: StageContext) -> Mapping[str, str]:
        """What is let through of the bridge's own, with a home and a scratch directory that go."""
        base = self.programs.path(context.volume)
        own = {"HOME": f"{base}/home", "TMPDIR": f"{base}/scratch"}
        return {**self.programs.environment(), **own}

    async def build(self, context: StageContext, beside: anyio.abc.TaskGroup) -> None:
        """The directory with the input commit, and the agent's supervisor, which waits.

        :raises StageFailed: ``start_timeout``: the host may not be used any more.
        """
        # No image is built for it.
        context.runner.admission.release_builds(context.run.state.key)
        context.runner.notify()
        await _warn(context)
        await adopt_contract(context)
        await context.run.feed(StageEntered(Stage.WORKSPACE))
        labels = context.owner.labels(WORKSPACE)
        context.volume = await context.create(
            ResourceKind.VOLUME, WORKSPACE, lambda name: self.programs.create_volume(name, labels)
        )
        start = context.start
        archive = context.runner.git.workspace_archive(
            start.repository, start.input_commit, uid=0, gid=0, directory=TREE
        )
        async with aclosing(archive):
            await self.programs.unpack(context.volume, archive)
        why = refusal(context.run)
        if why is not None:
            raise StageFailed(FailureCode.START_TIMEOUT, f"cannot start on the host: {why}")
        context.agent_container = await self._start(context, AGENT, _SUPERVISOR)
        await tell_inventory(context)

    def release(self) -> None:
        """Only now is there a helper, in a directory in which nobody works any more."""
        self._agent_gone.set()

    async def fill(self, context: StageContext) -> None:
        """It was complete before there was an agent."""

    async def create_helper(self, context: StageContext) -> str:
        """Once the agent has gone, and whatever it may have left, so that nobody has a hand in it.

        :raises StageFailed: ``agent_failed``: what it left cannot be ended.
        """
        await self._agent_gone.wait()
        try:
            with suppress(EngineNotFound):
                await self.programs.remove_container(context.agent_container)
        except RefusedError as error:
            why = f"what the agent left behind may still write its result: {error}"
            raise StageFailed(FailureCode.AGENT_FAILED, why) from error
        bundler = (sys.executable, "-I", "-S", "-c", context.settings.bundle_source)
        argv = (*_LAUNCHER, *bundler, self.directory(context))
        return await self._start(context, HELPER, argv, memory_bytes=HELPER_ADDRESS_BYTES)

    async def _start(
        self,
        context: StageContext,
        role: str,
        argv: Sequence[str],
        *,
        memory_bytes: int | None = None,
    ) -> str:
        """Without a secret: those come with the orders, over the standard input."""
        directory = self.programs.path(context.volume)
        program = HostProgram(
            argv=argv,
            directory=directory,
            environment={**self.programs.environment(), "HOME": directory, "TMPDIR": directory},
            labels=context.owner.labels(role),
            memory_bytes=memory_bytes,
        )
        return await context.create(
            ResourceKind.CONTAINER, role, lambda name: self.programs.create_container(name, program)
        )


async def _warn(context: StageContext) -> None:
    """Whoever looks at the attempt later must see at once that nothing contained it."""
    offer = context.run.offer
    assert offer is not None, context.run.state.key
    why = "that is its policy"
    if offer.policy is not Policy.HOST and offer.host_fallback is not None:
        permission = offer.host_fallback
        why = f"fallback until {permission.expires_at}: {permission.reason}"
    detail = f"runs on the host without a sandbox, on the host's network: {why}"[:2000]
    await context.tell(EventType.WARNING, Warning_(code=WarningCode.NOT_CONTAINED, detail=detail))
