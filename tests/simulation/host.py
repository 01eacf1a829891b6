"""The host of a simulated bridge, on which nothing runs: its operator does not allow it."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from forge_core.ports import Attachment, EngineResource, ExitStatus, HostProgram, HostResult


class NoHostCommands:
    """:class:`forge_core.ports.HostCommands`: protocol v1 is off."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        directory: str,
        environment: Mapping[str, str],
        timeout_ms: int,
        max_output_bytes: int,
    ) -> HostResult:
        """Nobody may ask."""
        raise AssertionError(argv)


class NoHost:
    """:class:`forge_core.ports.HostRuntime`: there is nothing, and nobody may ask for more."""

    async def list_resources(self, labels: Mapping[str, str]) -> Sequence[EngineResource]:
        """Nothing."""
        return ()

    def environment(self) -> Mapping[str, str]:
        """Nobody may ask."""
        raise AssertionError

    def path(self, volume: str) -> str:
        """Nobody may ask."""
        raise AssertionError(volume)

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> str:
        """Nobody may ask."""
        raise AssertionError(name)

    async def unpack(self, volume: str, archive: AsyncIterable[bytes]) -> None:
        """Nobody may ask."""
        raise AssertionError(volume)

    async def create_container(self, name: str, program: HostProgram) -> str:
        """Nobody may ask."""
        raise AssertionError(name)

    async def start_container(self, container: str) -> None:
        """Nobody may ask."""
        raise AssertionError(container)

    async def inspect_container(self, container: str) -> Mapping[str, Any]:
        """Nobody may ask."""
        raise AssertionError(container)

    async def wait_container(self, container: str, *, timeout_ms: int) -> ExitStatus:
        """Nobody may ask."""
        raise AssertionError(container)

    def attach(self, container: str) -> AbstractAsyncContextManager[Attachment]:
        """Nobody may ask."""
        raise AssertionError(container)

    async def remove_container(self, container: str) -> None:
        """Nobody may ask."""
        raise AssertionError(container)

    async def remove_volume(self, name: str) -> None:
        """Nobody may ask."""
        raise AssertionError(name)

    async def remove_network(self, network: str) -> None:
        """Nobody may ask."""
        raise AssertionError(network)

    async def network_endpoints(self, network: str) -> Sequence[str]:
        """Nobody may ask."""
        raise AssertionError(network)

    async def disconnect_network(self, network: str, container: str) -> None:
        """Nobody may ask."""
        raise AssertionError(network)
