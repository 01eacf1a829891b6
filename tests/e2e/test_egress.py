"""From inside a real allow-listed sandbox: what works, and that everything else fails.

One agent tries every row of the table (tests/egress_table.py) beside another attempt that has a
network as well; the stand-in for the Internet tells what has arrived.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from egress_table import DOMAINS, NAMES, ROWS, Places, Row, page_rows
from engines import REPOSITORY, Engine, extra_image
from public_site import PUBLIC, PublicSite, public_site
from rig import Rig, running_rig

INSIDE = Path(__file__).parent / "inside"
ATTEMPTS = (INSIDE / "egress_attempts.py").read_text()
LISTED = {"policy": "public_allowlist", "domains": list(DOMAINS)}
SERVES = """
import http.server
http.server.HTTPServer(("", 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
BY_ID = {row.id: row for row in ROWS}

pytestmark = [
    pytest.mark.engine("d26", "r26"),
    pytest.mark.requirement("B-54", "B-39"),
    pytest.mark.timeout(240),
]


@dataclass(frozen=True)
class World:
    """A bridge, what is behind its engine, and what the agent says of each row."""

    rig: Rig
    site: PublicSite
    session_id: str
    result: Mapping[str, Any]
    reached: Mapping[str, str | None]


@pytest.fixture(scope="module")
def world(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("egress")
    settings = {
        "FORGE_SANDBOX_EGRESS_PROXY_IMAGE": extra_image(engine, "squid"),
        "FORGE_SANDBOX_EGRESS_ENFORCED": "true",
        "FORGE_MAX_CONCURRENT_SANDBOXES": "2",
    }
    with (
        public_site(engine, directory / "site", NAMES) as site,
        running_rig(directory / "rig", engine, module_runner_id, **settings) as rig,
    ):
        other = rig.dispatch("python3", "-c", SERVES, network=LISTED)
        rig.wait_event(other, "agent.started")
        orders = json.dumps([row.filled(_places(rig, site)) for row in ROWS])
        session_id = rig.dispatch(
            "python3", "-c", ATTEMPTS, network=LISTED, env={"ATTEMPTS": orders}
        )
        result = rig.wait_over(session_id, 180)
        rig.post(f"/sessions/{other}/cancel", {})
        rig.wait_over(other)
        printed = str(rig.diagnostics(session_id)["logTail"])
        assert result["outcome"] == "succeeded", (result, printed[-2000:])
        yield World(rig, site, session_id, result, json.loads(printed))


def _places(rig: Rig, site: PublicSite) -> Places:
    """Where the other attempt is, by what the engine says of its containers."""
    api = rig.engine.api
    label = json.dumps({"label": [f"dev.forge.runner-id={rig.runner_id}"]})
    found = {
        container["Labels"]["dev.forge.role"]: container["NetworkSettings"]["Networks"]
        for container in api.get("/containers/json", {"filters": label})
    }
    inner, outer = _by_role(found["egress-proxy"])
    [agent] = found["agent"].values()
    bridge = api.get("/networks/bridge")["IPAM"]["Config"][0]
    return Places(
        resolver=site.resolver,
        engine_gateway=bridge["Gateway"],
        egress_gateway=outer["Gateway"],
        other_agent=agent["IPAddress"],
        other_proxy=inner["IPAddress"],
        other_proxy_outside=outer["IPAddress"],
    )


def _by_role(networks: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    [inner] = [one for name, one in networks.items() if name.startswith("forge-agent-network-")]
    [outer] = [one for name, one in networks.items() if name.startswith("forge-egress-network-")]
    return inner, outer


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_attempt(world: World, row: Row) -> None:
    assert world.reached[row.id] == row.reached
    arrived = [one for one in world.site.mentions(row.mark) if one["kind"] != "dns"]
    if row.is_asked_first:
        assert arrived
        assert {one["at"].partition(":")[0] for one in arrived} <= set(PUBLIC)
        assert not any("evil" in one["host"] for one in arrived)
    else:
        assert arrived == []
    if not row.is_looked_up:
        assert [one for one in world.site.arrived("dns") if row.mark in one["name"]] == []


def test_a_name_that_takes_turns_did_so(world: World) -> None:
    asked = [one for one in world.site.arrived("dns") if one["name"] == "rebinding.example.org"]
    assert len(asked) >= 3


def test_what_the_agent_sends_says_nothing_of_its_network(world: World) -> None:
    [arrived] = world.site.mentions(BY_ID["http"].mark)
    names = {name.lower() for name in arrived["headers"]}
    assert names <= {"host", "connection", "cache-control"}


def test_the_table_is_the_one_of_the_page() -> None:
    page = (REPOSITORY / "docs/reference/egress.md").read_text("utf-8")
    tried = page.partition("## What was tried")[2].partition("\n## ")[0]
    assert [line for line in tried.splitlines() if line.startswith("| `")] == page_rows()
    assert len(BY_ID) == len(ROWS)
