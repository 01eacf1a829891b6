"""What the output of ``docker buildx build`` says about how a build ended.

The client's own verdict is the last line that begins with ``ERROR: ``; what steps print is
indented by their number and time (``--progress=plain``), so that no step can write one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from forge_core.errors import EngineOutOfDisk, EngineUnreachable, ForgeError
from forge_core.image_ports import ImageNotBuilt

NO_SPACE: Final = "no space left on device"
KEPT_BYTES: Final = 64 * 1024
_MAX_TEXT: Final = 500
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
"""Commands and paths, as BuildKit quotes them (Go's ``%q``)."""
_STEP: Final = re.compile(r'process ".*" did not complete successfully', re.DOTALL)
_UNREACHABLE: Final = re.compile(
    # The CLI's words, and gRPC's for a connection that broke.
    r"cannot connect to the docker daemon|error during connect|failed to dial"
    r"|code = unavailable|^unavailable:"
)


class Output:
    """Hands the output on, and keeps the end of it."""

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        self._kept = bytearray()

    def __call__(self, data: bytes) -> None:
        """Take the next piece."""
        self._on_output(data)
        self._kept += data
        del self._kept[:-KEPT_BYTES]

    def verdict(self) -> str:
        """Why the build failed, in the client's words; cut and on one line."""
        text = self._kept.decode("utf-8", "replace")
        lines = text.split("\n")
        verdicts = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        said = verdicts[-1] if verdicts else next((x for x in reversed(lines) if x.strip()), "")
        return " ".join(said.removeprefix("failed to solve: ").split())


def failure(what: str, verdict: str, exit_code: int) -> ForgeError:
    """The error for a build that ended by itself.

    A step's own complaint about space is no proof: what it prints is not looked at, and what a
    verdict repeats of the Dockerfile is cut out first.
    """
    by_builder = _QUOTED.sub("", _STEP.sub("", verdict)).lower()
    if NO_SPACE in by_builder:
        return EngineOutOfDisk(f"cannot {what}: {NO_SPACE}")
    if _UNREACHABLE.search(by_builder) and not _STEP.search(verdict):
        return EngineUnreachable(f"cannot {what}: the engine went away meanwhile")
    said = verdict[:_MAX_TEXT] or f"buildx ended with {exit_code}"
    return ImageNotBuilt(f"cannot {what}: {said}", reason="the build failed")
