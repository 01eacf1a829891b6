"""A pass over five hundred resources of a real engine, next to the bare calls that it is made of.

    python benchmarks/reap_pass.py IMAGE [--host unix:///run/docker.sock] [--rounds 3]
        [--dispatches 100] [--base 10.211.0.0/19] [--json]

A dispatch has two containers (created from IMAGE, which is pinned, and not started), a network or
two, and a volume or two: five resources on average.  *idle* is a pass that finds all of them in
use; its floor is one list of each kind and the engine's id.  *removing* is a pass after their
dispatches have ended, to the report of each on disk; its floor is a bare ``DELETE`` of as many of
the same, containers first, over as many connections as the pass removes at once.  Rounds of pass
and floor alternate.  The networks are internal, with subnets of their own from ``--base``.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import queue
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote, urlencode

import anyio

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "flows")]

from bridge_parts import assembled, settings_for
from scripted_hub import ScriptedHub

from engine_cycle import Connection, call
from forge_bridge.flows.reap import DISPATCHES_AT_ONCE, Reaper
from forge_bridge.runner import Runner
from forge_core.labels import Owner, runner_filter
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import ContainerSpec, Hardening, container_request
from forge_core.wire.codes import CleanupTrigger, RemovalOutcome, ReservationState, Runtime
from forge_edges.clock import SystemClock
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

ORDER = ("containers", "networks", "volumes")
IDLE_PASSES = 10
Paths = dict[str, list[str]]
"""The path of each resource in the engine's API, by kind."""


class StandingClock(SystemClock):
    """No deadline ever comes, so that no pass begins by itself."""

    async def sleep_until_ms(self, deadline_ms: int) -> None:
        await anyio.sleep_forever()


class BareEngine:
    """The Engine API without anything of ours, over several connections."""

    def __init__(self, socket_path: str, connections: int) -> None:
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(connections)
        for _ in range(connections):
            self._free.put(Connection(socket_path))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        with self._connection() as connection:
            answer = call(connection, method, path, body)
        return json.loads(answer) if answer.strip() else None

    def remove(self, paths: Paths) -> None:
        for kind in ORDER:
            list(self._threads.map(lambda path: self.call("DELETE", path), paths[kind]))

    def list(self, runner_id: str) -> Paths:
        """Everything of this runner; also asks the engine who it is, as every pass must."""
        labels = [f"{name}={value}" for name, value in runner_filter(runner_id).items()]
        query = urlencode({"filters": json.dumps({"label": labels}), "all": "true"})
        self.call("GET", "/info")
        containers = self.call("GET", f"/containers/json?{query}")
        networks = self.call("GET", f"/networks?{query}")
        volumes = self.call("GET", f"/volumes?{query}")["Volumes"] or ()
        return {
            "containers": [f"/containers/{found['Id']}?force=1&v=1" for found in containers],
            "networks": [f"/networks/{found['Id']}" for found in networks],
            "volumes": [f"/volumes/{found['Name']}" for found in volumes],
        }

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        connection = self._free.get()
        try:
            yield connection
        finally:
            self._free.put(connection)

    def close(self) -> None:
        self._threads.shutdown()
        while not self._free.empty():
            self._free.get().close()


def populate(bare: BareEngine, owners: Sequence[Owner], image: str, base: str) -> Paths:
    """Give every dispatch its resources."""
    made: Paths = {kind: [] for kind in ORDER}
    subnets = ipaddress.ip_network(base).subnets(new_prefix=29)
    for number, owner in enumerate(owners):
        for role in ("agent", "helper"):
            spec = ContainerSpec(owner, role, image, ("/bin/sh",), 64 << 20, 1000, 64)
            request = container_request(spec, Hardening())
            found = bare.call("POST", f"/containers/create?name={quote(spec.name)}", request)
            made["containers"].append(f"/containers/{found['Id']}?force=1&v=1")
        for role in ("first", "second")[: 1 + number % 2]:
            name, labels = owner.name(role), owner.labels(role)
            bare.call("POST", "/volumes/create", {"Name": name, "Labels": labels})
            made["volumes"].append(f"/volumes/{name}")
            network = {
                "Name": name,
                "Internal": True,
                "Labels": labels,
                "IPAM": {"Config": [{"Subnet": str(next(subnets))}]},
            }
            found = bare.call("POST", "/networks/create", network)
            made["networks"].append(f"/networks/{found['Id']}")
    return made


