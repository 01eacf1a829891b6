"""Metrics tell what heartbeats and ``status`` tell; their names are documented."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import aiohttp
import anyio
import pytest
from bridge_parts import memory_bridge

from forge_bridge.flows.status import StatusReport
from forge_bridge.metrics import health_page, metrics_page
from forge_core.errors import RefusedError
from forge_edges.http_pages import serve_pages

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)

pytestmark = pytest.mark.requirement("B-08", "B-86")


async def test_what_is_scraped_is_what_the_bridge_holds(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    async with memory_bridge(tmp_path) as bridge:
        report = StatusReport(bridge.runner, bridge.service.session)
        pages = {"/metrics": lambda: metrics_page(report.now()), "/healthz": health_page}
        tasks = bridge.runner.tasks
        await tasks.start(serve_pages, f"127.0.0.1:{unused_tcp_port}", pages)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{unused_tcp_port}") as http:
            await bridge.accept()
            text = await (await http.get("/metrics")).text()
            assert 'forge_bridge_attempts{state="reserved"} 1.0' in text
            assert 'forge_bridge_used_resources{component="slots"} 1.0' in text
            assert "forge_bridge_connected 1.0" in text
            assert "forge_bridge_degraded_reservations 0.0" in text
            bridge.runner.engine_away = "gone"
            text = await (await http.get("/metrics")).text()
            assert "forge_bridge_engine_away 1.0" in text
            bridge.runner.engine_away = None
            assert "forge_bridge_parts_unseen 0.0" in text
            bridge.runner.parts_unseen = {"egress": "the proxy did not answer"}
            text = await (await http.get("/metrics")).text()
            assert "forge_bridge_parts_unseen 1.0" in text
            assert await (await http.get("/healthz")).text() == "ok\n"
            assert (await http.get("/status")).status == 404
        bridge.runner.ended["lease_expired"] += 2
        page = metrics_page(report.now()).body.decode()
        assert 'forge_bridge_attempts_ended_total{code="lease_expired"} 2.0' in page
        documented = REFERENCE.read_text()
        served = {name for name, _ in FAMILY.findall(page)}
        assert served
        assert [name for name in sorted(served) if f"`{name}`" not in documented] == []


async def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.RaisesGroup(pytest.RaisesExc(RefusedError, match="cannot listen on")):
            async with anyio.create_task_group() as tasks:
                await tasks.start(serve_pages, address, {})
