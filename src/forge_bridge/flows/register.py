"""The first call of every connection: who we are and what we can do (B-06)."""

from __future__ import annotations

from forge_bridge.flows.settings import apply_settings
from forge_bridge.hub_link import call
from forge_bridge.runner import Runner
from forge_core.errors import RefusedError
from forge_core.ports import BridgeConnection
from forge_core.wire.base import PROTOCOL_VERSION
from forge_core.wire.from_bridge import RegisterAck, RegisterRunner
from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes


async def register(runner: Runner, connection: BridgeConnection) -> int:
    """Register and return the heartbeat interval that the hub asks for, in milliseconds.

    :raises RefusedError: the hub does not accept this runner; the text says why.
    """
    await runner.repositories.refresh()
    answer = await call(connection, registration(runner), RegisterAck)
    if not answer.accepted:
        raise RefusedError(
            f"cannot register runner {runner.identity.runner_id}: the hub says "
            f"{answer.reason or 'no'}{': ' + answer.detail if answer.detail else ''}",
            code=answer.reason or "registration_refused",
        )
    apply_settings(runner, answer.settings)
    return answer.heartbeat_interval_ms


def registration(runner: Runner) -> RegisterRunner:
    """What the hub is told first.

    :raises RefusedError: code ``configuration``: it is more than a hub takes (protocol.md, Size).
    """
    identity = runner.identity
    names = tuple(sorted(runner.repositories.paths()))
    request = RegisterRunner(
        protocol_version=PROTOCOL_VERSION,
        runner_id=identity.runner_id,
        runner_instance_id=identity.runner_instance_id,
        trust_domain_id=identity.trust_domain_id,
        bridge_version=identity.bridge_version,
        host_name=identity.host_name,
        platform=identity.platform,
        capabilities=runner.capabilities,
        repositories=names,
    )
    size_bytes = measured_size_bytes(request.to_wire())
    if size_bytes > MAX_MESSAGE_BYTES:
        raise RefusedError(
            f"cannot register runner {identity.runner_id}: the message has {size_bytes} bytes, "
            f"{MAX_MESSAGE_BYTES} is the most that a hub takes, and the names of its {len(names)} "
            f"repositories have {sum(map(len, names))} of them; serve fewer on this runner "
            "(forge-bridge remove-repo NAME), or under shorter names",
            code="configuration",
        )
    return request
