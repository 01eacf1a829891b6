"""Stage ``services``: servers beside the agent, ready before it starts (B-55).

Every service has the agent's hardening, its PID 1 and its lease, a share of its resources, and a
password of its own, which the agent's environment and the service alone are told, both over
stdin.  One that ends while it is needed ends the attempt, with its last words.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import anyio
import anyio.abc

from forge_bridge.groups import first_error
from forge_bridge.images.tooling import ToolingTree
from forge_bridge.sandbox.pid_1 import Command, Renewals, is_plausible, orders
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_bridge.services.container import (
    ServiceImage,
    service_argv,
    service_environment,
    service_spec,
)
from forge_bridge.services.images import fit_image
from forge_bridge.services.process import ServiceProcess
from forge_core.attempt_events import StageEntered
from forge_core.errors import EngineTimedOut
from forge_core.read_back import address_in
from forge_core.resources import ResourceVector
from forge_core.services import (
    CATALOGUE,
    ServiceKind,
    read_ready,
    serve_request,
    share_out,
    variables,
    version_fits,
)
from forge_core.wire.base import MAX_INT
from forge_core.wire.codes import FailureCode, Stage
from forge_core.wire.from_hub import MAX_WALL_MS


class Services:
    """The services of one attempt, from their start until nobody needs them any more."""

    def __init__(self) -> None:
        self._scopes: list[anyio.CancelScope] = []

    async def start(self, context: StageContext, tasks: anyio.abc.TaskGroup) -> None:
        """Return once all of them are ready; from here on the agent's resources are the rest.

        :param tasks: watches them; the end of one is a failure of the attempt.
        :raises StageFailed: ``service_not_ready``, ``image_policy_denied``, ``contract_invalid``,
            ``secret_grant_denied``.
        """
        names = [service.name for service in context.start.services]
        if not names:
            return
        await context.run.feed(StageEntered(Stage.SERVICES))
        shares = share_out(context.resources, names)
        context.resources = shares.agent
        passwords = {name: context.runner.clock.new_id() for name in names}
        await context.mask((*context.secrets.values(), *passwords.values()))
        tooling = await _tooling(context)
        with first_error():
            async with anyio.create_task_group() as starting:
                for name in names:
                    service = _Service(
                        context, CATALOGUE[name], passwords[name], shares.services[name], tooling
                    )
                    starting.start_soon(tasks.start, self._hold, service)

    def release(self) -> None:
        """The agent is gone: whatever they do now, it ends nothing."""
        for scope in self._scopes:
            scope.cancel()

    async def _hold(self, service: _Service, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            await service.hold(task_status)


class _Service:
    """One of them, in its container."""

    def __init__(
        self,
        context: StageContext,
        kind: ServiceKind,
        password: str,
        share: ResourceVector,
        tooling: ToolingTree,
    ) -> None:
        self._context = context
        self._kind = kind
        self._password = password
        self._share = share
        self._tooling = tooling
        self._renewals = Renewals(context.run)

    async def hold(self, task_status: anyio.abc.TaskStatus[None]) -> None:
        """From its creation to its end, which is a failure of the attempt."""
        context, network = self._context, self._context.network
        assert network is not None
        image = await self._image()
        spec = service_spec(
            image,
            self._tooling,
            owner=context.run.state.owner,
            role=self._kind.role,
            share=self._share,
            network=network.name,
            aliases=(self._kind.name.value,),
            name_servers=network.name_servers,
        )
        container = await context.create_container(spec)
        with ExitStack() as renewed:
            async with (
                context.engine.attach(container) as stream,
                anyio.create_task_group() as tasks,
            ):
                process = ServiceProcess(
                    stream, partial(self._orders, image, renewed), context.run.masker
                )
                tasks.start_soon(self._renewals.hand_on, process.send)
                await context.engine.start_container(container)
                await self._until_ready(process, container)
                await self._tell_agent(process, container)
                task_status.started()
                await process.until_end()
                raise await self._ended(process, container, "while it was needed")

    async def _image(self) -> ServiceImage:
        """The image that the preflight has tried, as long as the engine has it."""
        context, name = self._context, self._kind.name
        tried = context.runner.services.get(name)
        if tried is None:
            raise StageFailed(
                FailureCode.IMAGE_POLICY_DENIED,
                f"cannot run service {name}: none of its images can be used here any more; "
                "forge sandbox doctor says why",
            )
        await fit_image(context.engine, tried.reference)
        asked = [s.version for s in context.start.services if s.name is name]
        if context.contract is not None:
            asked += [s.version for s in context.contract.services if s.name is name]
        for version in asked:
            if not version_fits(version, tried.version):
                raise StageFailed(
                    FailureCode.CONTRACT_INVALID,
                    f"cannot run service {name} {version}: this runner has {tried.version}",
                )
        return tried

    def _orders(self, image: ServiceImage, renewed: ExitStack) -> bytes:
        # From here on renewals are handed on; one that came before is in the orders.
        renewed.enter_context(self._renewals.taken())
        context = self._context
        assert context.network is not None
        proxy = context.network.environment.get("HTTP_PROXY")
        command = Command(
            argv=service_argv(self._tooling, serve_request(self._kind, self._share, proxy=proxy)),
            environment=service_environment(image, self._password),
            directory="/",
            hard_wall_ms=MAX_WALL_MS,
            idle_ms=MAX_WALL_MS,
            max_output_bytes=MAX_INT,
            program=f"service {self._kind.name}",
            too_large=FailureCode.SERVICE_NOT_READY,
        )
        return orders(context, command, ready_ms=context.runner.clock.now_ms())

    async def _until_ready(self, process: ServiceProcess, container: str) -> None:
        ready_ms, line = self._context.settings.service_ready_ms, None
        with anyio.move_on_after(ready_ms / 1000) as waiting:
            line = await process.first_line()
        if waiting.cancelled_caught:
            raise self._failed(process, f"was not ready within {ready_ms} ms")
        if line is None:
            raise await self._ended(process, container, "before it was ready")
        read_ready(line)

    async def _tell_agent(self, process: ServiceProcess, container: str) -> None:
        context, name = self._context, self._kind.name
        assert context.network is not None
        inspected = await context.engine.inspect_container(container)
        address = address_in(inspected, context.network.name)
        if address is None:
            # What has ended since it said that it is ready has no address any more.
            raise self._failed(process, "has no address in the agent's network")
        context.network = context.network.reaching(str(address))
        context.service_environment = {
            **context.service_environment,
            **variables(name, self._password, str(address)),
        }

    async def _ended(self, process: ServiceProcess, container: str, when: str) -> StageFailed:
        """What its end means for the attempt.

        :raises EngineUnreachable: the engine is gone, and with it what it ran.
        """
        context, claimed = self._context, process.claimed
        if claimed is not None and is_plausible(context, claimed):
            return StageFailed(
                claimed.failure_code, f"service {self._kind.name} was ended by the {claimed}"
            )
        try:
            status = await context.engine.wait_container(
                container, timeout_ms=context.settings.exit_ms
            )
        except EngineTimedOut:
            return self._failed(process, f"closed its output {when}")
        how = process.ended.in_words if process.ended else f"ended with {status.exit_code}"
        oom = " (the engine suspects that memory ran out)" if status.oom_killed else ""
        return self._failed(process, f"{how}{oom} {when}")

    def _failed(self, process: ServiceProcess, what: str) -> StageFailed:
        return StageFailed(
            FailureCode.SERVICE_NOT_READY,
            f"cannot use service {self._kind.name} of attempt {self._context.start.attempt_id}: "
            f"it {what}; its last words: {process.last_words}",
        )


async def _tooling(context: StageContext) -> ToolingTree:
    if context.tooling is not None:
        return context.tooling
    assert context.runner.tooling is not None
    return await context.runner.tooling.provide()
