"""The engine's own words about itself and what it holds, in ours; no request is made here."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from forge_core.errors import EngineRefused
from forge_core.ports import EngineImage, EngineResource, PathKind
from forge_core.wire.codes import ResourceKind
from forge_core.wire.shapes import EngineFacts, EngineLimits

OLDEST_API: Final = "1.41"  # Engine 20.10
NEWEST_API: Final = "1.45"  # Engine 26.1; newer engines serve it too
UNKNOWN_TIME: Final = "1970-01-01T00:00:00.000Z"

_GO_MODE_DIRECTORY: Final = 1 << 31
_GO_MODE_LINK: Final = 1 << 27
_FRACTION = re.compile(r"\.(\d{1,6})\d*")


def agree_on_api(version: Mapping[str, Any]) -> str:
    """The newest API version that both sides speak.

    :param version: the engine's answer to ``/version``.
    :raises EngineRefused: there is none.
    """
    newest, oldest = version.get("ApiVersion"), version.get("MinAPIVersion") or OLDEST_API
    try:
        low, high = _numbers(oldest), _numbers(newest)
    except (AttributeError, ValueError):
        raise EngineRefused(
            f"cannot use this engine: its API version {newest!r} makes no sense"
        ) from None
    if high < _numbers(OLDEST_API):
        raise EngineRefused(
            f"cannot use this engine: it speaks API {newest}, and {OLDEST_API} is needed; "
            "upgrade it to Docker Engine 20.10 or later (26.1 to build images)"
        )
    if low > _numbers(NEWEST_API):
        raise EngineRefused(
            f"cannot use this engine: it no longer speaks API {NEWEST_API} (its oldest is "
            f"{oldest}); upgrade forge-bridge"
        )
    return str(newest) if high <= _numbers(NEWEST_API) else NEWEST_API


def _numbers(version: Any) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def engine_facts(version: Mapping[str, Any], info: Mapping[str, Any]) -> EngineFacts:
    """Who the engine is and what it says it enforces.

    :raises EngineRefused: it does not say who it is.
    """
    if not info.get("ID"):
        raise EngineRefused("cannot use this engine: it has no id")
    return EngineFacts(
        id=str(info["ID"])[:256],
        version=str(version.get("Version") or "unknown")[:256],
        api_version=str(version.get("ApiVersion") or "unknown")[:256],
        rootless=any("name=rootless" in option for option in info.get("SecurityOptions") or ()),
        desktop=is_desktop(info),
        cgroup_version=str(info.get("CgroupVersion") or "")[:16],
        storage_driver=str(info.get("Driver") or "")[:64],
        limits=EngineLimits(
            memory=info.get("MemoryLimit") is True,
            pids=info.get("PidsLimit") is True,
            cpu=info.get("CpuCfsQuota") is True and info.get("CpuCfsPeriod") is not False,
        ),
    )


def is_desktop(info: Mapping[str, Any]) -> bool:
    """Whether it is Docker Desktop, whose containers run in a virtual machine of its own."""
    labels = info.get("Labels") or ()
    return (
        info.get("OperatingSystem") == "Docker Desktop"
        or info.get("Name") == "docker-desktop"
        or any(str(label).startswith("com.docker.desktop.") for label in labels)
    )


def engine_resource(kind: ResourceKind, item: Mapping[str, Any]) -> EngineResource:
    """One item of the engine's container, network or volume list."""
    if kind is ResourceKind.CONTAINER:
        # A linked container also has names of the form /other/alias; one being removed has none.
        names = [name.removeprefix("/") for name in item.get("Names") or ()]
        name = next((name for name in names if "/" not in name), "")
        created_at = from_unix(item.get("Created"))
    else:
        name = str(item.get("Name") or "")
        created_at = normalised(item.get("Created") or item.get("CreatedAt"))
    identity = name if kind is ResourceKind.VOLUME else str(item["Id"])
    return EngineResource(kind, identity, name, dict(item.get("Labels") or {}), created_at)


def engine_image(item: Mapping[str, Any]) -> EngineImage:
    """One item of the engine's image list; to some engines, no name at all is one too."""
    names = [name for name in item.get("RepoTags") or () if name != "<none>:<none>"]
    return EngineImage(str(item["Id"]), tuple(names), dict(item.get("Labels") or {}))


def path_kind(stat: str, what: str) -> PathKind:
    """What an ``X-Docker-Container-Path-Stat`` header describes: base64 of JSON, its mode as Go's.

    :raises EngineRefused: that is no such header.
    """
    try:
        mode = int(json.loads(base64.b64decode(stat, validate=True))["mode"])
    except (ValueError, KeyError, TypeError):
        raise EngineRefused(f"cannot {what}: the engine does not say what it is") from None
    if mode & _GO_MODE_LINK:
        return "link"
    return "directory" if mode & _GO_MODE_DIRECTORY else "other"


def from_unix(seconds: object) -> str:
    """Whole seconds since the epoch as RFC 3339 UTC with milliseconds."""
    try:
        return _format(datetime.fromtimestamp(seconds, UTC))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return UNKNOWN_TIME


def normalised(text: object) -> str:
    """The engine's RFC 3339 (any zone, nanoseconds) as UTC with milliseconds."""
    try:
        parsed = datetime.fromisoformat(_FRACTION.sub(r".\1", str(text)))
    except ValueError:
        return UNKNOWN_TIME
    return _format(parsed.astimezone(UTC)) if parsed.tzinfo else UNKNOWN_TIME


def _format(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
