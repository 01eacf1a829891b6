"""Whether the engine created what was asked: the request against its own inspect.

A request that was accepted is not a request that was obeyed (sandbox.md, *Every container*).
What this cannot see: an engine that echoes a limit and does not enforce it (rootless without
cgroup delegation); only a look from inside a container shows that (the doctor's probe).
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address
from typing import Any, Final

from forge_core.sandbox_spec import BLANKED_VARIABLES

_SAME: Final = (
    "AutoRemove",
    "CapDrop",
    "CgroupnsMode",
    "CpuPeriod",
    "CpuQuota",
    "IpcMode",
    "Memory",
    "MemorySwap",
    "NetworkMode",
    "PidsLimit",
    "Privileged",
    "PublishAllPorts",
    "ReadonlyRootfs",
    "SecurityOpt",
    "ShmSize",
    "Tmpfs",
)
_ABSENT: Final = (
    "Binds",
    "CapAdd",
    "DeviceCgroupRules",
    "DeviceRequests",
    "Devices",
    "DnsOptions",
    "DnsSearch",
    "ExtraHosts",
    "GroupAdd",
    "Init",
    "Links",
    "OomKillDisable",
    "PidMode",
    "PortBindings",
    "Sysctls",
    "UTSMode",
    "UsernsMode",
    "VolumesFrom",
)


def read_back(request: Mapping[str, Any], inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """What the engine says it created differs from what was asked: one sentence each.

    ``inspected`` is the engine's answer to an inspect of the created container.  Empty means
    that every hardening option was taken over.
    """
    wanted, got = request["HostConfig"], inspected.get("HostConfig") or {}
    faults = [
        _fault(key, wanted[key], got.get(key)) for key in _SAME if got.get(key) != wanted[key]
    ]
    faults += [_fault(key, "none", got[key]) for key in _ABSENT if got.get(key)]
    for key, name in (("LogConfig", "Type"), ("RestartPolicy", "Name")):
        if (has := (got.get(key) or {}).get(name)) != wanted[key][name]:
            faults.append(_fault(key, wanted[key][name], has))
    if (has := got.get("Dns") or []) != wanted["Dns"]:
        faults.append(_fault("Dns", wanted["Dns"], has))
    limits = {(limit["Name"], limit["Soft"], limit["Hard"]) for limit in got.get("Ulimits") or ()}
    missing = {(u["Name"], u["Soft"], u["Hard"]) for u in wanted["Ulimits"]} - limits
    if missing:
        faults.append(_fault("Ulimits", sorted(missing), sorted(limits)))
    if not got.get("MaskedPaths") or not got.get("ReadonlyPaths"):
        faults.append("MaskedPaths: the engine shows the container all of /proc and /sys")
    endpoints = (request.get("NetworkingConfig") or {}).get("EndpointsConfig") or {}
    return (
        *faults,
        *_config_faults(request, inspected),
        *_mount_faults(wanted, inspected),
        *endpoint_faults(endpoints, inspected),
    )


def endpoint_faults(
    wanted: Mapping[str, Mapping[str, Any]], inspected: Mapping[str, Any]
) -> tuple[str, ...]:
    """How the networks of a container differ from those that it should be in.

    :param wanted: the endpoint by the network's name (:func:`forge_core.sandbox_spec.endpoint`).
    """
    has = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    # To the engine, no network is one too; before the first start it may say nothing of it.
    joined = sorted(name for name in has if name != "none")
    if joined != sorted(wanted):
        return (_fault("Networks", sorted(wanted), joined),)
    return tuple(
        _fault(f"Networks.{name}.IPAMConfig", endpoint["IPAMConfig"], has[name].get("IPAMConfig"))
        for name, endpoint in wanted.items()
        if not endpoint.get("IPAMConfig", {}).items() <= (has[name].get("IPAMConfig") or {}).items()
    )


def address_in(inspected: Mapping[str, Any], network: str) -> IPv4Address | None:
    """The address of a container in a network; None: it does not run, or is not in it."""
    networks = (inspected.get("NetworkSettings") or {}).get("Networks") or {}
    try:
        return IPv4Address((networks.get(network) or {}).get("IPAddress") or "")
    except ValueError:
        return None


def _config_faults(request: Mapping[str, Any], inspected: Mapping[str, Any]) -> list[str]:
    got = inspected.get("Config") or {}
    keys = ("Entrypoint", "Hostname", "OpenStdin", "StdinOnce", "Tty", "User", "WorkingDir")
    faults = [
        _fault(key, request[key], got.get(key)) for key in keys if got.get(key) != request[key]
    ]
    check = (got.get("Healthcheck") or {}).get("Test")
    if check != request["Healthcheck"]["Test"]:
        faults.append(_fault("Healthcheck", request["Healthcheck"]["Test"], check))
    if got.get("Cmd"):
        faults.append(_fault("Cmd", "none", got["Cmd"]))
    if bool(got.get("NetworkDisabled")) != request["NetworkDisabled"]:
        faults.append(
            _fault("NetworkDisabled", request["NetworkDisabled"], not request["NetworkDisabled"])
        )
    asked = {entry for entry in request["Env"] if "=" in entry}
    blanked = {*BLANKED_VARIABLES, *request["Env"]} - asked
    for entry in got.get("Env") or ():
        # An entry without "=" is the engine's way of saying that the variable is blanked.
        name, equals, _ = entry.partition("=")
        if equals and entry not in asked and (name in blanked or name.startswith("LD_")):
            faults.append(f"Env: the image sets {name}, which can make PID 1 run other code")
    labels = got.get("Labels") or {}
    if not request["Labels"].items() <= labels.items():
        faults.append(_fault("Labels", request["Labels"], labels))
    return faults


def _mount_faults(wanted: Mapping[str, Any], inspected: Mapping[str, Any]) -> list[str]:
    asked = {("volume", m["Source"], m["Target"], not m["ReadOnly"]) for m in wanted["Mounts"]}
    has = {
        (m.get("Type"), m.get("Name") or m.get("Source"), m.get("Destination"), bool(m.get("RW")))
        for m in inspected.get("Mounts") or ()
        if m.get("Type") != "tmpfs"
    }
    return [] if asked == has else [_fault("Mounts", sorted(asked), sorted(has, key=str))]


def _fault(key: str, wanted: object, got: object) -> str:
    return f"{key}: asked for {wanted!r}, the engine has {got!r}"
