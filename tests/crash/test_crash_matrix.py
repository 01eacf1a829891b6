"""SIGKILL at every point of every flow, on real parts (crash-matrix.md).

``points.txt`` is the matrix: what each scenario passes through, as the bridge itself recorded
it.  A recording that differs fails the test, so that a new stage or a new durable write cannot be
forgotten; ``--rewrite-transcripts`` takes it over.  One point of each scenario, place and gap is
tried on each run, every point with ``--all``.
"""

from __future__ import annotations

from collections.abc import Iterator

import crash_points
import pytest
from crash_checks import verify_recovered
from crash_parts import CrashRig, Evidence, Fleet
from crash_points import Point
from crash_scenarios import OUTCOMES, SCENARIOS

from engines import Engine

# Rootless, as production has it.
pytestmark = pytest.mark.engine("r26")

FEWEST_POINTS = 100
MATRIX = crash_points.read()
CHOSEN = crash_points.one_of_each(MATRIX)


@pytest.fixture(scope="module")
def fleet(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), engine, module_runner_id)
    yield fleet
    fleet.close()


@pytest.fixture
def rig(fleet: Fleet) -> Iterator[CrashRig]:
    """A runner that is online and idle; the next test gets it if it is so again."""
    rig = fleet.take()
    yield rig
    fleet.give_back(rig)


@pytest.mark.requirement("B-82")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_matrix_holds_every_point(
    rig: CrashRig, scenario: str, pytestconfig: pytest.Config
) -> None:
    record = rig.directory / f"{scenario}.recorded"
    session_id = SCENARIOS[scenario](rig, lambda **more: rig.arm(record=str(record), **more))
    rig.wait_online()
    verify_recovered(rig, session_id, Evidence({1: OUTCOMES[scenario]}))
    rig.disarm()
    lines = record.read_text().splitlines()
    found = tuple(Point.parse(scenario, line) for line in lines)
    if pytestconfig.getoption("--rewrite-transcripts"):
        others = [point for point in crash_points.read() if point.scenario != scenario]
        crash_points.write(
            sorted([*others, *found], key=lambda p: list(SCENARIOS).index(p.scenario))
        )
        return
    known = {point.key for point in MATRIX if point.scenario == scenario}
    assert {point.key for point in found} == known, "run with --rewrite-transcripts and look"


def test_the_matrix_has_not_shrunk() -> None:
    assert len(MATRIX) == len({point.key for point in MATRIX}) >= FEWEST_POINTS
    assert {point.scenario for point in MATRIX} == set(SCENARIOS)


@pytest.mark.requirement("B-80", "B-82", "B-83")
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point,
            id="-".join(map(str, point.key)),
            marks=() if point in CHOSEN else pytest.mark.slow,
        )
        for point in MATRIX
    ],
)
def test_a_bridge_killed_there_leaves_nothing(rig: CrashRig, point: Point) -> None:
    kill = [point.name, point.count]
    session_id = SCENARIOS[point.scenario](rig, lambda **more: rig.arm(kill=kill, **more))
    rig.wait_dead()
    rig.disarm()
    evidence = rig.evidence(session_id)
    rig.come_online()
    verify_recovered(rig, session_id, evidence)
