"""The main job, end to end: hub → offer → hardened container → one commit → proven cleanup.

Everything is real: the hub serves HTTP and SignalR on a loopback port, the bridge is the daemon
itself in a process of its own, the engine is a Docker Engine.
"""

# ruff: noqa: E402
from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the second of imports too

import argparse
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import Process
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape

from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from forge_hub.server import running_hub
from forge_hub.settings import HubSettings

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "sample-project"
TESTBED = ROOT / "scripts" / "testbed"
TRUST_DOMAIN = "demo"
AGENT = "python3 -m unittest -v && python3 release.py"
PROBE_S = 3
DEADLINE_S = 120

console = Console(highlight=False)


class DemoError(Exception):
    """The demo cannot go on; the text says why and what to do."""


@contextmanager
def step(text: str) -> Iterator[None]:
    """One line for what happens, and how long it took."""
    began = time.monotonic()
    yield
    took = f"[dim]({time.monotonic() - began:.1f} s)[/]"
    console.print(f"[green]✓[/] {escape(text)} {took}", soft_wrap=True)


@dataclass(frozen=True)
class EngineChoice:
    """Which engine is used, and the image in it."""

    docker_host: str
    tooling_image: str
    private: bool


async def reachable_endpoint() -> str | None:
    """The engine that this account can already use, if any."""
    try:
        endpoint = resolve_endpoint(None, os.environ)
        with anyio.fail_after(PROBE_S):
            async with DockerEngine.connect(endpoint) as engine:
                await engine.facts()
    except Exception as error:
        if os.environ.get("DOCKER_HOST"):  # somebody meant that one
            why = str(error) or f"it did not answer within {PROBE_S} s"
            console.print(f"· The engine that DOCKER_HOST names is not used: {escape(why)}")
        return None
    path = endpoint.socket_path
    if path is None:
        console.print(f"· {endpoint.host} is not used: the demo needs an engine at a unix socket")
    return f"unix://{path}" if path else None


def run_testbed(*arguments: str, always: bool = False) -> str:
    """Run the test bed's command; its progress lines go to our standard error.

    :param always: no Ctrl-C keeps it from doing its work.
    """
    # The terminal interrupts every process of the group; and sudo must stay in it to ask.
    prefix = ["env", "--ignore-signal=INT"] if always else []
    command = [*prefix, sys.executable, str(TESTBED), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DemoError("no Docker engine could be used; the lines above say what is missing")
    return done.stdout


@asynccontextmanager
async def chosen_engine(keep: bool) -> AsyncIterator[EngineChoice]:
    """One that is there, or a private one that the last demo which uses it takes down."""
    endpoint = await reachable_endpoint()
    if endpoint is not None:
        socket = endpoint.removeprefix("unix://")
        with step(f"Docker engine at {endpoint}, with the tooling image"):
            output = await anyio.to_thread.run_sync(
                run_testbed, "tooling-image", "--socket", socket
            )
        yield EngineChoice(endpoint, output.strip(), private=False)
        return
    with (ROOT / ".cache" / "demo.lock").open("w") as users:
        await anyio.to_thread.run_sync(fcntl.flock, users, fcntl.LOCK_SH)
        is_refused = False
        try:
            with step("A private Docker engine, with the tooling image"):
                try:
                    output = await anyio.to_thread.run_sync(run_testbed, "demo-engine", "up")
                except DemoError:
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    is_refused = True
                    raise
            answer = json.loads(output)
            docker_host = f"unix://{answer['socket']}"
            yield EngineChoice(docker_host, answer["tooling_image"], private=True)
        finally:
            if not keep and not is_refused:
                with suppress(BlockingIOError), anyio.CancelScope(shield=True):
                    # Fails while another demo holds it: that one takes the engine down.
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    down = partial(run_testbed, "demo-engine", "down", always=True)
                    await anyio.to_thread.run_sync(down)


def git(repository: Path, *arguments: str) -> str:
    """Git in the demo's own repository."""
    identity = ("-c", "user.name=Demo", "-c", "user.email=demo@localhost")
    command = ["git", *identity, "-C", str(repository), *arguments]
    # In a session of its own, a Ctrl-C at the terminal is for the demo alone.
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, start_new_session=True
    )
    return done.stdout.strip()


def make_repository(directory: Path) -> tuple[Path, str]:
    """A real repository with the sample project as its one commit."""
    repository = directory / "sample-project"
    shutil.copytree(SAMPLE, repository)
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message=First version")
    return repository, git(repository, "rev-parse", "HEAD")


