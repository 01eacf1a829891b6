"""The demo: one that is interrupted leaves nothing, and two at once do not disturb each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engines import REPOSITORY, Engine, describe

pytestmark = [pytest.mark.engine("d26"), pytest.mark.timeout(120)]

DEMO = REPOSITORY / "scripts" / "lib" / "demo.py"
DEMO_ONLY = {"filters": '{"label": ["dev.forge.trust-domain-id=demo"]}'}


@pytest.fixture
def environment(engine: Engine, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "DOCKER_HOST": engine.base_url,
        "FORGE_TESTBED_CACHE": describe()["cache"],
        "TMPDIR": str(tmp_path),
    }


def begin(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """The demo as the leader of a process group, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, str(DEMO)],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left(engine: Engine) -> list[Any]:
    containers = engine.api.get("/containers/json", {"all": "1", **DEMO_ONLY})
    volumes = engine.api.get("/volumes", DEMO_ONLY)["Volumes"] or []
    return [*containers, *volumes]


@pytest.mark.parametrize("moment", ["the tooling image", "is connected", "inventory"])
def test_a_ctrl_c_leaves_nothing(
    moment: str, engine: Engine, environment: dict[str, str], tmp_path: Path
) -> None:
    demo = begin(environment)
    try:
        assert demo.stdout is not None
        said = ""
        while moment not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        os.killpg(demo.pid, signal.SIGINT)
        while "Interrupted" not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        os.killpg(demo.pid, signal.SIGINT)  # the impatient second one comes while it takes down
        said += demo.communicate(timeout=60)[0]
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130, said
    assert "Interrupted: taking everything down" in said
    assert "Traceback" not in said
    assert left(engine) == []
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_in_one_engine(
    engine: Engine, environment: dict[str, str], tmp_path: Path
) -> None:
    demos = [begin(environment), begin(environment)]
    try:
        for demo in demos:
            said = demo.communicate(timeout=100)[0]
            assert demo.returncode == 0, said
            assert "left over  nothing" in said
    finally:
        for demo in demos:
            demo.kill()
            demo.wait()
    assert left(engine) == []
    assert list(tmp_path.iterdir()) == []
