"""A builder on a real engine, and what tests want of it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from engines import Engine
from forge_core.image_ports import BuildLimits, BuildRequest
from forge_core.labels import BUILDER, Owner
from forge_core.ports import Disk
from forge_edges.buildx import BuilderConfig, BuildxBuilder
from forge_edges.clock import SystemClock
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

MIB = 2**20
LIMITS = BuildLimits(memory_bytes=256 * MIB, cpu_quota_us=150_000, nofile=1024, pids=200)
TRUST_DOMAIN = "test-domain"


def environ(engine: Engine) -> dict[str, str]:
    """The bridge's environment, with what must never reach a build."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "DOCKER_CONFIG": engine.docker_config,
        "DOCKER_HOST": engine.base_url,
        "FORGE_API_TOKEN": "canary-of-the-bridge",
    }


@asynccontextmanager
async def opened(
    engine: Engine,
    folder: Path,
    runner_id: str,
    *,
    disk: Disk | None = None,
    environment: Mapping[str, str] | None = None,
    **config: Any,
) -> AsyncIterator[BuildxBuilder]:
    """A builder of an instance of ``runner_id``; its limits are small enough to be pushed at.

    :param environment: in addition to that of :func:`environ`.
    """
    variables = {**environ(engine), **(environment or {})}
    endpoint = resolve_endpoint(None, variables)
    settings = BuilderConfig(
        **{
            "directory": folder / "builder",
            "docker_executable": engine.docker_executable,
            "limits": LIMITS,
            **config,
        }
    )
    async with (
        DockerEngine.connect(endpoint) as door,
        BuildxBuilder.open(
            door,
            endpoint,
            Owner.of_runner(BUILDER, runner_id, "instance-1", TRUST_DOMAIN),
            settings,
            clock=SystemClock(),
            disk=disk,
            environ=variables,
        ) as builder,
    ):
        yield builder


@dataclass
class Build:
    """One build as a test wants it, and what it said."""

    engine: Engine
    dockerfile: str
    tag: str = "forge-test-build:1"
    files: Mapping[str, bytes] = field(default_factory=dict)
    sources: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    output: bytearray = field(default_factory=bytearray)
    output_bytes: int = 0

    async def on(self, builder: BuildxBuilder) -> str:
        """Build it; the image's id."""
        sources = (self.engine.busybox_image,) if self.sources is None else self.sources
        options: dict[str, Any] = {"labels": {}, "timeout_ms": 60_000, **self.options}
        request = BuildRequest(self.tag, "Dockerfile", sources, **options)
        return await builder.build(request, self._context(), on_output=self._take)

    @property
    def said(self) -> str:
        """The last megabyte of the output."""
        return self.output.decode(errors="replace")

    def _take(self, data: bytes) -> None:
        self.output_bytes += len(data)
        self.output += data
        del self.output[:-MIB]

    async def _context(self) -> AsyncIterator[bytes]:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            own = {"Dockerfile": self.dockerfile.encode(), "nonce": os.urandom(16)}
            for name, content in {**own, **self.files}.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        data = buffer.getvalue()
        for start in range(0, len(data), 65_536):
            yield data[start : start + 65_536]


def from_busybox(engine: Engine, *steps: str) -> str:
    """A Dockerfile whose steps are in no cache."""
    return "\n".join([f"FROM {engine.busybox_image}", "USER 0", "COPY nonce /", *steps]) + "\n"


def remove_image(engine: Engine, reference: str) -> None:
    """Take a tag out of the engine; absent is no error."""
    engine.api.call("DELETE", f"/images/{quote(reference)}", {"force": "1"})


def try_once_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, no builder may be tried again: what it does is known of the same builder."""

    async def refuse(_builder: BuildxBuilder) -> bool:
        raise AssertionError("it was tried before")

    monkeypatch.setattr(BuildxBuilder, "_try", refuse)
