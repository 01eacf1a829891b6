"""Attempts with a network, from their admission to the removal of everything that they had."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from egress_table import DOMAINS, NAMES, ROWS, Places
from engines import Engine, extra_image
from public_site import PRIVATE, UPSTREAM, PublicSite, public_site
from rig import Rig, running_rig, wait_for

INSIDE = Path(__file__).parent / "inside"
ATTEMPTS = (INSIDE / "egress_attempts.py").read_text()
LISTED = {"policy": "public_allowlist", "domains": list(DOMAINS)}
SLEEPS = "import time; print('up', flush=True); time.sleep(300)"
ASKS = """
import time, urllib.request
try:
    urllib.request.urlopen("http://refused.evil.test/")
except OSError as error:
    print(error, flush=True)
time.sleep(300)
"""

pytestmark = [
    pytest.mark.engine("d26", "r26"),
    pytest.mark.requirement("B-54"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def proxy(engine: Engine) -> Mapping[str, str]:
    return {
        "FORGE_SANDBOX_EGRESS_PROXY_IMAGE": extra_image(engine, "squid"),
        "FORGE_SANDBOX_EGRESS_ENFORCED": "true",
    }


@pytest.fixture(scope="module")
def rig(
    engine: Engine,
    proxy: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    module_runner_id: str,
) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("rig")
    with running_rig(directory, engine, module_runner_id, **proxy) as rig:
        yield rig


@pytest.fixture
def site(engine: Engine, tmp_path: Path) -> Iterator[PublicSite]:
    with public_site(engine, tmp_path / "site", NAMES) as site:
        yield site


@contextmanager
def foreign_network(engine: Engine, subnet: str) -> Iterator[None]:
    """Somebody else's, on the same engine."""
    name = f"foreign-{secrets.token_hex(4)}"
    body = json.dumps({"Name": name, "IPAM": {"Config": [{"Subnet": subnet}]}})
    assert engine.api.call("POST", "/networks/create", body=body)[0] == 201
    try:
        yield
    finally:
        engine.api.call("DELETE", f"/networks/{name}")


def own_pool() -> str:
    """Four subnets that no other test uses."""
    number = secrets.randbelow(1 << 10)
    return f"10.215.{number >> 2}.{(number & 3) << 6}/26"


def container(rig: Rig, role: str) -> str:
    [name] = [name for name in rig.resources() if name.startswith(f"forge-{role}-")]
    return name


def printed(rig: Rig, session_id: str) -> str:
    return str(rig.diagnostics(session_id)["logTail"])


@pytest.mark.requirement("B-84")
def test_everything_of_the_network_is_told_and_removed(rig: Rig) -> None:
    session_id = rig.dispatch("true", network=LISTED)
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded"
    assert "network" in result["timings"]
    found = rig.diagnostics(session_id)
    inventory = json.dumps(found["inventory"])
    for role in ("agent-network", "egress-network", "egress-proxy"):
        assert f'"{role}"' in inventory
    assert "egress-probe" not in inventory
    [report] = found["cleanupReports"]
    removed = {(r["kind"], r["role"]): r["outcome"] for r in report["resources"]}
    assert removed["container", "egress-proxy"] == "removed"
    assert removed["network", "agent-network"] == "removed"
    assert removed["network", "egress-network"] == "removed"
    assert rig.resources() == []


def test_an_attempt_ends_with_its_proxy_and_says_what_that_said(rig: Rig) -> None:
    session_id = rig.dispatch("python3", "-c", ASKS, network=LISTED)
    wait_for("the refusal", lambda: "403" in printed(rig, session_id))
    rig.engine.api.call("POST", f"/containers/{container(rig, 'egress-proxy')}/kill")
    result = rig.wait_over(session_id)
    assert (result["outcome"], result["failureCode"]) == ("failed", "service_not_ready")
    assert "the egress proxy ended with 137" in result["summary"]
    assert "403 TCP_DENIED GET refused.evil.test:80" in result["summary"]


@pytest.mark.requirement("B-82")
def test_a_bridge_that_was_killed_leaves_no_network(rig: Rig, proxy: Mapping[str, str]) -> None:
    session_id = rig.dispatch("python3", "-c", SLEEPS, network=LISTED)
    rig.wait_event(session_id, "agent.started")
    rig.bridge.kill()
    assert {name.rpartition("-")[0] for name in rig.resources()} >= {
        *("forge-agent", "forge-agent-network", "forge-egress-network", "forge-egress-proxy"),
    }
    rig.start_bridge(proxy)
    assert rig.wait_over(session_id)["failureCode"] == "bridge_stopped"
    assert rig.resources() == []


