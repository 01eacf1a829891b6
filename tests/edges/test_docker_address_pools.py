"""An engine that has no subnet left says so, and serves again once one is given back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from forge_core.errors import EngineRefused
from forge_core.labels import Owner, runner_filter
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from needs import require_root
from own_daemon import OwnDaemon

MOST_NETWORKS = 200
"""The default pools hold 31 subnets, those of the test bed 64 (Engine 20.10, 26)."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=["d26", "d20"])
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnDaemon]:
    """Nobody else wants a network of it."""
    require_root("run a private Docker daemon")
    own = OwnDaemon(tmp_path_factory.mktemp("bed"), request.param)
    yield own
    own.remove()


@pytest.fixture
async def door(daemon: OwnDaemon) -> AsyncIterator[DockerEngine]:
    async with DockerEngine.connect(resolve_endpoint(None, {"DOCKER_HOST": daemon.host})) as door:
        yield door


async def create(door: DockerEngine, owner: Owner, role: str) -> str:
    request = {"Driver": "bridge", "Internal": True, "Labels": owner.labels(role)}
    return await door.create_network(owner.name(role), request)


@pytest.mark.requirement("B-42", "B-84")
async def test_an_engine_out_of_address_pools_names_the_cause_and_the_remedy(
    door: DockerEngine, runner_id: str
) -> None:
    owner = Owner(runner_id, "instance", "attempt", 1, "project", "domain")
    networks: list[str] = []

    async def use_all() -> None:
        while len(networks) < MOST_NETWORKS:
            networks.append(await create(door, owner, f"n{len(networks)}"))

    with pytest.raises(EngineRefused) as refused:
        await use_all()
    assert type(refused.value) is EngineRefused
    name = owner.name(f"n{len(networks)}")
    assert str(refused.value).startswith(f"cannot create network {name}: ")
    assert "address pools are used up: remove networks, or configure" in str(refused.value)
    listed = await door.list_resources(runner_filter(runner_id))
    assert {network.id for network in listed} == set(networks), "nothing half made is left"

    await door.remove_network(networks[0])
    await create(door, owner, "again")
