"""Stage ``workspace``: the agent's container with exactly the input commit in its volume."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Final

import anyio

from forge_bridge.egress.trust import ca_archive
from forge_bridge.images.tooling import PID_1_ENVIRONMENT
from forge_bridge.sandbox.stage import StageContext
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import (
    SANDBOX_GID,
    SANDBOX_UID,
    WORKSPACE,
    WORKSPACE_VOLUME,
    ContainerSpec,
    VolumeMount,
)
from forge_core.services import AGENT_ALIAS
from forge_core.wire.codes import EventType, ResourceKind
from forge_core.wire.events import Inventory
from forge_core.wire.limits import split_inventory

INTERPRETER: Final = "/usr/bin/python3"
"""Part of the tooling image's contract (docs/reference/tooling-image.md)."""

HELPER_MEMORY_BYTES: Final = 512 * 2**20
HELPER_PIDS: Final = 64


async def create_workspace(context: StageContext) -> None:
    """Create the volume and the agent's container around it; nothing runs yet."""
    context.volume = await context.create_volume("workspace")
    context.agent_container = await context.create_container(agent_spec(context, context.volume))
    await tell_inventory(context)


async def fill_workspace(context: StageContext) -> None:
    """Have the engine unpack the commit onto the volume, through the container that holds it.

    Nothing of the project runs for it, and no path of the host is mounted.  It begins once PID 1
    runs, which runs nothing before it has its orders: the engine starts no container while it
    unpacks into it.
    """
    start, custom_ca = context.start, context.settings.custom_ca
    archive = context.runner.git.workspace_archive(
        start.repository,
        start.input_commit,
        uid=SANDBOX_UID,
        gid=SANDBOX_GID,
        directory=WORKSPACE.removeprefix(f"{WORKSPACE_VOLUME}/"),
    )
    async with aclosing(archive):
        await _unpack(context, archive)
    if custom_ca is not None and context.network is not None:
        await _unpack(context, ca_archive(custom_ca))


async def _unpack(context: StageContext, archive: AsyncIterable[bytes]) -> None:
    pieces = _once_it_runs(context.pid_1_runs, archive)
    async with aclosing(pieces):
        await context.engine.put_archive(context.agent_container, WORKSPACE_VOLUME, pieces)


async def _once_it_runs(runs: anyio.Event, archive: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """The first piece is there by then: Git has worked while the container started."""
    async for piece in archive:
        await runs.wait()
        yield piece


def agent_spec(context: StageContext, volume: str) -> ContainerSpec:
    """The agent's container; secrets and the agent's environment go in over stdin only."""
    resources: ResourceVector = context.resources
    tooling, contract = context.tooling, context.contract
    interpreter = (INTERPRETER,) if tooling is None else tooling.interpreter
    network = context.network
    return ContainerSpec(
        owner=context.run.state.owner,
        role="agent",
        image=context.image,
        argv=(*interpreter, "-I", "-S", "-c", context.settings.supervisor_source),
        environment=PID_1_ENVIRONMENT,
        blanked=context.blanked,
        memory_bytes=resources.memory_bytes,
        cpu_millis=resources.cpu_millis,
        pids=resources.pids,
        tmp_exec=contract is not None and contract.tmp.executable,
        network=None if network is None else network.name,
        aliases=() if network is None else (AGENT_ALIAS,),
        name_servers=() if network is None else network.name_servers,
        mounts=(
            VolumeMount(volume, WORKSPACE_VOLUME, read_only=False),
            *(() if tooling is None else (tooling.mount,)),
        ),
    )


def helper_spec(context: StageContext) -> ContainerSpec:
    """The output's helper: the agent's hardening, no secrets, the workspace read-only."""
    return ContainerSpec(
        owner=context.run.state.owner,
        role="helper",
        image=context.settings.tooling_image,
        argv=(INTERPRETER, "-I", "-S", "-c", context.settings.bundle_source, WORKSPACE),
        memory_bytes=HELPER_MEMORY_BYTES,
        cpu_millis=context.resources.cpu_millis,
        pids=HELPER_PIDS,
        resolves_localhost=False,
        tmp_bytes=HELPER_MEMORY_BYTES // 2,
        mounts=(VolumeMount(context.volume, WORKSPACE_VOLUME, read_only=True),),
    )


async def tell_inventory(context: StageContext) -> None:
    """All that is held for the attempt, now that the agent can start."""
    of_kind = {kind: [i for i in context.inventory if i.kind is kind] for kind in ResourceKind}
    inventory = Inventory(
        containers=tuple(of_kind[ResourceKind.CONTAINER]),
        networks=tuple(of_kind[ResourceKind.NETWORK]),
        volumes=tuple(of_kind[ResourceKind.VOLUME]),
    )
    for part in split_inventory(inventory):
        await context.tell(EventType.INVENTORY, part)
