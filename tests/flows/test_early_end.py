"""PID 1 that ends before there is a workspace: on an engine that tells of it at once."""

from __future__ import annotations

from collections.abc import AsyncIterable
from pathlib import Path

import anyio
import pytest
from bridge_parts import memory_bridge
from memory_engine import Container, MemoryEngine


class UnpacksForEver(MemoryEngine):
    """Never comes to the end of an archive."""

    async def put_archive(self, container: str, path: str, archive: AsyncIterable[bytes]) -> None:
        await anyio.sleep_forever()


@pytest.mark.requirement("B-70")
@pytest.mark.parametrize("lies", [False, True])
async def test_its_end_is_the_end_of_the_attempt(tmp_path: Path, lies: bool) -> None:
    async def short_lived(container: Container) -> int:
        container.frame("ready")
        if lies:
            container.frame("started")
            container.frame("exit", code=0)
        return 9

    engine = UnpacksForEver()
    engine.programs["agent"] = short_lived
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        result = await bridge.hub.over(await bridge.run("true"))
        assert result["failureCode"] == "supervisor_lost"
        assert "ended with 9" in result["summary"]
        await bridge.until_idle()
