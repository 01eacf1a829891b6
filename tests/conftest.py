"""Options, markers and fixtures that all tests share.

``engine`` is a real Docker Engine: the test runs once for each of the names in its
``@pytest.mark.engine("d26", "r26")`` marker, or for :data:`engines.DEFAULT_ENGINES`.  The test
bed is touched only when a collected test asks for an engine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from engines import (
    DEFAULT_ENGINES,
    BedCommandError,
    Engine,
    TestBed,
    labelled,
    leftovers,
    session_runner_id,
)
from needs import unavailable

REQUIREMENT_ROW = re.compile(r"[AB]-[0-9]{2}")
NAMED_ENGINE = re.compile(r"\[(?:.*-)?([drv]\d\d)[-\]]")
ENGINES_KEY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--rewrite-transcripts",
        action="store_true",
        help="write the answers in tests/transcripts/*.txt again",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("engine")
        names = marker.args if marker and marker.args else DEFAULT_ENGINES
        metafunc.parametrize("engine", names, indirect=True, scope="module")


def is_left_out(item: pytest.Item) -> bool:
    """Whether the item is slow, and this run is not one of all tests."""
    return bool(item.get_closest_marker("slow")) and not item.config.getoption("--all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run with --all")
    for item in items:
        if is_left_out(item):
            item.add_marker(slow)
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker("engine")
        for marker in item.iter_markers("requirement"):
            unknown = [row for row in marker.args if not REQUIREMENT_ROW.fullmatch(str(row))]
            if unknown or not marker.args:
                raise pytest.UsageError(f"{item.nodeid}: no requirement rows: {unknown or '()'}")


def pytest_collection_finish(session: pytest.Session) -> None:
    run = [item for item in session.items if not is_left_out(item)]
    parameters = [getattr(item, "callspec", None) for item in run]
    names = {one.params["engine"] for one in parameters if one and "engine" in one.params}
    session.config.stash[ENGINES_KEY] = sorted(names)


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Nothing shares an engine, and nothing the processes and locks of one kind of test."""

    def _split_scope(self, nodeid: str) -> str:
        if named := NAMED_ENGINE.search(nodeid):
            return named[1]
        return str(Path(nodeid.partition("::")[0]).parent)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByEngine:
    return ByEngine(config, log)


@pytest.fixture(scope="session")
def testbed(pytestconfig: pytest.Config) -> Iterator[TestBed]:
    """The test bed with the engines that the tests of this run name.

    What this session starts, it takes down; nothing of it may be left.
    """
    names = pytestconfig.stash[ENGINES_KEY]
    bed = TestBed.bring_up(names or DEFAULT_ENGINES)
    yield bed
    problem = bed.take_down()
    assert not problem, problem


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, testbed: TestBed) -> Iterator[Engine]:
    """A running Docker Engine; the module leaves nothing labelled ``dev.forge.*`` in it."""
    try:
        found = testbed.engine(request.param)
    except BedCommandError as error:
        unavailable(f"engine {request.param}: {error}")
    known = labelled(found.api)
    yield found
    left = leftovers(found.api, known)
    assert not left, f"left in engine {found.name}: {'; '.join(left)}"


@pytest.fixture
def runner_id(_runner_numbers: Iterator[int]) -> str:
    """A runner id of its own for each test, so that sessions in one engine keep apart."""
    return session_runner_id(next(_runner_numbers))


@pytest.fixture(scope="module")
def module_runner_id(_runner_numbers: Iterator[int]) -> str:
    """Likewise, for a runner that serves a whole module."""
    return session_runner_id(next(_runner_numbers))


@pytest.fixture(scope="session")
def _runner_numbers() -> Iterator[int]:
    return itertools.count(1)
