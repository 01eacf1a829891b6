"""PID 1 in an image that is not ours: it runs anywhere, and the image has no say in it."""

from __future__ import annotations

import json
import platform
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from image_parts import file_in_image, imported_image

import forge_supervisor
from engines import Engine
from forge_bridge.images import pack_tooling
from forge_bridge.images.tooling import PID_1_ENVIRONMENT, Tooling, ToolingTree
from forge_core.errors import RefusedError
from forge_core.labels import TOOLING, Owner, runner_filter
from forge_core.sandbox_spec import (
    TOOLING_MOUNT,
    ContainerSpec,
    Hardening,
    container_request,
    image_variables,
)
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

SUPERVISOR = Path(str(forge_supervisor.__file__)).with_name("supervisor.py").read_text()
PACKER = Path(pack_tooling.__file__).read_text()
GARBAGE = b"not what it seems"
LIBRARY_FOLDERS = (
    *("lib", "lib64", "usr/lib", "usr/lib64"),
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"),
)
OPENSSL_CONFIGURATIONS = ("etc/ssl/openssl.cnf", "usr/lib/ssl/openssl.cnf")
EVIL_PROVIDER = b"""\
openssl_conf = a
[a]
providers = b
[b]
default = d
evil = e
[d]
activate = 1
[e]
module = /evil.so
activate = 1
"""

pytestmark = pytest.mark.engine("d26", "r26", "d20")


@pytest.fixture
async def door(engine: Engine) -> AsyncIterator[DockerEngine]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    async with DockerEngine.connect(endpoint) as door:
        yield door


@pytest.fixture
async def tooling(door: DockerEngine, engine: Engine, runner_id: str) -> AsyncIterator[Tooling]:
    owner = Owner.of_runner(TOOLING, runner_id, "instance", "domain")
    tooling = Tooling(door, owner, engine.tooling_image, SUPERVISOR, Hardening())
    yield tooling
    await tooling.remove()
    assert await door.list_resources(runner_filter(runner_id)) == []


async def look(door: DockerEngine, tooling: Tooling, tree: ToolingTree, image: str) -> str:
    """What a process of the tree says in this image."""
    variables = image_variables(await door.inspect_image(image))
    spec = ContainerSpec(
        owner=tooling.owner,
        role="agent",
        image=image,
        argv=(*tree.interpreter, "-I", "-S", "-c", PACKER, "look", SUPERVISOR),
        memory_bytes=128 * 2**20,
        cpu_millis=1000,
        pids=16,
        environment=PID_1_ENVIRONMENT,
        blanked=variables,
        mounts=(tree.mount,),
    )
    container = await door.create_container(spec.name, container_request(spec, Hardening()))
    said = b""
    async with door.attach(container) as stream:
        await door.start_container(container)
        while (piece := await stream.receive()) is not None:
            said += piece[1]
    await door.remove_container(container)
    return said.decode()


@pytest.mark.requirement("B-29", "B-70")
async def test_it_runs_in_an_image_that_holds_nothing_of_it(
    door: DockerEngine, tooling: Tooling, engine: Engine
) -> None:
    tree = await tooling.provide()
    seen = json.loads(await look(door, tooling, tree, engine.busybox_image))
    assert all(path.startswith(f"{TOOLING_MOUNT}/") for path in seen["files"] + seen["modules"])
    with imported_image(engine.api, {"only-this": b""}) as nearly_empty:
        again = json.loads(await look(door, tooling, tree, nearly_empty))
    assert (again["files"], again["modules"]) == (seen["files"], seen["modules"])


@pytest.mark.requirement("B-29", "B-70")
async def test_nothing_in_the_image_gets_into_pid_1(
    door: DockerEngine, tooling: Tooling, engine: Engine
) -> None:
    tree = await tooling.provide()
    loader = Path(tree.interpreter[0]).name
    libraries = (loader, "libc.so.6", "libm.so.6", "libz.so.1", "libexpat.so.1")
    # A library that stays loaded once it was: OpenSSL's own (dlopen(3), RTLD_NODELETE).
    elsewhere = json.loads(await look(door, tooling, tree, engine.busybox_image))
    (crypto,) = [Path(path).name for path in elsewhere["files"] if "libcrypto" in path]
    files = {
        **{f"{place}/{name}": GARBAGE for place in LIBRARY_FOLDERS for name in libraries},
        **{f"{place}/gconv/gconv-modules": GARBAGE for place in LIBRARY_FOLDERS},
        **{f"{place}/python3.11/os.py": b"raise SystemExit" for place in LIBRARY_FOLDERS},
        "etc/ld.so.cache": GARBAGE,
        "usr/lib/locale/locale-archive": GARBAGE,
        **dict.fromkeys(OPENSSL_CONFIGURATIONS, EVIL_PROVIDER),
        "evil.so": library_of(engine, crypto),
    }
    changes = (
        "ENV LC_ALL=de_DE.ISO-8859-15 LANG=de_DE GCONV_PATH=/usr/lib/gconv",
        "ENV OPENSSL_CONF=/etc/ssl/openssl.cnf OPENSSL_MODULES=/ SSL_CERT_FILE=/evil.so",
        "ENV LD_LIBRARY_PATH=/lib LD_PRELOAD=/evil.so GLIBC_TUNABLES=glibc.malloc.check=3",
        "ENV PYTHONHOME=/usr PYTHONPATH=/usr/lib/python3.11",
        'ENTRYPOINT ["/evil.so"]',
        'CMD ["/evil.so"]',
        "USER root",
        "WORKDIR /nowhere",
    )
    with imported_image(engine.api, files, *changes) as hostile:
        seen = json.loads(await look(door, tooling, tree, hostile))
    assert all(path.startswith(f"{TOOLING_MOUNT}/") for path in seen["files"] + seen["modules"])
    assert seen["environment"].keys() - {"HOME", "HOSTNAME", "PATH"} == PID_1_ENVIRONMENT.keys()
    assert PID_1_ENVIRONMENT.items() <= seen["environment"].items()


def library_of(engine: Engine, name: str) -> bytes:
    """A shared library of the tooling image."""
    machine = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}[platform.machine()]
    return file_in_image(engine.api, engine.tooling_image, f"/usr/lib/{machine}/{name}")


async def test_it_is_made_once_and_again_when_it_is_gone(
    door: DockerEngine, tooling: Tooling, runner_id: str
) -> None:
    tree = await tooling.provide()
    (listed,) = await door.list_resources(runner_filter(runner_id))
    assert await tooling.provide() == tree
    assert await door.list_resources(runner_filter(runner_id)) == [listed]
    await door.remove_volume(tree.volume)
    assert await tooling.provide() == tree
    (again,) = await door.list_resources(runner_filter(runner_id))
    assert again.name == listed.name


@pytest.mark.requirement("B-29")
async def test_an_image_without_an_interpreter_is_refused_and_leaves_nothing(
    door: DockerEngine, tooling: Tooling, engine: Engine, runner_id: str
) -> None:
    tooling.image = engine.busybox_image
    with pytest.raises(RefusedError) as error:
        await tooling.provide()
    assert error.value.code in {"image_policy_denied", "engine_refused"}
    assert await door.list_resources(runner_filter(runner_id)) == []
