"""A browser beside an agent: real Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import Engine, extra_image
from rig import Rig, running_rig

BROWSE = (Path(__file__).parent / "inside" / "browse.py").read_text()
ROOM = {"slots": 1, "memoryBytes": 2 << 30, "cpuMillis": 2000, "pids": 512}

pytestmark = [pytest.mark.slow, pytest.mark.engine("d26", "r26")]


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    settings = {
        "FORGE_SERVICE_BROWSER_IMAGE": extra_image(engine, "browser"),
        "FORGE_SANDBOX_EGRESS_PROXY_IMAGE": extra_image(engine, "squid"),
        "FORGE_SANDBOX_EGRESS_ENFORCED": "true",
    }
    with running_rig(tmp_path_factory.mktemp("rig"), engine, module_runner_id, **settings) as rig:
        yield rig


@pytest.mark.timeout(300)
@pytest.mark.requirement("B-38", "B-54", "B-55")
@pytest.mark.parametrize(
    "network",
    [{"policy": "none"}, {"policy": "public_allowlist", "domains": ["example.org"]}],
    ids=["alone", "behind the proxy"],
)
def test_an_agent_shows_its_page_to_its_browser(rig: Rig, network: dict[str, Any]) -> None:
    browser = [{"name": "browser"}]
    session_id = rig.dispatch(
        "python3", "-c", BROWSE, services=browser, resources=ROOM, network=network
    )
    result = rig.wait_over(session_id, 120)
    said = str(rig.diagnostics(session_id)["logTail"])
    assert result["outcome"] == "succeeded", (result, said)
    seen = json.loads(said)
    assert re.fullmatch(r"(Headless)?Chrome/\d+\.[\d.]+", seen["browser"])
    assert re.match(r"ws://[\d.]+:9222/devtools/browser/", seen["socket"])
    assert "Chrome" in seen["agent"]
    assert seen["title"] == "after 42"
