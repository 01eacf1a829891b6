"""The order in which a workspace is filled while its container starts."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from forge_bridge.egress.trust import CA_NAME
from forge_bridge.sandbox.stage import StageContext
from forge_bridge.sandbox.workspace import fill_workspace

pytestmark = pytest.mark.requirement("B-70")


class Parts:
    """A Git store and an engine that take down what they are asked for."""

    def __init__(self) -> None:
        self.begun = False
        self.unpacked: list[bytes] = []

    async def workspace_archive(self, *_: Any, **_more: Any) -> AsyncGenerator[bytes]:
        self.begun = True
        yield b"the tree"

    async def put_archive(self, _id: str, _path: str, archive: AsyncIterable[bytes]) -> None:
        self.unpacked.append(b"".join([piece async for piece in archive]))


async def test_git_works_while_the_container_starts_and_certificates_come_last() -> None:
    parts, runs = Parts(), anyio.Event()
    context = SimpleNamespace(
        start=SimpleNamespace(repository="sample", input_commit="c" * 40),
        settings=SimpleNamespace(custom_ca=b"a certificate"),
        network=SimpleNamespace(),
        runner=SimpleNamespace(git=parts),
        engine=parts,
        agent_container="agent",
        pid_1_runs=runs,
    )
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill_workspace, cast("StageContext", context))
            await anyio.wait_all_tasks_blocked()
            assert parts.begun
            assert parts.unpacked == []
            runs.set()
    tree, certificates = parts.unpacked
    assert tree == b"the tree"
    with tarfile.open(fileobj=io.BytesIO(certificates)) as tar:
        assert tar.getnames() == [CA_NAME]
