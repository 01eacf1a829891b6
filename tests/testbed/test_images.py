"""The images are what tests and the demo take them for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import docker
import pytest
from lib.bed import IMAGES

from engines import Engine


@pytest.fixture
def client(engine: Engine) -> Iterator[docker.DockerClient]:
    with_timeout = docker.DockerClient(base_url=engine.base_url, timeout=60)
    yield with_timeout
    with_timeout.close()


def run(client: docker.DockerClient, image: str, argv: Sequence[str], **options: Any) -> str:
    """Output of ``argv`` in a hardened container; the exit status must be 0."""
    hardened: dict[str, Any] = {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
    }
    container = client.containers.create(image, list(argv), **{**hardened, **options})
    try:
        container.start()
        status = container.wait()["StatusCode"]
        output: str = container.logs().decode()
    finally:
        container.remove(force=True)
    assert status == 0, output
    return output


def test_tooling_has_its_programs_where_they_are_named(
    engine: Engine, client: docker.DockerClient
) -> None:
    script = "id -u; /usr/bin/python3 -c 'print(1 + 1)'; /usr/bin/git --version; bash -c 'echo b'"
    lines = run(client, engine.tooling_image, ["sh", "-c", script]).splitlines()
    assert lines[:2] == ["1000", "2"]
    assert lines[2].startswith("git version 2.")
    assert lines[3] == "b"


def test_git_makes_a_commit_in_tooling(engine: Engine, client: docker.DockerClient) -> None:
    script = (
        "cd /tmp && git init -q -b main r && cd r && echo x > f && git add f &&"
        " git -c user.name=a -c user.email=a@b commit -q -m m && git rev-list --count HEAD"
    )
    home = {"tmpfs": {"/tmp": "size=8m"}, "environment": {"HOME": "/tmp"}}
    assert run(client, engine.tooling_image, ["sh", "-c", script], **home).strip() == "1"


def test_python_starts_from_byte_code(engine: Engine, client: docker.DockerClient) -> None:
    verbose = run(
        client, engine.tooling_image, ["/usr/bin/python3", "-I", "-v", "-c", "import json"]
    )
    assert "json/decoder.py" in verbose
    assert "# wrote" not in verbose
    assert "__pycache__/decoder" in verbose
    assert "matches /usr/lib/python3" in verbose


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_declares_nothing_that_the_bridge_refuses(
    engine: Engine, client: docker.DockerClient, name: str
) -> None:
    references = {"tooling": engine.tooling_image, "busybox": engine.busybox_image}
    image = client.images.get(references[name])
    config = image.attrs["Config"]
    assert references[name] in image.attrs["RepoDigests"]
    assert config["User"] == "1000:1000"
    assert not config.get("Volumes")
    assert not config.get("OnBuild")
    assert not [label for label in config.get("Labels") or () if label.startswith("dev.forge.")]


@pytest.mark.engine("d26")
def test_no_file_raises_privileges(engine: Engine, client: docker.DockerClient) -> None:
    for image in (engine.tooling_image, engine.busybox_image):
        argv = ["find", "/", "-xdev", "-type", "f", "-perm", "/6000"]
        assert run(client, image, argv, user="0:0", cap_add=["DAC_READ_SEARCH"]) == ""


def test_busybox_has_its_applets(engine: Engine, client: docker.DockerClient) -> None:
    script = "httpd --help 2>&1 | head -n 1; ls / | tr '\\n' ' '"
    output = run(client, engine.busybox_image, ["sh", "-c", script])
    assert "BusyBox" in output
    assert "bin" in output
