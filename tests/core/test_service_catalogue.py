"""Services beside an agent: their shares, their names, and what is believed of what they say."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.labels import Owner
from forge_core.offer_rules import refuse_shares
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import MIN_CPU_MILLIS, MIN_MEMORY_BYTES
from forge_core.services import (
    CATALOGUE,
    LEAST_AGENT,
    data_bytes,
    look_request,
    read_account,
    read_ready,
    serve_request,
    share_out,
    variables,
    version_fits,
)
from forge_core.wire.codes import RejectionCode, ServiceName
from forge_core.wire.shapes import Service

COMPONENTS = ("memory_bytes", "cpu_millis", "pids")
PASSWORD = "0123456789abcdef" * 2

vectors = st.builds(
    ResourceVector,
    slots=st.just(1),
    pids=st.integers(1, 4096),
    memory_bytes=st.integers(MIN_MEMORY_BYTES, 2**36),
    cpu_millis=st.integers(MIN_CPU_MILLIS, 64_000),
    disk_bytes=st.integers(0, 2**40),
)
some_services = st.sets(st.sampled_from(ServiceName), min_size=1)


@pytest.mark.requirement("B-55", "B-10")
@given(vectors, some_services)
def test_what_is_shared_out_is_what_is_held_and_everybody_can_run(
    whole: ResourceVector, names: set[ServiceName]
) -> None:
    try:
        shares = share_out(whole, names)
    except RefusedError:
        reject()
    total = shares.agent
    for share in shares.services.values():
        total += share
    assert total == whole
    assert set(shares.services) == names
    for component in COMPONENTS:
        assert getattr(shares.agent, component) >= getattr(LEAST_AGENT, component)
        for name, share in shares.services.items():
            assert getattr(share, component) >= getattr(CATALOGUE[name].least, component)


@pytest.mark.requirement("B-55")
def test_all_three_fit_into_what_an_offer_that_names_nothing_gets() -> None:
    whole = ResourceVector(slots=1, pids=256, memory_bytes=1 << 30, cpu_millis=1000)
    shares = share_out(whole, list(ServiceName))
    assert shares.agent.memory_bytes > 128 * 2**20
    assert shares.agent.cpu_millis == 300


@pytest.mark.requirement("B-55")
@pytest.mark.parametrize(
    ("small", "word"),
    [
        ({"memory_bytes": 200 * 2**20}, "memory_bytes"),
        ({"pids": 60}, "pids"),
        ({"cpu_millis": 11}, "cpu_millis"),
    ],
)
def test_an_offer_that_leaves_the_agent_too_little_is_refused_by_name(
    small: dict[str, int], word: str
) -> None:
    room: dict[str, Any] = {"pids": 256, "memory_bytes": 1 << 30, "cpu_millis": 1000}
    whole = ResourceVector(slots=1, **{**room, **small})
    verdict = refuse_shares(whole, [Service(name=ServiceName.POSTGRES)])
    assert verdict is not None
    assert verdict.code is RejectionCode.POLICY_UNSATISFIED
    assert verdict.detail is not None
    assert "postgres" in verdict.detail
    assert word in verdict.detail
    assert refuse_shares(whole, []) is None
    assert refuse_shares(ResourceVector(slots=1, **room), [Service(name=ServiceName.REDIS)]) is None


@pytest.mark.requirement("B-55")
def test_an_agent_finds_its_services_by_the_variables_of_their_clients() -> None:
    postgres = variables(ServiceName.POSTGRES, PASSWORD, "10.0.0.3")
    url = urlsplit(postgres["DATABASE_URL"])
    assert (url.scheme, url.hostname, url.port) == ("postgresql", "postgres", 5432)
    assert (url.username, url.password, url.path) == ("forge", PASSWORD, "/forge")
    assert postgres["PGPASSWORD"] == PASSWORD
    assert {postgres[f"PG{k}"] for k in ("HOST", "PORT", "USER", "DATABASE")} == {
        *("postgres", "5432", "forge")
    }
    redis = variables(ServiceName.REDIS, PASSWORD, "10.0.0.4")
    url = urlsplit(redis["REDIS_URL"])
    assert (url.hostname, url.port, url.password) == ("redis", 6379, PASSWORD)
    browser = variables(ServiceName.BROWSER, PASSWORD, "10.0.0.5")
    assert browser == {"BROWSER_CDP_URL": "http://10.0.0.5:9222"}


@pytest.mark.requirement("B-55")
def test_no_request_to_a_service_holds_a_password() -> None:
    kind = CATALOGUE[ServiceName.POSTGRES]
    share = kind.share(ResourceVector(pids=256, memory_bytes=1 << 30, cpu_millis=1000))
    asked = json.loads(serve_request(kind, share, proxy="http://egress-proxy:3128"))["serve"]
    assert asked["memoryBytes"] == share.memory_bytes == 2 * asked["dataBytes"]
    assert asked["dataBytes"] == data_bytes(share)
    assert asked["bypass"].split(";") == ["agent", "postgres", "redis", "browser"]
    assert not any("password" in key.lower() for key in asked)
    assert json.loads(look_request("postgres")) == {"look": "postgres"}


@pytest.mark.requirement("B-38")
@pytest.mark.parametrize(
    ("wanted", "actual", "fits"),
    [
        (None, "15.18", True),
        ("15", "15.18", True),
        ("15.18", "15.18", True),
        ("15.1", "15.18", False),
        ("1", "15.18", False),
        ("16", "15.18", False),
        ("7.0", "7.0.15", True),
        ("15.18.1", "15.18", False),
    ],
)
def test_a_version_is_asked_for_as_far_as_it_is_written(
    wanted: str | None, actual: str, fits: bool
) -> None:
    assert version_fits(wanted, actual) is fits


def test_what_a_service_says_of_itself_is_believed_within_bounds() -> None:
    assert read_ready('{"version": "15.18", "more": 1}').version == "15.18"
    for line in ("", "{}", "ready", '{"version": ""}', '{"version": 15}', "[" * 100_000):
        with pytest.raises(RefusedError) as refused:
            read_ready(line)
        assert refused.value.code == "service_not_ready"
    with pytest.raises(RefusedError):
        read_ready(json.dumps({"version": "9" * 65}))
    with pytest.raises(RefusedError):
        read_ready('{"version": "15\\nforged"}')


@pytest.mark.requirement("B-55")
@pytest.mark.parametrize(
    "line", ['{"user": [0, 70]}', '{"user": [70, 0]}', '{"user": [70]}', '{"user": [-1, 1]}', "{}"]
)
def test_no_service_runs_as_root(line: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read_account(line)
    assert refused.value.code == "image_policy_denied"


def test_an_account_is_two_numbers_or_not_there() -> None:
    assert read_account('{"user": [70, 71]}') == (70, 71)
    assert read_account('{"user": null}') is None


def test_every_service_has_a_name_of_its_own_in_an_engine() -> None:
    owner = Owner("runner", "instance", "attempt", 1, "project", "domain")
    names = {owner.name(kind.role) for kind in CATALOGUE.values()}
    assert len(names) == len(ServiceName)
