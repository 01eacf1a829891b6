"""Each benchmark runs at its least, and prints the figures that it promises.

What they measure is not looked at: machines differ, and so few rounds say nothing.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engines import REPOSITORY, Engine
from needs import require_root

BENCHMARKS = REPOSITORY / "benchmarks"
WITHIN_S = 100.0


class Case(NamedTuple):
    """The least that a benchmark can be asked for, and the figures that it prints then.

    :ivar arguments: words; of ``{tooling}`` and so on, see :func:`_places`.
    :ivar figures: names in its JSON object, those of objects in it as ``outer.inner``.
    """

    arguments: str
    figures: str
    is_slow: bool = False


WITHOUT_AN_ENGINE = {
    "durable_records": Case(
        "--directory {directory} --rounds 1 --reports 2",
        "floor_us alone_us floor_in_place_us floor_through_a_thread_us together_64_us"
        " alone_cost_ratio thread_cost_ratio together_gain reports put_s load_s replay_s",
    ),
    "hub_events": Case(
        "--events 32 --reports 32",
        "floorPerSecond eventsAlonePerSecond eventsPerSecond eventsToFloor"
        " reports reportsSeconds reportsPerSecond",
        is_slow=True,
    ),
    "offer_decisions": Case("--rounds 1 --held 1", "decisionsPerSecond ratioToFloor"),
    "offers_over_socket": Case(
        "--offers 4",
        "refused.perSecond refused.floorPerSecond refused.ratio"
        " accepted.perSecond accepted.floorPerSecond accepted.ratio",
    ),
    "replay_backlog": Case(
        "--reports 20 --rounds 1",
        "reports rounds intervalMs seconds perSecond ratio heartbeats longestGapMs",
    ),
    "signalr_round_trips": Case(
        "--seconds 0.05",
        "bare_websocket_per_second sequential_per_second concurrent_64_per_second"
        " sequential_cost_ratio",
    ),
    "supervisor_start": Case("--rounds 1", "floorMs readyMs ratio rounds"),
}
WITH_AN_ENGINE = {
    "attempt_overhead": Case(
        "{tooling} --host {host} --rounds 1",
        "rawFastestMs rawMedianMs"
        " small.fastestMs small.medianMs small.fastestRatio small.medianRatio"
        " workspace.fastestMs workspace.medianMs workspace.fastestRatio workspace.medianRatio",
    ),
    "engine_cycle": Case(
        "{busybox} --host {host} --rounds 1",
        "rawFastestMs raw.createMs raw.startMs raw.runMs raw.removeMs raw.totalMs"
        " rawWithoutHostsMs doorFastestMs doorMs ratio rounds",
    ),
    "idle_bridge": Case("--engine {engine} --seconds 1", "residentMiB floorMiB ratio cpuPercent"),
    "image_stage": Case(
        "{tooling} {busybox} --host {host} --docker {docker} --rounds 1",
        "coldByHandMs cachedByHandMs coldMs cachedMs warmMs coldRatio cachedRatio warmFastestMs",
        is_slow=True,
    ),
    "reap_pass": Case(
        "{busybox} --host {host} --rounds 1 --dispatches 2",
        "resources rounds idleS idleFloorS idleRatio removingS removingFloorS removingRatio",
    ),
}


def _names(cases: Mapping[str, Case]) -> list[Any]:
    slow = {name: [pytest.mark.slow] if case.is_slow else [] for name, case in cases.items()}
    return [pytest.param(name, marks=marks) for name, marks in slow.items()]


def test_every_benchmark_has_a_case() -> None:
    files = sorted(file.stem for file in BENCHMARKS.glob("*.py"))
    assert files == sorted([*WITHOUT_AN_ENGINE, *WITH_AN_ENGINE])


@pytest.mark.parametrize("name", _names(WITHOUT_AN_ENGINE))
def test_a_benchmark_without_an_engine(name: str, tmp_path: Path) -> None:
    if name == "supervisor_start":
        require_root("make a PID namespace")
    _require_figures(name, WITHOUT_AN_ENGINE[name], {"directory": str(tmp_path)}, {})


@pytest.mark.engine("d26")
@pytest.mark.parametrize("name", _names(WITH_AN_ENGINE))
def test_a_benchmark_with_an_engine(name: str, engine: Engine) -> None:
    places = {
        "engine": engine.name,
        "host": engine.base_url,
        "docker": engine.docker_executable,
        "tooling": engine.tooling_image,
        "busybox": engine.busybox_image,
    }
    _require_figures(name, WITH_AN_ENGINE[name], places, {"DOCKER_CONFIG": engine.docker_config})


def _require_figures(
    name: str, case: Case, places: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    words = [word.format_map(places) for word in case.arguments.split()]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    figures = dict(_figures(json.loads(done.stdout)))
    assert sorted(figures) == sorted(case.figures.split())
    assert [name for name, value in figures.items() if not math.isfinite(value)] == []


def _figures(found: Mapping[str, object], outer: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in it; what it says in words besides is nobody's business here."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{outer}{name}.")
        elif isinstance(value, int | float):
            yield f"{outer}{name}", value
