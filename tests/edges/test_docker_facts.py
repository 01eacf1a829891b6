"""The engine's words in ours: API versions, facts, listed resources, times."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.errors import EngineRefused
from forge_core.wire.codes import ResourceKind
from forge_edges.docker_facts import (
    UNKNOWN_TIME,
    agree_on_api,
    engine_facts,
    engine_resource,
    from_unix,
    normalised,
)

INFO = {"ID": "id-1", "Driver": "overlay2", "CgroupVersion": "2", "OperatingSystem": "Debian"}
VERSION = {"Version": "26.1.5", "ApiVersion": "1.45"}


@pytest.mark.requirement("B-05")
@pytest.mark.parametrize(
    ("newest", "oldest", "agreed"),
    [
        ("1.41", "1.12", "1.41"),
        ("1.43", "1.24", "1.43"),
        ("1.45", "1.24", "1.45"),
        ("1.51", "1.24", "1.45"),
        ("1.52", "1.44", "1.45"),
        ("1.41", None, "1.41"),
    ],
)
def test_the_newest_common_api_is_spoken(newest: str, oldest: str | None, agreed: str) -> None:
    assert agree_on_api({"ApiVersion": newest, "MinAPIVersion": oldest}) == agreed


@pytest.mark.requirement("B-05")
@pytest.mark.parametrize(
    ("version", "words"),
    [
        ({"ApiVersion": "1.40", "MinAPIVersion": "1.12"}, "20.10 or later"),
        ({"ApiVersion": "1.60", "MinAPIVersion": "1.46"}, "upgrade forge-bridge"),
        ({"ApiVersion": "one"}, "makes no sense"),
        ({"ApiVersion": None}, "makes no sense"),
        ({}, "makes no sense"),
    ],
)
def test_no_common_api_says_what_to_do(version: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        agree_on_api(version)


@pytest.mark.requirement("B-50")
@pytest.mark.parametrize(
    ("more", "desktop"),
    [
        ({}, False),
        ({"OperatingSystem": "Docker Desktop"}, True),
        ({"Name": "docker-desktop"}, True),
        ({"Labels": ["com.docker.desktop.address=unix:///x"]}, True),
        ({"Labels": ["a=b"], "Name": "host"}, False),
    ],
)
def test_docker_desktop_is_recognised(more: dict[str, Any], desktop: bool) -> None:
    assert engine_facts(VERSION, {**INFO, **more}).desktop is desktop


@pytest.mark.requirement("B-06")
def test_limits_count_only_when_the_engine_says_so() -> None:
    silent = engine_facts(VERSION, INFO).limits
    assert (silent.memory, silent.pids, silent.cpu) == (False, False, False)
    flags = {"MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True, "CpuCfsPeriod": True}
    full = engine_facts(VERSION, {**INFO, **flags}).limits
    assert (full.memory, full.pids, full.cpu) == (True, True, True)


def test_rootless_is_a_security_option() -> None:
    options = ["name=seccomp,profile=default", "name=rootless"]
    assert engine_facts(VERSION, {**INFO, "SecurityOptions": options}).rootless
    assert not engine_facts(VERSION, {**INFO, "SecurityOptions": options[:1]}).rootless


def test_an_engine_without_an_id_is_refused() -> None:
    with pytest.raises(EngineRefused, match="no id"):
        engine_facts(VERSION, {**INFO, "ID": ""})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-29T17:27:26.088123456Z", "2026-11-29T17:27:26.088Z"),
        ("2026-11-29T17:27:26Z", "2026-11-29T17:27:26.000Z"),
        ("2026-11-29T17:27:26+01:00", "2026-11-29T16:27:26.000Z"),
        ("2026-11-29T17:27:26.5-02:30", "2026-11-29T19:57:26.500Z"),
        ("2026-11-29T17:27:26", UNKNOWN_TIME),
        ("yesterday", UNKNOWN_TIME),
        (None, UNKNOWN_TIME),
    ],
)
def test_every_time_becomes_utc_with_milliseconds(text: str | None, expected: str) -> None:
    assert normalised(text) == expected


def test_container_times_are_seconds() -> None:
    assert from_unix(1_796_000_000) == "2026-11-30T00:53:20.000Z"
    assert from_unix(None) == UNKNOWN_TIME
    assert from_unix(10**30) == UNKNOWN_TIME


def test_a_container_is_called_by_its_own_name_not_by_a_link() -> None:
    item = {"Id": "c1", "Names": ["/other/alias", "/mine"], "Labels": None, "Created": 0}
    found = engine_resource(ResourceKind.CONTAINER, item)
    assert (found.name, found.labels) == ("mine", {})
    nameless = engine_resource(ResourceKind.CONTAINER, {"Id": "c1", "Names": None, "Created": 0})
    assert nameless.name == ""


def test_a_volume_is_its_name() -> None:
    found = engine_resource(ResourceKind.VOLUME, {"Name": "v1", "CreatedAt": None})
    assert (found.id, found.name, found.created_at) == ("v1", "v1", UNKNOWN_TIME)
