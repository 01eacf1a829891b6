"""The demo's engine: up with the tooling image, no trace in the firewall, gone afterwards."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from engines import describe, run_testbed
from needs import require_root

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require_root("run a private Docker daemon")
    root = tmp_path_factory.mktemp("demo")
    settings = {"FORGE_TESTBED_ROOT": str(root), "FORGE_TESTBED_CACHE": describe()["cache"]}
    yield settings
    done = run_testbed("demo-engine", "down", "--purge", environment=settings)
    assert done.returncode == 0, done.stderr
    assert not (root / "demo").exists()


def network_settings() -> str:
    """Firewall, interfaces and forwarding of the machine."""
    forward = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    shown = [
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        for argv in (["iptables", "-S"], ["iptables", "-t", "nat", "-S"], ["ip", "-o", "link"])
    ]
    return forward + "".join(shown)


def start(environment: dict[str, str]) -> dict[str, str]:
    done = run_testbed("demo-engine", "up", environment=environment)
    assert done.returncode == 0, done.stderr
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def test_it_runs_the_tooling_image_and_leaves_the_network_alone(
    environment: dict[str, str],
) -> None:
    before = network_settings()
    answer = start(environment)
    assert network_settings() == before
    client = docker.DockerClient(base_url=f"unix://{answer['socket']}", timeout=60)
    try:
        container = client.containers.create(
            answer["tooling_image"], ["git", "--version"], network_mode="none"
        )
        container.start()
        assert container.wait()["StatusCode"] == 0
        assert container.logs().startswith(b"git version")
        container.remove()
    finally:
        client.close()


def test_a_second_start_keeps_the_image_and_a_stop_leaves_nothing(
    environment: dict[str, str],
) -> None:
    first = start(environment)
    done = run_testbed("demo-engine", "down", environment=environment)
    assert done.returncode == 0, done.stderr
    assert not Path(first["socket"]).parent.exists()
    again = run_testbed("demo-engine", "up", environment=environment)
    assert json.loads(again.stdout)["tooling_image"] == first["tooling_image"]
    assert "Loading image" not in again.stderr


def test_the_tooling_image_goes_into_any_reachable_engine(environment: dict[str, str]) -> None:
    answer = start(environment)
    done = run_testbed("tooling-image", "--socket", answer["socket"], environment=environment)
    assert done.stdout.strip() == answer["tooling_image"]
    missing = run_testbed("tooling-image", "--socket", "/nonexistent", environment=environment)
    assert missing.returncode == 1
    assert "cannot reach a Docker engine at /nonexistent" in missing.stderr
