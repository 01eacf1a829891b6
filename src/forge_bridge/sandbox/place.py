"""A dispatch in containers: the stages between its secrets and its agent, and what surrounds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio.abc

from forge_bridge.sandbox.image import resolve_image
from forge_bridge.sandbox.network import AttemptNetwork
from forge_bridge.sandbox.services import Services
from forge_bridge.sandbox.stage import StageContext
from forge_bridge.sandbox.workspace import create_workspace, fill_workspace, helper_spec
from forge_core.attempt_events import StageEntered
from forge_core.ports import Engine
from forge_core.sandbox_spec import WORKSPACE
from forge_core.wire.codes import Stage


@dataclass(frozen=True, slots=True)
class InContainers:
    """Implements :class:`forge_bridge.sandbox.stage.Place`."""

    programs: Engine
    _network: AttemptNetwork = field(default_factory=AttemptNetwork)
    _services: Services = field(default_factory=Services)

    def directory(self, context: StageContext) -> str:
        """On the workspace volume."""
        return WORKSPACE

    def environment(self, context: StageContext) -> Mapping[str, str]:
        """Nothing of the image's own environment."""
        return {
            "HOME": "/tmp",  # noqa: S108 - inside the container
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
        }

    async def build(self, context: StageContext, beside: anyio.abc.TaskGroup) -> None:
        """The image, the network, the services, and the agent's container around the workspace."""
        await context.run.feed(StageEntered(Stage.IMAGE))
        await resolve_image(context)
        await self._network.open(context, beside)
        await self._services.start(context, beside)
        await context.run.feed(StageEntered(Stage.WORKSPACE))
        await create_workspace(context)

    def release(self) -> None:
        """Of proxy and services, whose end is none of the attempt's any more."""
        self._services.release()
        self._network.release()

    async def fill(self, context: StageContext) -> None:
        """Unpack the commit through the agent's container."""
        await fill_workspace(context)

    async def create_helper(self, context: StageContext) -> str:
        """See :func:`forge_bridge.sandbox.workspace.helper_spec`."""
        return await context.create_container(helper_spec(context))
