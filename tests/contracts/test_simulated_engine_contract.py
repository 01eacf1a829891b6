"""The contract of the engine port, kept by the simulated engine too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from engine_contract import EngineContract, Subject

from forge_core.labels import Owner
from forge_core.ports import EngineImage, EngineResource
from simulation.engine import Container, Program, SimulatedEngine
from simulation.engine_door import EngineDoor
from simulation.faults import Faults
from simulation.shell import Shell
from simulation.world import World

IMAGE = "sha256:" + "1" * 64


class NobodyWatches:
    """What the engine does is seen through its door only."""

    def created(self, resource: EngineResource) -> None: ...
    def started(self, container: Container) -> None: ...
    def removed(self, resource: EngineResource) -> None: ...


def program(container: Container) -> Program | None:
    command = container.request["Entrypoint"]
    return Shell(container, command[2]) if command[0] == "/bin/sh" else None


async def let_through(_what: str, _arguments: tuple[Any, ...]) -> None:
    return


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    world = World(1, asyncio.get_running_loop())
    engine = SimulatedEngine(world, Faults(), NobodyWatches(), program, frozenset({IMAGE}))
    owner = Owner("runner", "instance", "attempt", 1, "project", "domain")

    def make_image(labels: Mapping[str, str]) -> str:
        identity = f"sha256:{len(engine.images):064x}"
        engine.images[identity] = EngineImage(identity, (), dict(labels))
        return identity

    subject = Subject(EngineDoor(engine, let_through), owner, IMAGE, make_image)
    yield subject
    await subject.remove_everything()
    assert engine.resources() == []
    assert [image for image in engine.images.values() if image.names] == []
    assert world.violations == []


class TestSimulatedEngine(EngineContract):
    """Without faults it cannot be told from a real one."""
