"""The check that tests leave nothing in an engine sees what they leave."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import docker
import pytest

import engines
from engines import Engine, labelled, leftovers


@pytest.fixture
def client(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[docker.DockerClient]:
    monkeypatch.setattr(engines, "VANISH_TIMEOUT_S", 0.1)
    talking = docker.DockerClient(base_url=engine.base_url, timeout=60)
    yield talking
    talking.close()


def make_all(client: docker.DockerClient, image: str, labels: Mapping[str, str]) -> list[object]:
    """A container, a network and a volume with ``labels``."""
    return [
        client.containers.create(image, ["true"], labels=dict(labels), network_mode="none"),
        client.networks.create("leftover", labels=dict(labels), internal=True),
        client.volumes.create(labels=dict(labels)),
    ]


def test_each_kind_is_named(engine: Engine, client: docker.DockerClient, runner_id: str) -> None:
    known = labelled(engine.api)
    made = make_all(client, engine.busybox_image, {"dev.forge.runner-id": runner_id})
    try:
        left = leftovers(engine.api, known)
    finally:
        for one in made:
            one.remove()  # type: ignore[attr-defined]
    assert [text.split()[0] for text in left] == ["container", "network", "volume"]
    assert all(f"dev.forge.runner-id={runner_id}" in text for text in left)
    assert leftovers(engine.api, known) == []


@pytest.mark.engine("d26")
def test_others_are_not_accused(engine: Engine, client: docker.DockerClient) -> None:
    known = labelled(engine.api)
    another_session = {"dev.forge.runner-id": f"test-{os.getppid()}-1"}
    made = [
        *make_all(client, engine.busybox_image, another_session),
        client.volumes.create(labels={"com.example": "1"}),
    ]
    try:
        assert leftovers(engine.api, known) == []
    finally:
        for one in made:
            one.remove()  # type: ignore[attr-defined]