async def timed_pass(reaper: Reaper, expected: int) -> float:
    """One pass, which must remove exactly as many; seconds."""
    began = time.perf_counter()
    outcome = await reaper.run_pass(CleanupTrigger.PERIODIC)
    took = time.perf_counter() - began
    assert outcome.is_clean, outcome
    assert outcome.count(RemovalOutcome.REMOVED) == len(outcome.reaped) == expected, outcome
    return took


async def idle_round(reaper: Reaper, bare: BareEngine, runner_id: str) -> tuple[float, float]:
    """Passes that have nothing to do, alternating with their floor; medians in seconds."""
    passes, floors = [], []
    for _ in range(IDLE_PASSES):
        began = time.perf_counter()
        await anyio.to_thread.run_sync(bare.list, runner_id)
        floors.append(time.perf_counter() - began)
        passes.append(await timed_pass(reaper, 0))
    return median(passes), median(floors)


async def one_round(
    runner: Runner, reaper: Reaper, bare: BareEngine, arguments: argparse.Namespace
) -> dict[str, float]:
    """Remove as many by hand, then look at and remove as many by passes."""
    identity = runner.identity
    owners = [
        Owner(identity.runner_id, identity.runner_instance_id, uuid.uuid4().hex, 1, "p", "d")
        for _ in range(arguments.dispatches)
    ]
    made = populate(bare, owners, arguments.image, arguments.base)
    began = time.perf_counter()
    await anyio.to_thread.run_sync(bare.remove, made)
    floor_s = time.perf_counter() - began

    made = populate(bare, owners, arguments.image, arguments.base)
    keys = [(owner.attempt_id, owner.fence) for owner in owners]
    for key in keys:
        runner.admission.hold_degraded(key, ResourceVector(), Runtime.DOCKER)
        runner.admission.transition(key, ReservationState.ACTIVE)
    idle_s, idle_floor_s = await idle_round(reaper, bare, identity.runner_id)
    for key in keys:
        runner.admission.free(key)
    count = sum(map(len, made.values()))
    removing_s = await timed_pass(reaper, count)
    return {
        "resources": count,
        "idleS": idle_s,
        "idleFloorS": idle_floor_s,
        "idleRatio": idle_s / idle_floor_s,
        "removingS": removing_s,
        "removingFloorS": floor_s,
        "removingRatio": removing_s / floor_s,
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    environ = {**os.environ, **({"DOCKER_HOST": arguments.host} if arguments.host else {})}
    endpoint = resolve_endpoint(None, environ)
    assert endpoint.socket_path, "only a Unix socket can be measured"
    bare = BareEngine(endpoint.socket_path, DISPATCHES_AT_ONCE)
    with tempfile.TemporaryDirectory() as directory:
        nobody = ScriptedHub(url="http://127.0.0.1:9")
        settings = settings_for(Path(directory), nobody, runner_id=f"benchmark-{uuid.uuid4().hex}")
        async with (
            DockerEngine.connect(endpoint) as door,
            assembled(settings, door, clock=StandingClock()) as service,
        ):
            facts = await door.facts()
            reaper, runner = service.session.reaper, service.session.runner
            try:
                rounds = [
                    await one_round(runner, reaper, bare, arguments)
                    for _ in range(arguments.rounds)
                ]
            finally:
                # After a failure; nothing that was made here may stay.
                left = bare.list(runner.identity.runner_id)
                bare.remove(left)
                bare.close()
    engine = f"{facts.version}{' rootless' if facts.rootless else ''}"
    return {"engine": engine, "rounds": arguments.rounds} | {
        name: round(median(one[name] for one in rounds), 3) for name in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("image")
    parser.add_argument("--host", help="default: DOCKER_HOST, else the Docker CLI's own choice")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dispatches", type=int, default=100, help="of five resources each")
    parser.add_argument("--base", default="10.211.0.0/19", help="where networks get their subnets")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = anyio.run(measure, arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    print(
        "Engine {engine}, {resources} resources, {rounds} rounds: an idle pass takes {idleS} s,"
        " {idleRatio} x bare lists; one that removes all {removingS} s, {removingRatio} x bare"
        " removals".format(**found)
    )


if __name__ == "__main__":
    main()
