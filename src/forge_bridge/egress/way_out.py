"""Two networks, and a proxy that alone is in both; for an attempt, and for the preflight.

The proxy is trusted with nothing: it has the hardening of an agent and no secret of the attempt,
and its configuration comes over stdin into memory, since the login of an upstream proxy may be in
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Final

import anyio

from forge_bridge.egress.look import PROXY_ALIAS, look_around
from forge_bridge.egress.networks import AgentNetwork, Maker
from forge_bridge.services.container import UNUSED_BYTES, ServiceImage
from forge_core.errors import EngineRefused, EngineUnreachable, RefusedError
from forge_core.network_spec import AGENT_NETWORK, EGRESS_NETWORK, NetworkSpec
from forge_core.ports import Attachment, Engine
from forge_core.read_back import endpoint_faults
from forge_core.redaction import Masker, MaskStream
from forge_core.sandbox_spec import PRELOAD_FILE, ContainerSpec, endpoint
from forge_core.services import AGENT_ALIAS
from forge_core.squid_conf import PROXY_PORT, UpstreamProxy, squid_conf
from forge_core.subnet_pool import proxy_address
from forge_core.wire.codes import FailureCode, ServiceName

EGRESS_PROXY: Final = "egress-proxy"
PROXY_UID: Final = 13
PROXY_MEMORY_BYTES: Final = 128 * 2**20
PROXY_CPU_MILLIS: Final = 1000
PROXY_PIDS: Final = 8
READY_MS: Final = 30_000
EXIT_MS: Final = 10_000
TAIL_CHARACTERS: Final = 4_096
TAIL_LINES: Final = 20

_END: Final = "# end of the configuration"
_CONFIGURE: Final = (
    'while IFS= read -r line && [ "$line" != "$1" ]; do printf "%s\\n" "$line"; done '
    ">/run/squid.conf && exec squid -N -f /run/squid.conf"
)


@dataclass(frozen=True, slots=True)
class Egress:
    """What the proxy is made of, and what it lets through.

    :param image: of the proxy; its signature was checked.
    :param probe_image: one with ``/usr/bin/python3``.
    """

    image: ServiceImage
    probe_image: str
    domains: Sequence[str]
    upstream: UpstreamProxy | None = None


def proxy_environment(subnet: IPv4Network) -> dict[str, str]:
    """What makes programs ask the proxy, in both spellings; what is beside them needs none."""
    proxy = f"http://{PROXY_ALIAS}:{PROXY_PORT}"
    beside = (AGENT_ALIAS, *ServiceName, str(subnet))
    direct = ",".join(("localhost", "127.0.0.1", "::1", *beside))
    variables = {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": direct}
    return {**variables, **{name.lower(): value for name, value in variables.items()}}


@asynccontextmanager
async def open_egress(maker: Maker, egress: Egress) -> AsyncIterator[AgentNetwork]:
    """Networks and a proxy that answers; the block is cancelled when the proxy ends.

    Nothing is removed here: that is the owner's teardown.

    :raises RefusedError: ``service_not_ready``: the proxy does not come up, or has ended;
        ``image_policy_denied``; ``engine_refused``: the network does not contain what is in it.
    """
    inner = await maker.create_network(AGENT_NETWORK, is_internal=True)
    outer = await maker.create_network(EGRESS_NETWORK, is_internal=False)
    container = await _create_proxy(maker, egress, inner, outer)
    masker = Masker(() if egress.upstream is None else egress.upstream.secrets)
    conf = squid_conf(
        egress.domains,
        listen_address=proxy_address(inner.subnet),
        egress_address=proxy_address(outer.subnet),
        upstream=egress.upstream,
    )
    async with (
        maker.engine.attach(container) as stream,
        anyio.create_task_group() as tasks,
    ):
        await maker.engine.start_container(container)
        tasks.start_soon(_hold, maker.engine, container, stream, masker)
        with suppress(EngineUnreachable):  # it has ended, and what holds it says why
            await stream.send(f"{conf}{_END}\n".encode())
        network = AgentNetwork(inner.name, environment=proxy_environment(inner.subnet))
        seen = await look_around(maker, network, image=egress.probe_image, wait_ms=READY_MS)
        if faults := seen.faults():
            raise RefusedError(
                f"cannot use the egress proxy of attempt {maker.owner.attempt_id}: "
                f"{'; '.join(faults)}",
                code=FailureCode.SERVICE_NOT_READY,
            )
        yield network
        tasks.cancel_scope.cancel()


async def _create_proxy(
    maker: Maker, egress: Egress, inner: NetworkSpec, outer: NetworkSpec
) -> str:
    address = proxy_address(outer.subnet)
    spec = ContainerSpec(
        owner=maker.owner,
        role=EGRESS_PROXY,
        image=egress.image.image_id,
        blanked=egress.image.variables,
        tmpfs=dict.fromkeys(egress.image.covered, UNUSED_BYTES),
        argv=("/bin/sh", "-c", _CONFIGURE, "sh", _END),
        memory_bytes=PROXY_MEMORY_BYTES,
        cpu_millis=PROXY_CPU_MILLIS,
        pids=PROXY_PIDS,
        uid=PROXY_UID,
        gid=PROXY_UID,
        network=outer.name,
        address=address,
    )
    container = await maker.create_container(spec)
    if await maker.engine.path_kind(container, PRELOAD_FILE):
        raise RefusedError(
            f"cannot use the egress proxy's image: it has {PRELOAD_FILE}",
            code=FailureCode.IMAGE_POLICY_DENIED,
        )
    own = proxy_address(inner.subnet)
    await maker.engine.connect_network(
        inner.name, container, address=str(own), aliases=(PROXY_ALIAS,)
    )
    joined = {inner.name: endpoint(own), outer.name: endpoint(address)}
    if faults := endpoint_faults(joined, await maker.engine.inspect_container(container)):
        raise EngineRefused(f"cannot connect the egress proxy: {'; '.join(faults)}")
    return container


async def _hold(engine: Engine, container: str, stream: Attachment, masker: Masker) -> None:
    """Keep the end of what the proxy prints until it ends, which it never should.

    :param masker: of the login: the proxy prints a line of its configuration that it dislikes.
    """
    tail, masking = "", defaultdict[int, MaskStream](masker.stream)
    while (piece := await stream.receive()) is not None:
        channel, data = piece
        # Masked before it is cut: of half a secret nobody knows that it is one.
        masked = masking[channel].feed(data.decode("utf-8", "replace"))
        tail = (tail + masked)[-TAIL_CHARACTERS:]
    tail += "".join(one.end() for one in masking.values())
    # An engine that is killed ends the stream as well.
    status = await engine.wait_container(container, timeout_ms=EXIT_MS)
    said = " | ".join(tail.splitlines()[-TAIL_LINES:])
    raise RefusedError(
        f"the egress proxy ended with {status.exit_code}; its last words: {said or 'none'}",
        code=FailureCode.SERVICE_NOT_READY,
    )
