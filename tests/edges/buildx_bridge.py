"""A process that builds, as a bridge does, for a test that kills it."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from buildx_parts import Build, from_busybox, opened

from engines import Engine


async def main(facts: str, folder: str, runner_id: str, step: str, config: str = "{}") -> None:
    engine = Engine(**json.loads(facts))
    options: dict[str, Any] = json.loads(config)
    async with opened(engine, Path(folder), runner_id, **options) as builder:
        await Build(engine, from_busybox(engine, step)).on(builder)


if __name__ == "__main__":
    asked: Callable[..., Awaitable[None]] = main
    anyio.run(asked, *sys.argv[1:])
