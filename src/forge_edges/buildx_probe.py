"""Before the first build: is buildx there, and does the builder refuse what a policy denies?"""

from __future__ import annotations

from typing import Final

from forge_core.errors import RefusedError
from forge_edges.buildx_cli import UNUSABLE, DockerCli

FORBIDDEN: Final = "http://127.0.0.1:9/"
"""What the probe adds; the port is that of discard (RFC 863), where nothing answers."""

PROBE: Final = f"FROM scratch\nADD {FORBIDDEN} /\n".encode()
"""A Dockerfile that only a policy can refuse: without one, the builder tries to fetch."""

_MAX_TEXT: Final = 500


def keeps_policies(said: str) -> bool:
    """Whether a builder keeps source policies, by what it said about :data:`PROBE`.

    :raises RefusedError: code ``builder_unusable``: it did not get so far.
    """
    if f'source "{FORBIDDEN}" denied by policy' in said:
        return True
    if FORBIDDEN in said:
        return False
    verdict = " ".join(said.split())[-_MAX_TEXT:]
    raise RefusedError(f"cannot use the builder: {verdict}", code=UNUSABLE)


async def prepare_buildx(cli: DockerCli, *, builder: str, container: str | None) -> None:
    """See that buildx is there, and let ``builder`` mean BuildKit in a container.

    :raises RefusedError: code ``builder_unusable``: it is not there.
    """
    asked = await cli.run(("buildx", "version"))
    if asked.exit_code == 0 and container is not None:
        await cli.run(("buildx", "rm", "--force", builder))
        asked = await cli.run(
            (
                *("buildx", "create", f"--name={builder}", "--driver=remote"),
                f"docker-container://{container}",
            )
        )
    if asked.exit_code != 0:
        raise RefusedError(
            f"cannot use docker buildx: {asked.complaint()}; install the CLI's buildx plugin",
            code=UNUSABLE,
            field="FORGE_DOCKER_EXECUTABLE",
        )
