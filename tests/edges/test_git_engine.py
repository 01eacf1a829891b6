"""The same way in and out through a real engine: a volume, an agent's user, a helper container."""

from __future__ import annotations

import dataclasses
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from git_parts import HELPER, REF, Project, git, make_project, word

from engines import Engine
from forge_core.output_exchange import helper_request, parse_helper_reply
from forge_core.sandbox_spec import WORKSPACE, WORKSPACE_VOLUME
from forge_edges.git import tree_listing
from forge_edges.workspace_archive import workspace_archive

AGENT_UID = 1000
AGENT = r"""
set -ex
export HOME=/tmp
test "$(stat -c %u:%g:%a .)" = 1000:1000:755
test "$(git status --porcelain)" = ""
test "$(git rev-list --all --count)" = 1
git fsck --strict
echo changed > dir/inner
git -c user.name=a -c user.email=a@b commit -qam mine
git rm -q second
printf '#!/bin/sh\ntouch canary' > .git/hook; chmod 755 .git/hook
git config core.fsmonitor $PWD/.git/hook
git config filter.x.clean $PWD/.git/hook
echo '* filter=x' > .gitattributes
echo new > "new file"
"""


@contextmanager
def sdk(engine: Engine) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=engine.base_url, timeout=60)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def container(
    client: docker.DockerClient, image: str, command: list[str], volume: str, mode: str
) -> Iterator[Any]:
    made = client.containers.create(
        image,
        command,
        user=f"{AGENT_UID}:{AGENT_UID}",
        network_disabled=True,
        read_only=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        tmpfs={"/tmp": "rw,noexec,nosuid,size=64m,mode=1777"},
        volumes={volume: {"bind": WORKSPACE_VOLUME, "mode": mode}},
        working_dir=WORKSPACE,
        stdin_open=True,
    )
    try:
        yield made
    finally:
        made.remove(force=True, v=True)


def converse(helper: Any, request: bytes) -> bytes:
    """Standard output of a container that is given *request*."""
    attached = helper.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    stream = attached._sock
    helper.start()
    stream.settimeout(60)
    stream.sendall(request)
    with stream.makefile("rb") as answers:
        output = {1: b"", 2: b""}
        while header := answers.read(8):
            number, size = struct.unpack(">BxxxI", header)
            output[number] += answers.read(size)
    attached.close()
    stream.close()
    assert output[2] == b""
    return output[1]


@pytest.fixture
async def project(tmp_path: Path) -> Project:
    return await make_project(tmp_path)


@pytest.mark.requirement("B-52", "B-61")
async def test_a_workspace_goes_through_a_real_volume_and_comes_back(
    engine: Engine, project: Project
) -> None:
    chunks = workspace_archive(
        project.store,
        project.commit,
        uid=AGENT_UID,
        gid=AGENT_UID,
        max_bytes=1 << 20,
        max_entries=100,
        directory=WORKSPACE.removeprefix(f"{WORKSPACE_VOLUME}/"),
    )
    archive = b"".join([chunk async for chunk in chunks])
    request = helper_request(
        await tree_listing(project.store, project.commit),
        input_commit=project.commit,
        ref=REF,
        author_name="Forge",
        author_email="forge@example.org",
        date_seconds=1_700_000_000,
        message="m",
        max_bytes=1 << 20,
        max_files=100,
    )
    name = f"forge-test-{uuid.uuid4().hex}"
    with sdk(engine) as client:
        client.volumes.create(name)
        try:
            agent = ["/bin/sh", "-c", AGENT]
            with container(client, engine.tooling_image, agent, name, "rw") as made:
                made.put_archive(WORKSPACE_VOLUME, archive)
                made.start()
                assert made.wait(timeout=60)["StatusCode"] == 0, made.logs()
            helper = ["/usr/bin/python3", "-I", "-S", "-c", HELPER, WORKSPACE]
            with container(client, engine.tooling_image, helper, name, "ro") as made:
                answer = converse(made, request)
        finally:
            client.volumes.get(name).remove()
    line, _, bundle = answer.partition(b"\n")
    reply = parse_helper_reply(line)
    assert reply.result_commit is not None, reply
    output = await project.take(bundle, reply.result_commit)
    assert dataclasses.astuple(output) == (reply.result_commit, 4, reply.size_bytes)
    changed = git(project.store, "diff-tree", "-r", "--name-status", project.commit, REF)
    assert changed.decode().splitlines() == [
        "M\t.gitattributes",
        "M\tdir/inner",
        "A\tnew file",
        "D\tsecond",
    ]
    assert word(project.store, "show", "-s", "--format=%P", REF) == project.commit
