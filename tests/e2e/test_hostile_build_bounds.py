"""Builds that fork without end or eat memory, in a builder of its own that bounds them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from project_parts import commit, dispatch, rig_with_builder

import processes
from engines import Engine
from rig import Rig, wait_for

PIDS = 200
BOMB = """\
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.1)
"""
EATER = "import os\nparts = []\nwhile True: parts.append(os.urandom(1 << 20))\n"

pytestmark = [pytest.mark.slow, pytest.mark.engine("d26"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    settings = {
        "FORGE_SANDBOX_BUILDER_PIDS_LIMIT": str(PIDS),
        "FORGE_SANDBOX_BUILD_MEMORY": "256m",
        "FORGE_MAX_CONCURRENT_SANDBOXES": "2",
        "FORGE_MAX_CONCURRENT_SANDBOX_BUILDS": "2",
    }
    directory = tmp_path_factory.mktemp("rig")
    with rig_with_builder(directory, engine, module_runner_id, **settings) as rig:
        yield rig


def running(rig: Rig, program: str, name: str) -> str:
    """A project whose image runs this program when it is built."""
    dockerfile = f"FROM {rig.engine.tooling_image}\nCOPY run.py /\nRUN python3 /run.py {name}\n"
    return commit(rig, files={".forge/Dockerfile": dockerfile, "run.py": program})


def require_no_image(rig: Rig, session_id: str) -> None:
    told = rig.told(session_id).keys()
    assert "build.started" in told
    assert not {"build.finished", "image.resolved"} & told


@pytest.mark.requirement("B-33", "B-72")
def test_a_fork_bomb_is_bounded_until_it_is_cancelled(rig: Rig) -> None:
    name = f"bomb-{os.getpid()}"
    session_id = dispatch(rig, running(rig, BOMB, name))
    wait_for("the bomb to reach its bound", lambda: len(processes.with_argument(name)) > PIDS // 2)
    assert len(processes.with_argument(name)) <= PIDS
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    assert rig.wait_over(session_id)["outcome"] == "cancelled"
    wait_for("the bomb to end", lambda: not processes.with_argument(name))
    require_no_image(rig, session_id)
    assert rig.wait_over(dispatch(rig, running(rig, "", "harmless")), 120)["outcome"] == "succeeded"


@pytest.mark.requirement("B-33", "B-90")
def test_a_memory_eater_fails_its_build_and_no_other(rig: Rig) -> None:
    session_id = dispatch(rig, running(rig, EATER, f"eater-{os.getpid()}"))
    result = rig.wait_over(session_id, 120)
    assert result["failureCode"] == "image_build_failed"
    require_no_image(rig, session_id)
    assert rig.wait_over(dispatch(rig, running(rig, "", "harmless")), 120)["outcome"] == "succeeded"


@pytest.mark.requirement("B-27", "B-33")
def test_a_builder_that_dies_ends_all_that_wait_and_is_made_anew(rig: Rig) -> None:
    name = f"sleeper-{os.getpid()}"
    approved = running(rig, "import time\ntime.sleep(30)\n", name)
    sessions = [dispatch(rig, approved) for _ in range(2)]
    for session_id in sessions:
        rig.wait_event(session_id, "offer.reserved")
    wait_for("the step to run", lambda: processes.with_argument(name))
    (builder,) = (one for one in rig.resources() if one.startswith("forge-builder-"))
    rig.engine.api.call("POST", f"/containers/{builder}/kill")
    for session_id in sessions:
        result = rig.wait_over(session_id, 120)
        assert result["failureCode"] == "image_build_failed"
        assert "the builder ended while it built" in result["summary"]
    wait_for("the step to end", lambda: not processes.with_argument(name))
    assert rig.wait_over(dispatch(rig, running(rig, "", "harmless")), 120)["outcome"] == "succeeded"
