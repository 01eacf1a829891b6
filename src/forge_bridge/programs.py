"""Our programs that run inside containers, as they were when this process began.

Read once: after an upgrade in place, what runs beside an agent is still what runs in it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

import anyio.to_thread

PROGRAMS: Final = {
    "supervisor": "forge_supervisor",
    "bundle": "forge_supervisor",
    "service": "forge_supervisor",
    "probe": "forge_bridge.egress",
}
"""By name, the package that each is in."""


@cache
def source(program: str) -> str:
    """The text of one of :data:`PROGRAMS`."""
    return files(PROGRAMS[program]).joinpath(f"{program}.py").read_text("utf-8")


async def read_programs() -> None:
    """Have all of them, so that nobody waits for a disk later."""
    for program in PROGRAMS:
        await anyio.to_thread.run_sync(source, program)
