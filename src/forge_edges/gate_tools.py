"""How the programs of the image gates are run (sandbox.md, Images).

Each run has an empty environment plus what such a tool needs, a private directory as its working
and temporary directory (so that no configuration file lies in its way and nothing of it is left),
a deadline and bounded output; its process group ends with it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from forge_core.errors import RefusedError
from forge_edges.docker_context import DockerEndpoint
from forge_edges.durable_file import on_disk
from forge_edges.process import (
    Bounds,
    Outcome,
    OutputOverflow,
    ProcessNotStarted,
    ProcessTimedOut,
    run,
)

INHERITED: Final = frozenset(
    {"HOME", "PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"}
    | {"DOCKER_CONFIG", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
)
"""What a tool sees of the bridge's environment: where the operator's registry credentials,
vulnerability database and certificates are, and the way out.  Never a ``FORGE_`` variable, and
none of a tool's own, which could turn a gate off; a wrapper script can set those."""

COMPLAINT_CHARACTERS: Final = 300


class ToolFailed(RefusedError):  # noqa: N818 - says what is the case
    """The program did not do its work; the message says how it ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="tool_failed")


@dataclass(frozen=True, slots=True)
class ToolSetting:
    """What the runs of all gate tools share.

    :param environment: of the tools; see :func:`tool_environment`.
    :param scratch: a directory of ours in which each run has one for itself; made when it is
        missing, and emptied by its owner when nothing runs.
    """

    environment: Mapping[str, str]
    scratch: Path


def tool_environment(
    environ: Mapping[str, str], endpoint: DockerEndpoint | None = None
) -> dict[str, str]:
    """The environment of a tool; with ``endpoint`` it can ask that engine."""
    inherited = {name: environ[name] for name in INHERITED if name in environ}
    return inherited if endpoint is None else {**inherited, **endpoint.environment}


async def run_tool(
    executable: str,
    arguments: Callable[[Path], Sequence[str]],
    setting: ToolSetting,
    bounds: Bounds,
    *,
    files: Mapping[str, bytes] | None = None,
) -> Outcome:
    """Run a tool to its end, whatever its exit code.

    :param arguments: from the run's own directory.
    :param files: what lies in that directory when it starts, by name.
    :raises ToolFailed: it cannot be run, took too long, or printed too much.
    """
    directory = await on_disk(_prepare, setting.scratch, files or {})
    try:
        return await run(
            [executable, *arguments(directory)],
            env={**setting.environment, "TMPDIR": str(directory)},
            cwd=directory,
            bounds=bounds,
        )
    except (ProcessNotStarted, ProcessTimedOut, OutputOverflow) as error:
        raise ToolFailed(str(error)) from None
    finally:
        with anyio.CancelScope(shield=True):
            await on_disk(_remove, directory)


def complaint(outcome: Outcome) -> str:
    """The last line that the tool said on standard error, with its exit code."""
    said = (outcome.complaints() or ["it said nothing"])[-1]
    return f"exit code {outcome.exit_code}: {said[:COMPLAINT_CHARACTERS]}"


def _prepare(scratch: Path, files: Mapping[str, bytes]) -> Path:
    try:
        scratch.mkdir(mode=0o700, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="gate-", dir=scratch))
    except OSError as error:
        raise ToolFailed(f"cannot make a directory in {scratch}: {error.strerror}") from None
    try:
        for name, content in files.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        _remove(directory)
        raise ToolFailed(f"cannot write into {directory}: {error.strerror}") from None
    return directory


def _remove(directory: Path) -> None:
    # What cannot be removed now goes with the scratch directory at the next start.
    shutil.rmtree(directory, ignore_errors=True)