@asynccontextmanager
async def bridge_process(
    directory: Path, engine: EngineChoice, hub_url: str, token: str, repository: Path
) -> AsyncIterator[tuple[Path, Process]]:
    """``forge-bridge run`` in a process of its own; yields its state root and that process."""
    state_root = directory / "state"
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FORGE_")},
        "DOCKER_HOST": engine.docker_host,
        "FORGE_SERVER_URL": hub_url,
        "FORGE_API_TOKEN_FILE": str(token_file),
        "FORGE_TRUST_DOMAIN_ID": TRUST_DOMAIN,
        "FORGE_AGENT_TOOLING_IMAGE": engine.tooling_image,
        "FORGE_SANDBOX_STATE_ROOT": str(state_root),
        "FORGE_MINIMUM_WORKSPACE_BYTES": "1GiB",
        "FORGE_LOG_FORMAT": "json",
    }
    command = [sys.executable, "-m", "forge_bridge"]
    add = [*command, "add-repo", "sample-project", str(repository)]
    await anyio.run_process(add, env=environment, start_new_session=True)
    with (directory / "bridge.log").open("wb") as log:
        # In a session of its own: Ctrl-C would be a signal before ours, and ours the second one.
        process = await anyio.open_process(
            [*command, "run"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield state_root, process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(shield=True):
            await process.wait()


class Hub:
    """The hub's REST API, as any program would use it."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def get(self, path: str) -> Any:
        """The decoded answer; anything but success ends the demo."""
        async with self._http.get(f"/api/v1{path}") as answer:
            if answer.status >= 300:
                raise DemoError(f"the hub answered {answer.status} to {path}")
            return await answer.json()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Likewise."""
        async with self._http.post(f"/api/v1{path}", json=body) as answer:
            if answer.status >= 300:
                raise DemoError(f"the hub answered {answer.status}: {await answer.text()}")
            return await answer.json()

    async def online_runner(self, bridge: Process, log: Path) -> dict[str, Any]:
        """The runner, once it has registered."""
        for _ in range(DEADLINE_S * 10):
            if bridge.returncode is not None:
                break
            for runner in await self.get("/runners"):
                if runner["connected"]:
                    return dict(runner)
            await anyio.sleep(0.1)
        said = await anyio.Path(log).read_text()
        raise DemoError(f"the bridge did not come online; its log: {said[-2000:]}")

    async def events(self, session_id: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Server-sent events until the session is over and its teardown known."""
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        path = f"/api/v1/sessions/{session_id}/events"
        async with self._http.get(path, timeout=timeout) as stream:
            kind = ""
            async for line in stream.content:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    yield kind, json.loads(value)


TOLD = {
    "offer.reserved": "the bridge has room and holds a reservation",
    "image.resolved": "the image is pinned by digest and is there already",
    "inventory": "container and volume created, the commit unpacked",
    "agent.started": "the agent runs under our supervisor as PID 1",
    "agent.exited": "the agent has ended",
    "output.imported": "its changes came back as one commit, checked as hostile",
    "teardown.started": "tearing down",
    "teardown.finished": "everything was observed gone",
}


class Story:
    """Tells what happens, a line each; the agent's output comes in pieces of lines."""

    def __init__(self) -> None:
        self._rest = ""

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        """One thing that happened."""
        if kind == "event":
            told = TOLD.get(data["type"], "")
            console.print(f"  [cyan]{data['type']:<18}[/] {told}")
        elif kind == "log":
            *lines, self._rest = (self._rest + data["payload"]["text"]).split("\n")
            for line in lines:
                # An agent's escape sequences are its own; this terminal is the reader's.
                shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
                console.print(f"  [dim]│ {escape(shown)}[/]", soft_wrap=True)


async def run_session(hub: Hub, commit: str) -> dict[str, Any]:
    """Dispatch, watch, and return what the hub knows once the cleanup is proven."""
    session = await hub.post(
        "/sessions",
        {
            "projectId": "sample",
            "trustDomainId": TRUST_DOMAIN,
            "policy": "sandbox_preferred",
            "repository": "sample-project",
            "inputCommit": commit,
            "branch": "release",
            "resources": {"slots": 1, "memoryBytes": 512 << 20, "cpuMillis": 1000, "pids": 128},
            "agent": {"provider": "command", "argv": ["sh", "-c", AGENT]},
            "limits": {"hardWallMs": 60_000, "idleMs": 30_000, "maxOutputBytes": 1 << 20},
            "leaseTtlMs": 6_000,
        },
    )
    story = Story()
    async for kind, data in hub.events(session["sessionId"]):
        story.tell(kind, data)
    return dict(await hub.get(f"/sessions/{session['sessionId']}/diagnostics"))


def summarise(engine: EngineChoice, facts: Any, found: dict[str, Any], store: Path) -> None:
    """What a newcomer wants to know."""
    session = found["session"]
    result = session["result"]
    commit = result["resultCommit"]
    console.rule("what happened")
    console.print(f"[bold]ran[/]        sh -c '{AGENT}'")
    where = f"Docker {facts.version}, {'rootless' if facts.rootless else 'rootful'}"
    whose = "private to this demo" if engine.private else "the one that was there"
    console.print(f"[bold]where[/]      {where}, {whose}")
    console.print(
        "[bold]contained[/]  no network, read-only root, no capabilities, uid 1000;\n"
        "           512 MiB, 1 CPU, 128 processes; a lease of 6 s, renewed under a MAC"
    )
    console.print(
        f"[bold]outcome[/]    {result['outcome']}, cleanup {result['cleanup']}, "
        f"exit code {result['exitCode']}"
    )
    console.print(f"[bold]came back[/]  commit {commit}")
    for line in git(store, "show", "--stat", "--format=%s", commit).splitlines():
        console.print(f"           {escape(line)}")
    for report in found["cleanupReports"]:
        for resource in report["resources"]:
            console.print(
                f"[bold]{resource['outcome']}[/]    {resource['kind']} {resource['name']}"
            )


async def demo(keep: bool) -> None:
    """Everything, and everything taken down again."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forge-demo-", ignore_cleanup_errors=True) as name:
        async with chosen_engine(keep) as engine:
            await tell_everything(engine, Path(name))
    took = f"[dim](all in {time.monotonic() - began:.1f} s)[/]"
    console.print(f"[bold]left over[/]  nothing  {took}")


async def tell_everything(engine: EngineChoice, directory: Path) -> None:
    """Hub, bridge and one attempt; returns when all of it is gone again."""
    runner_token, api_token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    headers = {"Authorization": f"Bearer {api_token}"}
    settings = HubSettings(
        port=0,
        database_url=SecretStr(f"sqlite:///{directory}/hub.sqlite3"),
        runner_token=SecretStr(runner_token),
        api_token=SecretStr(api_token),
    )
    repository, commit = make_repository(directory)
    async with (
        running_hub(settings) as hub_server,
        bridge_process(directory, engine, hub_server.url, runner_token, repository) as (
            state_root,
            bridge,
        ),
        aiohttp.ClientSession(hub_server.url, headers=headers) as http,
    ):
        hub = Hub(http)
        with step("The bridge is connected, and its runner registered"):
            runner = await hub.online_runner(bridge, directory / "bridge.log")
        console.print("[green]✓[/] One attempt is dispatched:")
        try:
            with anyio.fail_after(DEADLINE_S):
                found = await run_session(hub, commit)
        except TimeoutError as error:
            raise DemoError(f"the attempt did not end within {DEADLINE_S} s") from error
        endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.docker_host})
        async with DockerEngine.connect(endpoint) as door:
            facts = await door.facts()
            left = await door.list_resources({"dev.forge.runner-id": runner["runnerId"]})
        store = state_root / "repositories" / "sample-project.git"
        summarise(engine, facts, found, store)
    if found["session"]["result"]["outcome"] != "succeeded" or left:
        names = ", ".join(resource.name for resource in left) or "nothing"
        raise DemoError(f"not as it should be: {found['session']['result']}, left: {names}")


async def until_signalled(keep: bool) -> bool:
    """The demo; false when a signal ended it, and then too everything is taken down."""
    finished = False
    async with anyio.create_task_group() as watching:
        # Watched from outside of what a signal ends: taking down takes longer than the next one.
        with anyio.CancelScope() as scope:
            watching.start_soon(watch_signals, scope)
            try:
                await demo(keep)
                finished = True
            except DemoError:
                if not scope.cancel_called:
                    raise  # else a child felt the same Ctrl-C
        watching.cancel_scope.cancel()
    return finished


async def watch_signals(scope: anyio.CancelScope) -> None:
    """The first signal begins the end; more of them change nothing."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for _ in signals:
            if not scope.cancel_called:
                console.print("· Interrupted: taking everything down")
                scope.cancel()


def main() -> int:
    """Exit status 0 when everything was as it should be, 130 when it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="The main job, end to end: an embedded hub, a bridge, a real sandbox.",
    )
    parser.add_argument("--keep", action="store_true", help="leave the private engine running")
    options = parser.parse_args()
    failures: list[BaseException] = []
    finished = False
    try:
        finished = anyio.run(until_signalled, options.keep)
    except* DemoError as errors:
        failures = list(leaves(errors))
    for failure in failures:
        console.print(f"[red]✗[/] {escape(str(failure))}", soft_wrap=True)
    if failures:
        return 1
    return 0 if finished else 130


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The errors in groups of groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
