"""The Docker CLI as a tool of ours: its own folder, its own environment, and nothing ambient.

The folder is made anew at each start and holds a configuration without credentials, so that no
build can use the operator's; only :meth:`DockerCli.pull` runs with the operator's configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import IO, Final

import anyio

from forge_core.errors import EngineTimedOut, RefusedError
from forge_edges.docker_context import DockerEndpoint, config_directory, plugin_directories
from forge_edges.process import Bounds, Outcome, ProcessTimedOut, first_failure, run, stream

UNUSABLE: Final = "builder_unusable"
COMMAND_TIMEOUT_MS: Final = 60_000
MAX_OUTPUT_BYTES: Final = 1 << 20
LAUNCHER_MS: Final = 15_000
"""The launcher kills what is below it until nothing is left, and gives up before."""

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DockerCli:
    """Runs ``docker`` against one engine.

    :param executable: a path, or a name that is looked up in ``PATH`` (B-23).
    :param directory: a folder of our own, wiped by :meth:`prepare`.
    :param environ: the bridge's environment: ``PATH``, ``HOME`` and ``DOCKER_CONFIG`` of it say
        where the executable, its plugins and the operator's credentials are.
    """

    def __init__(
        self,
        executable: str,
        endpoint: DockerEndpoint,
        directory: Path,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.directory = directory
        self._executable = executable
        self._endpoint = endpoint
        self._operator = environ
        self._launcher = (files("forge_supervisor") / "host_command.py").read_text("utf-8")

    async def prepare(self) -> None:
        """Make the folder, without what an earlier life left in it.

        :raises RefusedError: there is no such executable, or the folder cannot be made.
        """
        await anyio.to_thread.run_sync(self._prepare)

    async def remove(self) -> None:
        """Take the folder away."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(self.directory, True))

    @property
    def _docker(self) -> Path:
        # Named so, and alone on the way: buildx starts "docker" to reach a builder's container.
        return self.directory / "bin" / "docker"

    @property
    def environment(self) -> dict[str, str]:
        """Everything that a command of ours sees."""
        return {
            "PATH": f"{self._docker.parent}:{SYSTEM_PATH}",
            "HOME": str(self.directory),
            "LC_ALL": "C.UTF-8",
            "DOCKER_CONFIG": str(self.directory / "config"),
            **self._endpoint.environment,
        }

    async def run(
        self, arguments: Sequence[str | Path], *, timeout_ms: int = COMMAND_TIMEOUT_MS
    ) -> Outcome:
        """One short command; a non-zero status is an answer.

        :raises RefusedError: it cannot be run, or says far too much.
        :raises EngineTimedOut: it did not end in time.
        """
        return await self._run(arguments, self.environment, timeout_ms)

    async def pull(self, reference: str, *, timeout_ms: int) -> Outcome:
        """Let the engine fetch an image, with the operator's credentials and helpers."""
        kept = {name: self._operator[name] for name in ("PATH", "HOME") if name in self._operator}
        operator = {
            **kept,
            "DOCKER_CONFIG": str(config_directory(self._operator)),
            **self._endpoint.environment,
        }
        return await self._run(("pull", "--quiet", reference), operator, timeout_ms)

    async def save(self, reference: str, directory: Path, *, timeout_ms: int) -> None:
        """Unpack an image of the engine's as an OCI image layout (Engine 25 and later).

        :raises RefusedError: the engine or ``tar`` would not.
        :raises EngineTimedOut: it did not end in time.
        """
        what = f"export image {reference}"
        source, sink = os.pipe()
        with os.fdopen(source, "rb") as reading, os.fdopen(sink, "wb") as writing:
            outcomes: list[Outcome] = []

            async def one(argv: Sequence[str | Path], **streams: IO[bytes]) -> None:
                bounds = Bounds(timeout_ms)
                cwd, env = self.directory, self.environment
                outcomes.append(await run(argv, env=env, cwd=cwd, bounds=bounds, **streams))
                for stream in streams.values():
                    stream.close()

            unpack = ("tar", "--extract", "--no-same-owner", "--directory", directory)
            try:
                with first_failure():
                    async with anyio.create_task_group() as group:
                        group.start_soon(lambda: one(unpack, input=reading))
                        await one([self._docker, "save", reference], stdout=writing)
            except ProcessTimedOut as error:
                raise EngineTimedOut(f"cannot {what}: {error}") from None
        for outcome in outcomes:
            if outcome.exit_code != 0:
                raise RefusedError(f"cannot {what}: {outcome.complaint()}", code=UNUSABLE)

    async def build(
        self,
        arguments: Sequence[str | Path],
        context: AsyncIterable[bytes],
        *,
        environment: Mapping[str, str],
        timeout_ms: int,
        on_output: Callable[[bytes], None],
    ) -> int:
        """``docker buildx build``: its status.

        Runs below a launcher, so that all of the client dies with this process, however that
        ends; the builder ends a step whose client is gone.

        :raises ProcessTimedOut: it took too long.
        """
        launcher = [sys.executable, "-I", "-S", "-c", self._launcher]
        return await stream(
            [*launcher, self._docker, *arguments],
            env={**self.environment, **environment},
            cwd=self.directory,
            bounds=Bounds(timeout_ms, grace_ms=LAUNCHER_MS),
            input=context,
            on_output=on_output,
            name="docker buildx build",
        )

    async def _run(
        self,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str],
        timeout_ms: int,
    ) -> Outcome:
        try:
            return await run(
                [self._docker, *arguments],
                env=environment,
                cwd=self.directory,
                bounds=Bounds(timeout_ms, stdout_bytes=MAX_OUTPUT_BYTES),
            )
        except ProcessTimedOut as error:
            words = " ".join(map(str, arguments[:2]))
            raise EngineTimedOut(f"cannot finish docker {words}: {error}") from None

    def _prepare(self) -> None:
        found = shutil.which(self._executable, path=self._operator.get("PATH"))
        if found is None:
            raise RefusedError(
                f"cannot build images: there is no {self._executable}; install the Docker CLI "
                "with buildx, or name it with FORGE_DOCKER_EXECUTABLE",
                code=UNUSABLE,
                field="FORGE_DOCKER_EXECUTABLE",
            )
        plugins = plugin_directories(config_directory(self._operator))
        config = {"cliPluginsExtraDirs": [str(path) for path in plugins]}
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            for folder in ("", "bin", "config"):
                (self.directory / folder).mkdir(mode=0o700)
            self._docker.symlink_to(Path(found).absolute())
            (self.directory / "config" / "config.json").write_text(json.dumps(config))
        except OSError as error:
            raise RefusedError(
                f"cannot make the builder's folder {self.directory}: {error}", code="path_refused"
            ) from error
