"""What the engine says about itself, and what follows for a runner (B-50)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from forge_bridge.doctor.preflight_settings import PreflightSettings
from forge_bridge.doctor.results import Check, CheckResult, Gate
from forge_core.blockers import Blocker
from forge_core.network_spec import contains_egress
from forge_core.wire.shapes import EngineFacts

ENGINE: Final = Gate(Blocker.ENGINE, "The Docker Engine answers", "GET /version and /info")
API: Final = Check("api_version", "Its API is one that is tested", "GET /version")
DESKTOP: Final = Gate(Blocker.DOCKER_DESKTOP, "It is not Docker Desktop", "GET /info")
ROOTLESS: Final = Gate(Blocker.ROOTLESS, "It runs rootless", "GET /info, SecurityOptions")
CGROUP: Final = Check("cgroup_version", "It uses cgroup v2", "GET /info, CgroupVersion")
RESTART: Final = Check(
    "live_restore", "Attempts survive a restart of the engine", "GET /info, LiveRestoreEnabled"
)


def engine_checks(
    facts: EngineFacts, info: Mapping[str, Any], settings: PreflightSettings
) -> Iterator[CheckResult]:
    """Every finding about an engine that answers."""
    yield ENGINE.passed(f"Docker Engine {facts.version}, id {facts.id}")
    yield _api(facts)
    yield _desktop(facts, settings)
    yield _rootless(facts)
    if facts.cgroup_version == "2":
        yield CGROUP.passed("cgroup v2")
    else:
        yield CGROUP.warns(
            f"cgroup v{facts.cgroup_version or '?'}: a rootless engine cannot enforce limits on it",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )
    yield _live_restore(facts, info)


def _api(facts: EngineFacts) -> CheckResult:
    evidence = f"API {facts.api_version} of Engine {facts.version}"
    if not contains_egress(facts.version):
        return API.warns(
            f"{evidence}: its internal networks keep a default route and its builder ignores "
            "source policies, so network policy none only, and no image builds",
            "upgrade to Docker Engine 26.1 or later",
        )
    return API.passed(evidence)


def _desktop(facts: EngineFacts, settings: PreflightSettings) -> CheckResult:
    if not facts.desktop:
        return DESKTOP.passed("a Linux engine")
    if settings.docker_desktop_allowed:
        return DESKTOP.blocks_required(
            "Docker Desktop, allowed for development by FORGE_ALLOW_DOCKER_DESKTOP_SANDBOX",
            "use a rootless engine on Linux",
        )
    return DESKTOP.blocks_all(
        "Docker Desktop is for development only",
        "use a rootless engine on Linux, or set FORGE_ALLOW_DOCKER_DESKTOP_SANDBOX=true",
    )


def _rootless(facts: EngineFacts) -> CheckResult:
    if facts.rootless:
        return ROOTLESS.passed("name=rootless")
    return ROOTLESS.blocks_required(
        "the engine runs as root: an escape from a container is root on this host",
        "dockerd-rootless-setuptool.sh install && docker context use rootless",
    )


def _live_restore(facts: EngineFacts, info: Mapping[str, Any]) -> CheckResult:
    if info.get("LiveRestoreEnabled") is True and not facts.rootless:
        return RESTART.passed("live-restore is on")
    if facts.rootless:
        return RESTART.warns(
            "a rootless engine ends its containers when it stops, live-restore or not",
            "drain the runner before restarting the engine: systemctl --user stop forge-bridge",
        )
    return RESTART.warns(
        "live-restore is off: a restart of the engine ends every attempt",
        'add {"live-restore": true} to /etc/docker/daemon.json && systemctl reload docker',
    )
