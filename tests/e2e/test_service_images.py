"""Service images on real engines: what is offered was tried, and what cannot be used says why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from ipaddress import IPv4Network
from typing import Any

import pytest
from image_parts import changed_image

from engines import Engine, extra_image
from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.results import CheckResult, Verdict
from forge_bridge.doctor.service_checks import prove_services, service_checks, usable_services
from forge_bridge.services import images as service_images
from forge_bridge.services.images import ServiceImages, Trial
from forge_core import network_spec
from forge_core.errors import RefusedError
from forge_core.labels import PREFLIGHT, Owner, runner_filter
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import Hardening
from forge_core.services import DATA
from forge_core.wire.codes import ServiceName
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

POOL = IPv4Network("10.231.240.0/24")
POSTGRES, REDIS = ServiceName.POSTGRES, ServiceName.REDIS

pytestmark = [pytest.mark.engine("d26"), pytest.mark.requirement("B-38")]

SERVER_FOR_EVERYBODY = b"""#!/usr/bin/python3
import socketserver, sys
sys.stdin.read()
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"+OK\\r\\n+PONG\\r\\n$20\\r\\nredis_version:7.0.15\\r\\n")
socketserver.TCPServer.allow_reuse_address = True
socketserver.TCPServer(("127.0.0.1", 6379), Answer).serve_forever()
"""
TALKATIVE_SERVER = b"""#!/bin/sh
cat >&2
exit 3
"""
SERVER_THAT_NEVER_LISTENS = b"""#!/bin/sh
exec sleep 600
"""


async def no_signatures(_references: tuple[str, ...]) -> None:
    """Nobody verifies anything."""


class Counting:
    """The engine, and which images containers were created from."""

    def __init__(self, door: DockerEngine) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self._door = door

    async def create_container(self, name: str, request: Mapping[str, Any]) -> str:
        self.requests.append(request)
        return await self._door.create_container(name, request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)


@pytest.fixture
async def trial(engine: Engine, runner_id: str) -> AsyncIterator[Trial]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    async with DockerEngine.connect(endpoint) as door:
        owner = Owner.of_runner(PREFLIGHT, runner_id, "instance", "domain")
        counting: Any = Counting(door)
        yield Trial(counting, owner, engine.tooling_image, Hardening())
        assert await door.list_resources(runner_filter(runner_id)) == []


def nameless_volumes(engine: Engine) -> set[str]:
    """Those that the engine makes by itself; whoever else uses the engine labels theirs."""
    found = engine.api.get("/volumes")["Volumes"] or ()
    return {v["Name"] for v in found if "dev.forge.managed" not in (v["Labels"] or {})}


@pytest.mark.engine("d26", "r26", "d20")
@pytest.mark.requirement("B-51", "B-55")
async def test_an_image_that_works_is_tried_once_and_leaves_nothing(
    engine: Engine, trial: Trial
) -> None:
    references = {name: extra_image(engine, name.value) for name in (POSTGRES, REDIS)}
    before = nameless_volumes(engine)
    services = ServiceImages(references, no_signatures)
    shown, failed, _unseen = await services.prove(trial)
    assert failed == {}
    assert nameless_volumes(engine) <= before, "an image's VOLUME became a volume"
    assert services.usable[POSTGRES].version.startswith("15.")
    assert services.usable[POSTGRES].uid == 70, "initdb wants an account with a name"
    assert services.usable[REDIS].version.startswith("7.")
    assert services.usable[REDIS].uid == 1000
    assert "nobody without the password" in shown["service_postgres"]
    engine_calls = trial.engine.requests  # type: ignore[attr-defined]
    server = engine_calls[-1]["HostConfig"]
    assert server["Tmpfs"][DATA].split(",")[:3] == ["noexec", "nosuid", "nodev"]
    assert server["CapDrop"] == ["ALL"]
    assert server["NetworkMode"] == "none"
    engine_calls.clear()
    assert await services.prove(trial) == (shown, {}, {})
    assert engine_calls == [], "it was tried again"


@pytest.mark.requirement("B-31")
async def test_an_image_with_a_bad_signature_is_never_run(engine: Engine, trial: Trial) -> None:
    reference = extra_image(engine, "redis")
    is_good = False

    async def check(references: tuple[str, ...]) -> None:
        assert references == (reference,)
        if not is_good:
            raise RefusedError("cannot use it: the signature is not good", code="signature_invalid")

    services = ServiceImages({REDIS: reference}, check)
    shown, failed, _unseen = await services.prove(trial)
    assert (shown, list(failed)) == ({}, ["service_redis"])
    assert "signature" in failed["service_redis"]
    assert services.usable == {}
    assert trial.engine.requests == []  # type: ignore[attr-defined]
    is_good = True
    assert list((await services.prove(trial))[0]) == ["service_redis"]
    assert REDIS in services.usable


async def why_not(trial: Trial, name: ServiceName, reference: str) -> str:
    services = ServiceImages({name: reference}, no_signatures)
    shown, failed, _unseen = await services.prove(trial)
    assert shown == {}
    assert services.usable == {}
    (why,) = failed.values()
    assert why.startswith("cannot use image")
    return why


@pytest.mark.requirement("B-55")
@pytest.mark.parametrize(
    ("files", "changes", "why"),
    [
        ({}, (), "No such file or directory: 'redis-server'"),
        (
            {"usr/bin/redis-server": SERVER_FOR_EVERYBODY},
            (),
            "answers whoever has not the password",
        ),
        ({"etc/ld.so.preload": b""}, (), "it has /etc/ld.so.preload"),
        ({}, ("VOLUME /etc",), "VOLUME ['/etc']"),
        ({}, ("ONBUILD RUN true",), "ONBUILD"),
        ({}, ("LABEL dev.forge.managed=bridge",), "dev.forge.managed"),
    ],
)
async def test_an_image_that_cannot_be_used_says_why(
    engine: Engine, trial: Trial, files: dict[str, bytes], changes: tuple[str, ...], why: str
) -> None:
    with changed_image(engine.api, engine.tooling_image, files, *changes) as image:
        assert why in await why_not(trial, REDIS, image)


@pytest.mark.requirement("B-55")
async def test_an_account_that_is_root_runs_nothing(engine: Engine, trial: Trial) -> None:
    passwd = b"root:x:0:0::/:/bin/sh\npostgres:x:0:0::/:/bin/sh\n"
    with changed_image(engine.api, engine.tooling_image, {"etc/passwd": passwd}) as image:
        services = ServiceImages({POSTGRES: image}, no_signatures)
        assert "root" in (await services.prove(trial))[1]["service_postgres"]
    users = {request["User"] for request in trial.engine.requests}  # type: ignore[attr-defined]
    assert not any(user.startswith("0:") for user in users)


@pytest.mark.requirement("B-55")
async def test_what_a_server_says_before_it_ends_is_told_without_its_password(
    engine: Engine, trial: Trial
) -> None:
    files = {"usr/bin/redis-server": TALKATIVE_SERVER}
    with changed_image(engine.api, engine.tooling_image, files) as image:
        why = await why_not(trial, REDIS, image)
    assert "the server ended with exit code 3" in why
    assert "requirepass *** protected-mode no" in why


@pytest.mark.requirement("B-55")
async def test_a_server_that_never_answers_is_not_waited_for_for_ever(
    engine: Engine, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_images, "PROBE_MS", 1_500)
    files = {"usr/bin/redis-server": SERVER_THAT_NEVER_LISTENS}
    with changed_image(engine.api, engine.tooling_image, files) as image:
        assert "did not answer within 1500 ms" in await why_not(trial, REDIS, image)


async def test_an_image_that_is_not_there_is_never_pulled(engine: Engine, trial: Trial) -> None:
    there = extra_image(engine, "redis").rpartition("@")[0]
    assert "pull it on the runner host" in await why_not(trial, REDIS, f"{there}@sha256:{'0' * 64}")


# -- what is offered on the strength of this ------------------------------------------------------


async def offered(trial: Trial, reference: str) -> tuple[tuple[ServiceName, ...], CheckResult]:
    """What the preflight would offer, and its finding."""
    services = ServiceImages({REDIS: reference}, no_signatures)
    settings = PreflightSettings(
        owner=trial.owner,
        tooling_image=trial.tooling_image,
        hardening=trial.hardening,
        capacity=ResourceCapacity(1),
        services=(REDIS,),
    )
    proofs = await prove_services(services, trial.engine, settings, POOL)
    settings = settings.with_proofs(proofs)
    (finding,) = service_checks(settings)
    assert set(usable_services(settings)) == set(services.usable)
    return usable_services(settings), finding


@pytest.mark.engine("d26", "r26")
@pytest.mark.requirement("B-06", "B-51")
async def test_a_service_is_offered_where_image_and_network_hold(
    engine: Engine, trial: Trial
) -> None:
    names, finding = await offered(trial, extra_image(engine, "redis"))
    assert names == (REDIS,)
    assert finding.verdict is Verdict.PASS
    names, finding = await offered(trial, engine.busybox_image)
    assert names == ()
    assert finding.verdict is Verdict.WARN, "nothing else depends on it"
    assert not finding.blocks


@pytest.mark.requirement("B-54")
async def test_no_service_is_offered_where_its_network_reaches_the_host(
    engine: Engine, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "com.docker.network.bridge.enable_ip_masquerade"
    monkeypatch.setattr(network_spec, "NO_HOST_ADDRESS", plain)
    names, finding = await offered(trial, extra_image(engine, "redis"))
    assert names == ()
    assert "the host can be reached at" in finding.evidence


@pytest.mark.engine("d20")
@pytest.mark.requirement("B-54")
async def test_no_service_is_offered_on_an_engine_that_cannot_contain_it(
    engine: Engine, trial: Trial
) -> None:
    names, finding = await offered(trial, extra_image(engine, "redis"))
    assert names == ()
    assert "upgrade to 26.1" in finding.evidence
