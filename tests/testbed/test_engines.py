"""The engines are the versions and kinds that the project supports, and keep to themselves."""

from __future__ import annotations

import os

import pytest

from engines import Engine

API_VERSIONS = {"d26": "1.45", "r26": "1.45", "d20": "1.41", "r20": "1.41"}
RELEASES = {"d26": "26.1.", "r26": "26.1.", "d20": "20.10.", "r20": "20.10."}


def test_the_versions_are_the_supported_ones(engine: Engine) -> None:
    assert engine.api_version == API_VERSIONS[engine.name]
    assert engine.version.startswith(RELEASES[engine.name])


def test_rootless_is_what_the_engine_says_of_itself(engine: Engine) -> None:
    options = engine.api.get("/info")["SecurityOptions"]
    assert ("name=rootless" in options) == engine.rootless


@pytest.mark.engine("d26", "d20")
def test_rootful_engines_enforce_limits(engine: Engine) -> None:
    assert engine.limits_enforced


def test_the_daemon_has_a_network_of_its_own(engine: Engine) -> None:
    assert os.readlink(engine.network_namespace) != os.readlink("/proc/self/ns/net")


def test_the_daemon_uses_no_configuration_of_the_machine(engine: Engine) -> None:
    info = engine.api.get("/info")
    assert not info["LiveRestoreEnabled"]
    assert not info["DockerRootDir"].startswith("/var/lib/docker")
