"""What every stage works with, and how a stage fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import anyio
import anyio.abc

from forge_bridge.attempt_run import AttemptRun
from forge_bridge.egress.networks import AgentNetwork, make_network, require_as_asked
from forge_bridge.images.tooling import ToolingTree
from forge_bridge.off_loop import off_loop
from forge_bridge.runner import Runner, SandboxSettings
from forge_core.attempt_events import Happened, ResourceCreated, ResourceIntended, StageEntered
from forge_core.contract import Contract
from forge_core.errors import (
    DiskUnusable,
    EngineConflict,
    EngineNotFound,
    EngineOutOfDisk,
    EngineRefused,
    EngineTimedOut,
    EngineUnreachable,
    ForgeError,
    RefusedError,
)
from forge_core.labels import Owner
from forge_core.network_spec import NetworkSpec
from forge_core.ports import Engine, ProgramRunner
from forge_core.read_back import read_back
from forge_core.redaction import Masker
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import ContainerSpec, container_request
from forge_core.wire.base import WireModel
from forge_core.wire.codes import EventType, FailureCode, ReservationState, ResourceKind, Stage
from forge_core.wire.from_hub import Start
from forge_core.wire.shapes import InventoryItem

MASKED_AT_ONCE: Final = 4096
"""Characters whose forms are made in less time (5 ms) than a worker thread is worth."""


class StageFailed(ForgeError):  # noqa: N818 - an outcome of the attempt, not an error of ours
    """A stage cannot go on, and why, in the wire's words."""

    def __init__(self, code: FailureCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def failure_of(error: ForgeError) -> tuple[FailureCode, str]:
    """The failure code of whatever ended a stage."""
    match error:
        case StageFailed():
            return error.code, str(error)
        case (
            EngineUnreachable()
            | EngineTimedOut()
            | EngineConflict()
            | EngineRefused()
            # What the dispatch had made is not there any more: it was taken, or it is another
            # engine.  A missing image has a code of its own.
            | EngineNotFound()
        ):
            return FailureCode.ENGINE_LOST, str(error)
        case EngineOutOfDisk() | DiskUnusable():
            return FailureCode.DISK_FULL, str(error)
        case RefusedError(code=code) if code in set(FailureCode):
            return FailureCode(code), str(error)
        case _:
            return FailureCode.INTERNAL_ERROR, str(error)


class Place(Protocol):
    """Where the programs of a dispatch run: in containers, or on the host."""

    @property
    def programs(self) -> ProgramRunner:
        """Where agent and helper are, once they have been created."""

    def directory(self, context: StageContext) -> str:
        """Where the agent works, as it sees it."""

    def environment(self, context: StageContext) -> Mapping[str, str]:
        """What the agent finds before anybody adds to it."""

    async def build(self, context: StageContext, beside: anyio.abc.TaskGroup) -> None:
        """Every stage from the secrets to the agent, which is created and has no orders yet.

        :param beside: watches what the agent needs while it runs, whose end is a failure.
        """

    def release(self) -> None:
        """The agent is gone: whatever is beside it may end."""

    async def fill(self, context: StageContext) -> None:
        """Complete the workspace, while PID 1 starts."""

    async def create_helper(self, context: StageContext) -> str:
        """Create what bundles the output; it waits on its standard input."""


@dataclass(slots=True)
class StageContext:
    """One dispatch on its way through the stages.

    :ivar place: where it runs; ``engine`` has nothing of one that runs on the host.
    :ivar contract: what the project asks for, granted; None: it has no contract.
    :ivar resources: of the agent, once its services have their share.
    :ivar service_environment: how the agent finds its services, their passwords included.
    :ivar inventory: what was created and is there, in that order.
    :ivar blanked: variables of the image that PID 1 must not get.
    :ivar tooling: what PID 1 runs from; None: from the image, which is the tooling image.
    :ivar network: what agent and services are in; None: no network at all.
    """

    run: AttemptRun
    start: Start
    resources: ResourceVector
    engine: Engine
    settings: SandboxSettings
    place: Place
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    contract: Contract | None = None
    image: str = ""
    blanked: tuple[str, ...] = ()
    tooling: ToolingTree | None = None
    network: AgentNetwork | None = None
    service_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    inventory: list[InventoryItem] = field(default_factory=list)
    volume: str = ""
    agent_container: str = ""
    pid_1_runs: anyio.Event = field(default_factory=anyio.Event)

    @property
    def runner(self) -> Runner:
        """The bridge that runs it."""
        return self.run.runner

    @property
    def owner(self) -> Owner:
        """Whose everything is."""
        return self.run.state.owner

    async def mask(self, secrets: Iterable[str]) -> None:
        """From here on, these and no others are masked in everything that leaves.

        :raises StageFailed: ``secret_grant_denied``: they are too large.
        """
        values = tuple(secrets)
        try:
            # A megabyte takes seconds.
            self.run.masker = await off_loop(
                partial(Masker, values), sum(map(len, values)), at_once_bytes=MASKED_AT_ONCE
            )
        except RefusedError as error:
            raise StageFailed(FailureCode.SECRET_GRANT_DENIED, str(error)) from error

    def forget_secrets(self) -> None:
        """Nothing runs any more: from here on no object of ours holds a secret.

        What Python has freed it does not overwrite; that ends with the process, or before.
        """
        self.secrets = self.service_environment = {}
        self.run.masker = Masker(())

    async def tell(self, event_type: EventType, payload: WireModel) -> None:
        """A durable event."""
        await self.run.feed(Happened(event_type, payload))

    async def enter_agent(self) -> None:
        """The workspace is complete: from here on the agent runs."""
        await self.run.feed(StageEntered(Stage.AGENT))
        self.runner.admission.transition(self.run.state.key, ReservationState.ACTIVE)
        self.runner.notify()

    async def create_container(self, spec: ContainerSpec) -> str:
        """Intent, effect, fact; then the engine's own view is compared with what was asked.

        :raises StageFailed: the engine did not take over every hardening option.
        """
        request = container_request(spec, self.settings.hardening)
        await self.run.feed(ResourceIntended(ResourceKind.CONTAINER, spec.name, spec.role))
        container = await self.engine.create_container(spec.name, request)
        await self._have(ResourceKind.CONTAINER, container, spec.name, spec.role)
        faults = read_back(request, await self.engine.inspect_container(container))
        if faults:
            raise StageFailed(
                FailureCode.ENGINE_LOST,
                f"cannot contain {spec.role} of attempt {spec.owner.attempt_id}: the engine "
                f"created it otherwise than asked: {'; '.join(faults)}"[:2000],
            )
        return container

    async def remove_container(self, container: str) -> None:
        """One that has served its purpose; what resists, teardown removes."""
        with suppress(EngineNotFound):
            await self.engine.remove_container(container)
        self.inventory = [item for item in self.inventory if item.id != container]

    async def create_network(self, role: str, *, is_internal: bool) -> NetworkSpec:
        """A network of this dispatch, in a subnet that nobody else has.

        :raises EngineRefused: there is none, or the engine made it otherwise than asked.
        """
        owner, pool = self.owner, self.runner.admission.subnets
        name = owner.name(role)
        await self.run.feed(ResourceIntended(ResourceKind.NETWORK, name, role))
        network, spec = await make_network(self.engine, pool, owner, role, is_internal=is_internal)
        await self._have(ResourceKind.NETWORK, network, name, role)
        await require_as_asked(self.engine, network, spec)
        return spec

    async def create_volume(self, role: str) -> str:
        """A named volume of this dispatch."""
        labels = self.run.state.owner.labels(role)
        return await self.create(
            ResourceKind.VOLUME, role, lambda name: self.engine.create_volume(name, labels)
        )

    async def create(
        self, kind: ResourceKind, role: str, make: Callable[[str], Awaitable[str]]
    ) -> str:
        """Intent, effect, fact.

        :param make: takes the name and returns the id.
        """
        name = self.run.state.owner.name(role)
        await self.run.feed(ResourceIntended(kind, name, role))
        identity = await make(name)
        await self._have(kind, identity, name, role)
        return identity

    async def _have(self, kind: ResourceKind, identity: str, name: str, role: str) -> None:
        await self.run.feed(ResourceCreated(kind, identity, name, role))
        created_at = self.runner.clock.utc()
        self.inventory.append(
            InventoryItem(kind=kind, id=identity, name=name, role=role, created_at=created_at)
        )
