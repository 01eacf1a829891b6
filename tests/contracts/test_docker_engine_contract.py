"""The contract of the engine port, kept by real engines through the Docker door."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping

import pytest
from engine_contract import EngineContract, Subject
from lib.engine_api import EngineApi

from engines import Engine as BedEngine
from forge_core.labels import Owner
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine


def labelled_image(api: EngineApi, base: str, labels: Mapping[str, str]) -> str:
    """What ``docker commit`` makes of a container that nobody started."""
    config = {"Image": base, "Cmd": ["true"]}
    _, answer = api.call("POST", "/containers/create", body=json.dumps(config))
    container = json.loads(answer)["Id"]
    try:
        query = {"container": container}
        body = json.dumps({"Image": base, "Labels": dict(labels)})
        status, answer = api.call("POST", "/commit", query, body=body)
        assert status == 201, answer
        return str(json.loads(answer)["Id"])
    finally:
        api.call("DELETE", f"/containers/{container}", {"force": "1"})


@pytest.fixture
async def subject(engine: BedEngine, runner_id: str) -> AsyncIterator[Subject]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    owner = Owner(runner_id, "instance", "attempt", 1, "project", "domain")
    async with DockerEngine.connect(endpoint) as door:

        def make_image(labels: Mapping[str, str]) -> str:
            return labelled_image(engine.api, engine.busybox_image, labels)

        subject = Subject(door, owner, engine.busybox_image, make_image)
        yield subject
        await subject.remove_everything()


@pytest.mark.engine("d26", "d20", "r26", "r20")
class TestDockerEngine(EngineContract):
    """Engine 26.1 and 20.10, rootful and rootless."""
