"""What can be reached from the agent's network, seen by a container in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Final

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_bridge.egress.networks import AgentNetwork, Maker
from forge_bridge.programs import source
from forge_core.errors import EngineRefused
from forge_core.sandbox_spec import ContainerSpec
from forge_core.squid_conf import PROXY_PORT

PROXY_ALIAS: Final = "egress-proxy"
PROBE_ROLE: Final = "egress-probe"
PROBE_MEMORY_BYTES: Final = 64 * 2**20
PROBE_CPU_MILLIS: Final = 1000
PROBE_PIDS: Final = 32
PROBE_MS: Final = 30_000
"""What it may take besides the wait for the proxy."""

MAX_ANSWER_BYTES: Final = 16_384
FORBIDDEN: Final = 403
PUBLIC_NAME: Final = "example.com"
"""Something that a resolver that asks outside has an answer about."""

Address = tuple[str, int]
"""Host and port."""


class Seen(BaseModel):
    """What the probe saw (``probe.py``); a claim of a container, so bounded."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    statuses: Annotated[dict[str, int], Field(max_length=8)]
    gateways: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=64)]
    answers: Annotated[tuple[int, ...], Field(max_length=8)]
    reached: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=64)]

    def faults(self) -> tuple[str, ...]:
        """What lets something out, one sentence each."""
        faults = [
            f"a request that must be refused ({name}) was answered with {status or 'nothing'}"
            for name, status in self.statuses.items()
            if status != FORBIDDEN
        ]
        if self.gateways:
            faults.append(f"there is a way out: route {', '.join(self.gateways)}")
        if any(self.answers):
            faults.append(f"the engine's resolver answers questions about {PUBLIC_NAME}")
        if self.reached:
            faults.append(f"the host can be reached at {', '.join(self.reached)}")
        return tuple(faults)


async def look_around(
    maker: Maker,
    network: AgentNetwork,
    *,
    image: str,
    wait_ms: int | None,
    addresses: Sequence[Address] = (),
) -> Seen:
    """Look from a container in the agent's network, once the proxy answers.

    :param image: one with ``/usr/bin/python3``.
    :param wait_ms: how long the proxy may take to come up; None: there is none.
    :param addresses: where nobody may be.
    :raises RefusedError: ``engine_refused``: the container did not run as it should.
    """
    orders = {
        "proxy": None if wait_ms is None else (PROXY_ALIAS, PROXY_PORT),
        # Nobody can list it: it is made of this owner's own digest.
        "refused": f"n{maker.owner.name(PROBE_ROLE)[-24:]}.example",
        "public": PUBLIC_NAME,
        "addresses": addresses,
        "waitS": (wait_ms or 0) / 1000,
    }
    spec = ContainerSpec(
        owner=maker.owner,
        role=PROBE_ROLE,
        image=image,
        argv=("/usr/bin/python3", "-I", "-S", "-c", source("probe"), json.dumps(orders)),
        memory_bytes=PROBE_MEMORY_BYTES,
        cpu_millis=PROBE_CPU_MILLIS,
        pids=PROBE_PIDS,
        network=network.name,
        name_servers=network.name_servers,
    )
    container = await maker.create_container(spec)
    answer, complaint = bytearray(), bytearray()
    with anyio.move_on_after(((wait_ms or 0) + PROBE_MS) / 1000):
        async with maker.engine.attach(container) as stream:
            await maker.engine.start_container(container)
            while (piece := await stream.receive()) is not None:
                kept = answer if piece[0] == 1 else complaint
                kept += piece[1][: MAX_ANSWER_BYTES - len(kept)]
    await maker.remove_container(container)
    try:
        return Seen.model_validate_json(bytes(answer))
    except ValidationError:
        said = " ".join(complaint.decode("utf-8", "replace").split())[-500:]
        raise EngineRefused(f"cannot read what the egress probe saw: {said or 'nothing'}") from None
