"""The contract of the engine port, kept by real engines through the Docker door."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from engine_contract import EngineContract, Subject

from engines import Engine as BedEngine
from forge_core.labels import Owner
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine


@pytest.fixture
async def subject(engine: BedEngine, runner_id: str) -> AsyncIterator[Subject]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    owner = Owner(runner_id, "instance", "attempt", 1, "project", "domain")
    async with DockerEngine.connect(endpoint) as door:
        subject = Subject(door, owner, engine.busybox_image)
        yield subject
        await subject.remove_everything()


@pytest.mark.engine("d26", "d20", "r26", "r20")
class TestDockerEngine(EngineContract):
    """Engine 26.1 and 20.10, rootful and rootless."""
