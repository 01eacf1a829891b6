"""The preflight's trial of the way out: passed only where it holds, and each layer by itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from egress_table import DOMAINS, NAMES, ROWS, SITE, Places
from engines import Engine as BedEngine
from engines import extra_image
from forge_bridge.egress import networks, way_out
from forge_bridge.egress.networks import AgentNetwork
from forge_bridge.egress.trial import EgressTrial, _TrialMaker
from forge_bridge.egress.way_out import Egress, open_egress
from forge_bridge.flows.teardown import remove_all
from forge_bridge.groups import first_error
from forge_bridge.services.images import Trial, fit_image
from forge_core.errors import EngineRefused, RefusedError
from forge_core.labels import PREFLIGHT, Owner, runner_filter
from forge_core.network_spec import network_request
from forge_core.sandbox_spec import ContainerSpec, Hardening
from forge_core.squid_conf import UpstreamProxy, squid_conf
from forge_core.subnet_pool import SubnetPool
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from public_site import public_site

POOL = IPv4Network("10.213.0.0/20")
ATTEMPTS = (Path(__file__).parent / "inside/egress_attempts.py").read_text()
pytestmark = [
    pytest.mark.engine("d26", "r26"),
    pytest.mark.requirement("B-54", "B-39", "B-51"),
    pytest.mark.timeout(120),
]


@dataclass(frozen=True)
class Subject:
    """An engine, and what is tried on it."""

    trial: Trial
    image: str

    def egress(self, image: str | None = None) -> EgressTrial:
        return EgressTrial(image or self.image, POOL, unsigned)

    async def left(self) -> list[str]:
        """What the trial has forgotten."""
        listed = await self.trial.engine.list_resources(runner_filter(self.trial.owner.runner_id))
        return [resource.name for resource in listed]


async def unsigned(_references: tuple[str, ...]) -> None:
    """Signatures are not what is tried."""


@pytest.fixture
async def subject(engine: BedEngine, runner_id: str) -> AsyncIterator[Subject]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    owner = Owner.of_runner(PREFLIGHT, runner_id, "instance", "domain")
    async with DockerEngine.connect(endpoint) as door:
        trial = Trial(door, owner, engine.tooling_image, Hardening())
        yield Subject(trial, extra_image(engine, "squid"))
        assert [r.name for r in await door.list_resources(runner_filter(runner_id))] == []


async def test_what_holds_is_offered_and_leaves_nothing(subject: Subject) -> None:
    egress = subject.egress()
    evidence = await egress.prove(subject.trial)
    assert "refuses a site, a tunnel and its own manager" in evidence
    assert egress.image is not None
    assert egress.image.reference == subject.image
    assert await subject.left() == []


async def test_a_host_in_the_network_is_found_out(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reaching_the_host(spec: Any) -> dict[str, Any]:
        return {**network_request(spec), "Options": {}}

    monkeypatch.setattr(networks, "network_request", reaching_the_host)
    egress = subject.egress()
    with pytest.raises(EngineRefused, match=r"the host can be reached at 10\.213\."):
        await egress.prove(subject.trial)
    assert egress.image is None


async def test_what_held_is_used_until_it_holds_no_more(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    egress, while_trying = subject.egress(), []
    create = subject.trial.engine.create_network

    async def watched(name: str, request: Mapping[str, Any]) -> str:
        while_trying.append(egress.image)
        return await create(name, request)

    await egress.prove(subject.trial)
    held = egress.image
    monkeypatch.setattr(subject.trial.engine, "create_network", watched)
    await egress.prove(subject.trial)
    assert while_trying == [held, held]
    assert held is not None
    egress.reference = "squid@sha256:" + "0" * 64
    with pytest.raises(RefusedError, match="the engine does not have it"):
        await egress.prove(subject.trial)
    assert egress.image is None


async def test_an_engine_that_drops_an_option_is_found_out(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dropping(spec: Any) -> dict[str, Any]:
        asked = network_request(spec)
        return {**asked, "Options": {**asked["Options"], "no.such.option": "true"}}

    create = subject.trial.engine.create_network

    async def obeying_half(name: str, request: Mapping[str, Any]) -> str:
        kept = {k: v for k, v in request["Options"].items() if k != "no.such.option"}
        return await create(name, {**request, "Options": kept})

    monkeypatch.setattr(networks, "network_request", dropping)
    monkeypatch.setattr(subject.trial.engine, "create_network", obeying_half)
    with pytest.raises(EngineRefused, match="otherwise than asked: Options"):
        await subject.egress().prove(subject.trial)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda conf: conf.replace("http_access deny", "# deny"),
            "(its manager) was answered with 200",
        ),
        (lambda conf: f"nonsense {conf}", "the egress proxy ended with"),
        (lambda conf: conf.replace(":3128", ":3129"), "answered with nothing"),
    ],
    ids=["open", "unreadable", "deaf"],
)
async def test_a_proxy_that_does_not_refuse_is_not_used(
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[str], str],
    said: str,
) -> None:
    monkeypatch.setattr(way_out, "READY_MS", 3_000)
    monkeypatch.setattr(
        way_out, "squid_conf", lambda *names, **more: change(squid_conf(*names, **more))
    )
    with pytest.raises(RefusedError) as refusal:
        await subject.egress().prove(subject.trial)
    assert said in str(refusal.value)


async def test_a_proxy_that_prints_its_configuration_tells_no_login(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = UpstreamProxy("192.0.2.1", 3128, "runner:s3cret word%")
    monkeypatch.setattr(
        way_out,
        "squid_conf",
        lambda *names, **more: squid_conf(*names, **more).replace(" parent 3128 ", " parent port "),
    )
    egress = EgressTrial(subject.image, POOL, unsigned, upstream)
    with pytest.raises(RefusedError) as refusal:
        await egress.prove(subject.trial)
    assert "cache_peer 192.0.2.1 parent port" in str(refusal.value)
    assert "login=runner:***" in str(refusal.value)
    assert "s3cret" not in str(refusal.value)


async def test_an_image_that_is_no_proxy_is_not_used(engine: BedEngine, subject: Subject) -> None:
    with pytest.raises(RefusedError, match="the egress proxy ended with 127"):
        await subject.egress(engine.busybox_image).prove(subject.trial)
    missing = "squid@sha256:" + "0" * 64
    with pytest.raises(RefusedError, match="the engine does not have it"):
        await subject.egress(missing).prove(subject.trial)


@pytest.mark.requirement("B-31")
async def test_what_is_not_signed_is_not_started(subject: Subject) -> None:
    async def refuse(references: tuple[str, ...]) -> None:
        raise RefusedError(f"cannot verify {references}", code="signature_invalid")

    egress = EgressTrial(subject.image, POOL, refuse)
    with pytest.raises(RefusedError) as refusal:
        await egress.prove(subject.trial)
    assert refusal.value.code == "signature_invalid"
    assert egress.image is None


@pytest.mark.engine("d20")
async def test_an_engine_that_contains_nothing_is_told(subject: Subject) -> None:
    with pytest.raises(EngineRefused, match=r"upgrade to 26\.1"):
        await subject.egress().prove(subject.trial)


async def test_without_the_rules_of_addresses_the_binding_still_holds(
    engine: BedEngine, subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unaware(*names: Any, **more: Any) -> str:
        conf = squid_conf(*names, **more)
        without = conf.replace("http_access deny not_public\n", "")
        assert without != conf
        return without.replace("http_access allow public\n", "http_access allow all\n")

    monkeypatch.setattr(way_out, "squid_conf", unaware)
    tried = ("private", "private-tls", "mixed", "metadata", "metadata6", "host-name", "late")
    again = ["again", "often", "http://www.example.org/again", "2"]
    rows = [row.filled(Places(*["203.0.113.1"] * 6)) for row in ROWS if row.id in tried]
    maker = _TrialMaker(subject.trial, SubnetPool(POOL))
    image = await fit_image(subject.trial.engine, subject.image)
    egress = Egress(image, subject.trial.tooling_image, DOMAINS)
    with public_site(engine, tmp_path, NAMES) as site:
        try:
            with first_error():
                async with open_egress(maker, egress) as network:
                    reached = await _try(maker, network, [*rows, again])
        finally:
            await remove_all(subject.trial.engine, subject.trial.owner)
        assert reached == {**dict.fromkeys(tried), "again": None}
        assert {one["at"] for one in site.arrived("http")} == {SITE}
        assert {one["path"] for one in site.arrived("http")} == {"/again"}


async def _try(
    maker: _TrialMaker, network: AgentNetwork, rows: list[list[str]]
) -> dict[str, str | None]:
    spec = ContainerSpec(
        owner=maker.owner,
        role="agent",
        image=maker.trial.tooling_image,
        argv=("/usr/bin/python3", "-c", ATTEMPTS),
        memory_bytes=128 << 20,
        cpu_millis=1000,
        pids=64,
        environment={**network.environment, "ATTEMPTS": json.dumps(rows)},
        network=network.name,
        name_servers=network.name_servers,
    )
    container, printed = await maker.create_container(spec), b""
    async with maker.engine.attach(container) as stream:
        await maker.engine.start_container(container)
        while (piece := await stream.receive()) is not None:
            printed += piece[1]
    return dict(json.loads(printed))
