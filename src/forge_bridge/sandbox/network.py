"""Stage ``network``: an agent reaches nothing but what the hub has granted it (B-54).

::

    none               no network at all; with services, one that they and the agent are in
    public_allowlist   the same, and a proxy in it that lets through the domains of the start
    open_public        a network that leads anywhere; for developers, never sandbox_required
"""

from __future__ import annotations

from dataclasses import replace

import anyio
import anyio.abc

from forge_bridge.egress.networks import AgentNetwork
from forge_bridge.egress.trust import trust_environment
from forge_bridge.egress.way_out import Egress, open_egress
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_bridge.services.images import fit_image
from forge_core.attempt_events import StageEntered
from forge_core.network_spec import AGENT_NETWORK
from forge_core.subnet_pool import networks_needed
from forge_core.wire.codes import FailureCode, NetworkPolicy, Stage


class AttemptNetwork:
    """The networks of one attempt, and the proxy as long as the agent needs it."""

    def __init__(self) -> None:
        self._needed = anyio.CancelScope()

    async def open(self, context: StageContext, beside: anyio.abc.TaskGroup) -> None:
        """Return once everything is there, and the proxy answers.

        :param beside: watches the proxy, whose end is a failure of the attempt.
        :raises StageFailed: ``image_policy_denied``.
        :raises RefusedError: ``service_not_ready``; there is no subnet, or no containment.
        """
        policy = context.start.network.policy
        if not networks_needed(policy, context.start.services):
            return
        await context.run.feed(StageEntered(Stage.NETWORK))
        match policy:
            case NetworkPolicy.PUBLIC_ALLOWLIST:
                network = await beside.start(self._hold_egress, context)
            case NetworkPolicy.OPEN_PUBLIC:
                spec = await context.create_network(AGENT_NETWORK, is_internal=False)
                network = AgentNetwork(spec.name, name_servers=())
            case NetworkPolicy.NONE:
                spec = await context.create_network(AGENT_NETWORK, is_internal=True)
                network = AgentNetwork(spec.name)
        if context.settings.custom_ca is not None:
            trust = trust_environment()
            network = replace(network, environment={**network.environment, **trust})
        context.network = network

    def release(self) -> None:
        """The agent is gone: whatever the proxy does now, it ends nothing."""
        self._needed.cancel()

    async def _hold_egress(
        self, context: StageContext, *, task_status: anyio.abc.TaskStatus[AgentNetwork]
    ) -> None:
        trial = context.runner.egress
        if trial is None or trial.image is None:
            raise StageFailed(
                FailureCode.IMAGE_POLICY_DENIED,
                "cannot run the egress proxy: its image cannot be used here any more; "
                "forge sandbox doctor says why",
            )
        await fit_image(context.engine, trial.image.reference)
        domains = context.start.network.domains
        egress = Egress(trial.image, context.settings.tooling_image, domains, trial.upstream)
        with self._needed:
            async with open_egress(context, egress) as network:
                task_status.started(network)
                await anyio.sleep_forever()