@pytest.mark.requirement("B-19")
def test_subnets_are_counted_and_those_of_others_passed_over(
    engine: Engine, proxy: Mapping[str, str], tmp_path: Path, runner_id: str
) -> None:
    pool = own_pool()
    settings = {"FORGE_SANDBOX_SUBNET_POOL": pool, "FORGE_MAX_CONCURRENT_SANDBOXES": "2"}
    with (
        foreign_network(engine, pool.replace("/26", "/28")),
        running_rig(tmp_path / "rig", engine, runner_id, **proxy, **settings) as rig,
    ):
        first = rig.dispatch("python3", "-c", SLEEPS, network=LISTED)
        rig.wait_event(first, "agent.started")
        second = rig.dispatch("true", network=LISTED)
        wait_for(
            "the refusal",
            lambda: "capacity_networks" in json.dumps(rig.diagnostics(second)),
        )
        rig.post(f"/sessions/{first}/cancel")
        rig.wait_over(first)
        assert rig.wait_over(second)["outcome"] == "succeeded"


@pytest.mark.requirement("B-39")
def test_what_the_table_shuts_an_open_network_reaches(
    engine: Engine, site: PublicSite, tmp_path: Path, runner_id: str
) -> None:
    """Else the table would show nothing."""
    bridge = engine.api.get("/networks/bridge")["IPAM"]["Config"][0]["Gateway"]
    places = Places(site.resolver, bridge, *["203.0.113.1"] * 4)
    shut = ("tcp", "resolve-listed", "resolver-below", "name-server", "engine-gateway", "udp")
    orders = json.dumps([row.filled(places) for row in ROWS if row.id in shut])
    environment = {"ATTEMPTS": orders, "HTTP_PROXY": "http://127.0.0.1:1"}
    setting = {"FORGE_ALLOW_OPEN_PUBLIC_SANDBOX": "true"}
    with running_rig(tmp_path / "rig", engine, runner_id, **setting) as rig:
        session_id = rig.dispatch(
            "python3", "-c", ATTEMPTS, network={"policy": "open_public"}, env=environment
        )
        assert rig.wait_over(session_id)["outcome"] == "succeeded"
        reached = json.loads(printed(rig, session_id))
    assert [name for name in shut if reached[name] is None] == ["udp"]
    assert [one["at"] for one in site.arrived("udp")] == ["192.31.196.10:9999"]


def test_a_proxy_that_looks_into_tls_is_trusted_where_the_operator_says_so(
    engine: Engine, proxy: Mapping[str, str], site: PublicSite, tmp_path: Path, runner_id: str
) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(site.certificate)
    asks = (
        "import urllib.request as u, os; "
        "print(u.urlopen('https://www.example.org/').read(), os.environ['SSL_CERT_FILE']); "
        "open('/workspace/ca.pem', 'a')"
    )
    settings = {"FORGE_SANDBOX_CUSTOM_CA": str(authority)}
    with running_rig(tmp_path / "rig", engine, runner_id, **proxy, **settings) as rig:
        session_id = rig.dispatch("python3", "-c", asks, network=LISTED)
        assert rig.wait_over(session_id)["failureCode"] == "agent_failed"
        said = printed(rig, session_id)
    assert "site-at 192.31.196.10:443" in said
    assert "Permission denied: '/workspace/ca.pem'" in said


def test_an_upstream_proxy_is_asked_for_everything_and_its_login_is_nowhere(
    engine: Engine, proxy: Mapping[str, str], site: PublicSite, tmp_path: Path, runner_id: str
) -> None:
    login = tmp_path / "login"
    login.write_text("runner:s3cret word%")
    login.chmod(0o600)
    settings = {
        "FORGE_SANDBOX_UPSTREAM_PROXY": f"http://{PRIVATE}:{UPSTREAM[1]}",
        "FORGE_SANDBOX_UPSTREAM_PROXY_LOGIN_FILE": str(login),
    }
    asks = "import urllib.request as u, time; print(u.urlopen('http://www.example.org/x').read())"
    with running_rig(tmp_path / "rig", engine, runner_id, **proxy, **settings) as rig:
        session_id = rig.dispatch("python3", "-c", f"{asks}; {SLEEPS}", network=LISTED)
        wait_for("the answer", lambda: "up" in printed(rig, session_id))
        inspected = json.dumps(engine.api.get(f"/containers/{container(rig, 'egress-proxy')}/json"))
        rig.post(f"/sessions/{session_id}/cancel")
        rig.wait_over(session_id)
        kept = [inspected, rig.bridge.log.read_text(), json.dumps(rig.diagnostics(session_id))]
        kept += [p.read_text("utf-8", "replace") for p in _files(rig.state_root)]
    [asked] = site.arrived("upstream")
    assert asked["target"] == "http://www.example.org/x"
    assert base64.b64decode(asked["login"].split()[1]).decode() == "runner:s3cret word%"
    assert not any("s3cret" in text for text in kept)


def _files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and "repositories" not in str(path))
