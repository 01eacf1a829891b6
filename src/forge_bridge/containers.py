"""Containers that a runner makes for itself, outside any attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.errors import EngineRefused
from forge_core.ports import Engine
from forge_core.read_back import read_back


async def create_as_asked(engine: Engine, name: str, request: Mapping[str, Any]) -> str:
    """Create a container and compare the engine's own view of it with the request: its id.

    :raises EngineRefused: the engine did not take over every hardening option.
    """
    container = await engine.create_container(name, request)
    if faults := read_back(request, await engine.inspect_container(container)):
        raise EngineRefused(f"cannot trust the engine with a container: {'; '.join(faults)}")
    return container
