"""Every container of ours, whatever is asked: the hardening list of sandbox.md as properties."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.labels import Owner
from forge_core.read_back import read_back
from forge_core.sandbox_spec import (
    BLANKED_VARIABLES,
    ContainerSpec,
    Hardening,
    VolumeMount,
    container_request,
    coverable,
    image_faults,
    image_variables,
    image_volumes,
    require_pinned,
)

OWNER = Owner("runner-1", "instance-1", "attempt-1", 7, "project-1", "domain-1")
IMAGE = "registry.example:5000/team/tooling@sha256:" + "ab" * 32
SPEC = ContainerSpec(
    owner=OWNER,
    role="agent",
    image=IMAGE,
    argv=("/usr/bin/python3", "-I"),
    memory_bytes=512 * 2**20,
    cpu_millis=1500,
    pids=256,
    environment={"LANG": "C.UTF-8"},
    mounts=(VolumeMount("forge-workspace-0123", "/workspace", read_only=False),),
)
PROFILE = json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": []})

names = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,30}", fullmatch=True)
texts = st.text(st.characters(exclude_characters="\0"), max_size=40)
sizes = st.integers(6 * 2**20, 2**45)
specs = st.builds(
    ContainerSpec,
    owner=st.just(OWNER),
    role=st.sampled_from(["agent", "helper", "service"]),
    image=st.just(IMAGE),
    argv=st.lists(texts, min_size=1, max_size=4).map(tuple),
    memory_bytes=sizes,
    cpu_millis=st.integers(10, 64_000),
    pids=st.integers(1, 32_768),
    environment=st.dictionaries(
        st.from_regex(r"[A-Za-z_]\w{0,20}", fullmatch=True).filter(str.isascii), texts, max_size=4
    ),
    working_directory=st.sampled_from(["/", "/workspace/tree"]),
    mounts=st.lists(
        st.builds(VolumeMount, names, st.sampled_from(["/workspace", "/cache/a"]), st.booleans()),
        max_size=2,
    ).map(tuple),
    tmp_bytes=sizes,
    run_bytes=sizes,
    shm_bytes=sizes,
    nofile=st.integers(1, 2**20),
    tmp_exec=st.booleans(),
    network=st.none() | names.filter(lambda name: name not in {"host", "none", "default"}),
    resolves_localhost=st.booleans(),
    uid=st.integers(1, 65_534),
    gid=st.integers(1, 65_534),
    tmpfs=st.dictionaries(st.sampled_from(["/data", "/var/lib/postgresql/data"]), sizes),
)
hardenings = st.builds(
    Hardening,
    st.none() | st.just(PROFILE),
    st.none() | st.sampled_from(["apparmor=docker-default", "label=type:sandbox_t"]),
)


def as_inspected(request: dict[str, Any]) -> dict[str, Any]:
    """What an engine that obeys says about a container made from ``request``."""
    host = copy.deepcopy(request["HostConfig"])
    mounts = [
        {"Type": "volume", "Name": m["Source"], "Destination": m["Target"], "RW": not m["ReadOnly"]}
        for m in host["Mounts"]
    ]
    host["MaskedPaths"], host["ReadonlyPaths"] = ["/proc/kcore"], ["/proc/sys"]
    config = {key: value for key, value in copy.deepcopy(request).items() if key != "HostConfig"}
    joined = copy.deepcopy(request.get("NetworkingConfig", {}).get("EndpointsConfig", {}))
    return {
        "Config": config,
        "HostConfig": host,
        "Mounts": mounts,
        "NetworkSettings": {"Networks": joined or {"none": {"IPAMConfig": None}}},
    }


@pytest.mark.requirement("B-35", "A-03")
@given(specs, hardenings)
def test_no_spec_reaches_the_host(spec: ContainerSpec, hardening: Hardening) -> None:
    request = container_request(spec, hardening)
    host = request["HostConfig"]
    assert {mount["Type"] for mount in host["Mounts"]} <= {"volume"}
    assert not any("/" in mount["Source"] for mount in host["Mounts"])
    assert not {"Binds", "VolumesFrom", "DeviceRequests", "Sysctls"} & host.keys()
    assert not {"PidMode", "UTSMode", "UsernsMode", "CgroupParent", "Runtime"} & host.keys()
    assert host["Devices"] == []
    assert host["PortBindings"] == {}
    assert not host["PublishAllPorts"]
    assert host["IpcMode"] == host["CgroupnsMode"] == "private"
    assert host["NetworkMode"] == (spec.network or "none") != "host"
    assert "docker.sock" not in json.dumps(host)


@pytest.mark.requirement("B-35", "A-03")
@given(specs, hardenings)
def test_no_spec_keeps_a_privilege(spec: ContainerSpec, hardening: Hardening) -> None:
    request = container_request(spec, hardening)
    host = request["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == []
    assert host["Privileged"] is False
    assert host["ReadonlyRootfs"] is True
    assert host["SecurityOpt"][0] == "no-new-privileges"
    assert not any("unconfined" in option or "disable" in option for option in host["SecurityOpt"])
    assert request["User"] == f"{spec.uid}:{spec.gid}"
    assert all(int(number) > 0 for number in request["User"].split(":"))
    assert request["Healthcheck"] == {"Test": ["NONE"]}
    for target, options in host["Tmpfs"].items():
        flags = set(options.split(","))
        assert {"nosuid", "nodev"} <= flags
        assert "noexec" in flags or (target == "/tmp" and spec.tmp_exec)
        assert any(flag.startswith("size=") and flag != "size=0" for flag in flags)


@pytest.mark.requirement("B-10")
@given(specs, hardenings)
def test_every_limit_is_there_and_none_is_unlimited(
    spec: ContainerSpec, hardening: Hardening
) -> None:
    host = container_request(spec, hardening)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == spec.memory_bytes > 0
    assert host["PidsLimit"] == spec.pids > 0
    assert host["CpuQuota"] * 1000 == spec.cpu_millis * host["CpuPeriod"] > 0
    assert {limit["Name"] for limit in host["Ulimits"]} == {"nofile", "core"}
    assert host["ShmSize"] == spec.shm_bytes > 0
    assert host["OomKillDisable"] is False
    assert host["RestartPolicy"] == {"Name": "no"}


@given(specs, hardenings)
def test_nothing_is_printed_to_the_engines_log_and_loader_variables_go(
    spec: ContainerSpec, hardening: Hardening
) -> None:
    request = container_request(spec, hardening)
    assert request["HostConfig"]["LogConfig"]["Type"] == "none"
    names_given = {entry.partition("=")[0] for entry in request["Env"]}
    assert set(BLANKED_VARIABLES) <= names_given
    assert len(names_given) == len(request["Env"])


@pytest.mark.requirement("B-29", "A-03")
@pytest.mark.parametrize(
    "reference",
    [
        IMAGE,
        "sha256:" + "0" * 64,
        "busybox@sha256:" + "0" * 64,
        "127.0.0.1:5000/a/b-c_d.e@sha256:" + "f" * 64,
    ],
)
def test_a_digest_pins(reference: str) -> None:
    assert require_pinned(reference, field_name="image") == reference


@pytest.mark.requirement("B-29", "A-03")
@pytest.mark.parametrize(
    "reference",
    [
        "",
        "busybox",
        "busybox:latest",
        "busybox:1@sha256:" + "0" * 64,
        "busybox@sha256:" + "0" * 63,
        "busybox@sha256:" + "0" * 65,
        "busybox@sha256:" + "A" * 64,
        "busybox@sha512:" + "0" * 64,
        "@sha256:" + "0" * 64,
        "../etc@sha256:" + "0" * 64,
        "busybox@sha256:" + "0" * 64 + "\n",
        "0" * 64,
    ],
)
def test_anything_else_does_not(reference: str) -> None:
    with pytest.raises(RefusedError, match="not pinned by digest") as refused:
        require_pinned(reference, field_name="image")
    assert refused.value.field == "image"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("argv", ()),
        ("argv", ("sh", "a\0b")),
        ("memory_bytes", 0),
        ("memory_bytes", 6 * 2**20 - 1),
        ("cpu_millis", 9),
        ("pids", 0),
        ("pids", -1),
        ("nofile", 0),
        ("tmp_bytes", 0),
        ("shm_bytes", 0),
        ("environment", {"A=B": "c"}),
        ("environment", {"": "c"}),
        ("environment", {"A": "c\0"}),
        ("working_directory", "tree"),
        ("working_directory", "/workspace/../etc"),
        ("network", "host"),
        ("network", "none"),
        ("network", "container:other"),
        ("aliases", ("database",)),
        ("address", IPv4Address("10.213.0.3")),
        ("uid", 0),
        ("gid", 0),
        ("tmpfs", {"/etc": 1}),
        ("tmpfs", {"/usr/lib/postgresql": 1}),
        ("tmpfs", {"/data/": 1}),
        ("tmpfs", {"data": 1}),
        ("tmpfs", {"/data": 0}),
        ("network", ""),
        ("image", "tooling:latest"),
    ],
)
def test_a_value_that_no_container_may_have_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RefusedError) as refused:
        replace(SPEC, **{field: value})  # type: ignore[arg-type]
    assert refused.value.code == "malformed"
    assert refused.value.field in {field, "argv"}


@pytest.mark.parametrize(
    ("volume", "target"),
    [
        ("/var/run/docker.sock", "/workspace"),
        ("../x", "/workspace"),
        ("", "/workspace"),
        ("volume", "/"),
        ("volume", "/etc"),
        ("volume", "/proc/sys"),
        ("volume", "/workspace/../etc"),
        ("volume", "/workspace/"),
        ("volume", "workspace"),
        ("volume", "/usr/bin"),
    ],
)
def test_only_a_named_volume_is_mounted_and_only_beside_the_system(
    volume: str, target: str
) -> None:
    with pytest.raises(RefusedError):
        VolumeMount(volume, target, read_only=False)


@pytest.mark.requirement("B-35")
@pytest.mark.parametrize(
    "hardening",
    [
        {"seccomp_profile_json": "unconfined"},
        {"seccomp_profile_json": "/etc/seccomp.json"},
        {"seccomp_profile_json": "[" * 100_000},
        {"lsm_security_opt": "apparmor=unconfined"},
        {"lsm_security_opt": "label=disable"},
        {"lsm_security_opt": "seccomp=unconfined"},
        {"lsm_security_opt": "systempaths=unconfined"},
        {"lsm_security_opt": "no-new-privileges=false"},
    ],
)
def test_hardening_that_weakens_is_refused(hardening: dict[str, str]) -> None:
    with pytest.raises(RefusedError):
        Hardening(**hardening)


@pytest.mark.requirement("B-35")
def test_the_profile_travels_by_value_and_has_a_digest() -> None:
    hardening = Hardening(PROFILE, "apparmor=forge")
    assert container_request(SPEC, hardening)["HostConfig"]["SecurityOpt"] == [
        "no-new-privileges",
        f"seccomp={PROFILE}",
        "apparmor=forge",
    ]
    assert hardening.seccomp_digest is not None
    assert hardening.seccomp_digest.startswith("sha256:")
    assert Hardening().seccomp_digest is None


JOINED = replace(
    SPEC,
    network="forge-agent-network-1",
    address=IPv4Address("10.213.0.3"),
    name_servers=(IPv4Address("127.0.0.1"),),
)


def test_a_container_has_the_address_and_the_name_servers_that_it_is_given() -> None:
    request = container_request(JOINED, Hardening())
    [endpoint] = request["NetworkingConfig"]["EndpointsConfig"].values()
    assert endpoint["IPAMConfig"] == {"IPv4Address": "10.213.0.3"}
    assert request["HostConfig"]["Dns"] == ["127.0.0.1"]
    assert read_back(request, as_inspected(request)) == ()


@pytest.mark.requirement("B-54")
@pytest.mark.parametrize(
    ("named", "networks"),
    [
        ("Networks", {}),
        ("Networks", {"bridge": {}}),
        ("Networks", {"forge-agent-network-1": {}, "bridge": {}}),
        ("IPAMConfig", {"forge-agent-network-1": {"IPAMConfig": None}}),
        ("IPAMConfig", {"forge-agent-network-1": {"IPAMConfig": {"IPv4Address": "10.213.0.9"}}}),
    ],
)
def test_a_network_that_nobody_asked_for_is_named(named: str, networks: dict[str, Any]) -> None:
    request = container_request(JOINED, Hardening())
    inspected = as_inspected(request)
    inspected["NetworkSettings"]["Networks"] = networks
    [fault] = read_back(request, inspected)
    assert named in fault


@given(specs, hardenings)
def test_an_engine_that_obeys_reads_back_clean(spec: ContainerSpec, hardening: Hardening) -> None:
    request = container_request(spec, hardening)
    assert read_back(request, as_inspected(request)) == ()


@pytest.mark.requirement("B-55")
def test_a_container_has_the_names_that_it_is_given_on_its_network_alone() -> None:
    service = replace(SPEC, network="forge-agent-network-1", aliases=("postgres",))
    assert container_request(service, Hardening())["NetworkingConfig"] == {
        "EndpointsConfig": {"forge-agent-network-1": {"Aliases": ["postgres"]}}
    }
    assert "NetworkingConfig" not in container_request(SPEC, Hardening())
    for alias in ("", "a b", "localhost.", "-x", "UPPER", "a" * 64):
        with pytest.raises(RefusedError):
            replace(service, aliases=(alias,))


def set_host(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda inspected: inspected["HostConfig"].__setitem__(key, value)


def set_config(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda inspected: inspected["Config"].__setitem__(key, value)


def add_mount(inspected: dict[str, Any]) -> None:
    inspected["Mounts"].append({"Type": "bind", "Source": "/", "Destination": "/host", "RW": True})


@pytest.mark.requirement("B-35")
@pytest.mark.parametrize(
    ("names_in_fault", "disobey"),
    [
        ("ReadonlyRootfs", set_host("ReadonlyRootfs", False)),
        ("Privileged", set_host("Privileged", True)),
        ("CapDrop", set_host("CapDrop", None)),
        ("CapAdd", set_host("CapAdd", ["SYS_ADMIN"])),
        ("SecurityOpt", set_host("SecurityOpt", None)),
        ("Memory", set_host("Memory", 0)),
        ("MemorySwap", set_host("MemorySwap", -1)),
        ("CpuQuota", set_host("CpuQuota", 0)),
        ("PidsLimit", set_host("PidsLimit", None)),
        ("Ulimits", set_host("Ulimits", [])),
        ("IpcMode", set_host("IpcMode", "host")),
        ("PidMode", set_host("PidMode", "host")),
        ("UTSMode", set_host("UTSMode", "host")),
        ("UsernsMode", set_host("UsernsMode", "host")),
        ("CgroupnsMode", set_host("CgroupnsMode", "host")),
        ("NetworkMode", set_host("NetworkMode", "bridge")),
        ("Dns", set_host("Dns", ["192.0.2.53"])),
        ("DnsSearch", set_host("DnsSearch", ["example.org"])),
        ("Tmpfs", set_host("Tmpfs", {})),
        ("Binds", set_host("Binds", ["/:/host"])),
        ("Devices", set_host("Devices", [{"PathOnHost": "/dev/sda"}])),
        ("PortBindings", set_host("PortBindings", {"80/tcp": [{}]})),
        ("LogConfig", set_host("LogConfig", {"Type": "json-file"})),
        ("RestartPolicy", set_host("RestartPolicy", {"Name": "always"})),
        ("MaskedPaths", set_host("MaskedPaths", [])),
        ("Init", set_host("Init", True)),
        ("Mounts", add_mount),
        ("User", set_config("User", "")),
        ("Entrypoint", set_config("Entrypoint", ["/hostile"])),
        ("Cmd", set_config("Cmd", ["--evil"])),
        ("Healthcheck", set_config("Healthcheck", {"Test": ["CMD", "evil"]})),
        ("Healthcheck", set_config("Healthcheck", None)),
        ("NetworkDisabled", set_config("NetworkDisabled", True)),
        ("LD_PRELOAD", set_config("Env", ["LD_PRELOAD=/lib/evil.so"])),
        ("LD_ANYTHING", set_config("Env", ["LD_ANYTHING=1"])),
        ("Labels", set_config("Labels", {})),
    ],
)
def test_every_disobedience_is_named(
    names_in_fault: str, disobey: Callable[[dict[str, Any]], None]
) -> None:
    request = container_request(SPEC, Hardening())
    inspected = as_inspected(request)
    disobey(inspected)
    faults = read_back(request, inspected)
    assert len(faults) == 1
    assert names_in_fault in faults[0]


def test_an_empty_answer_is_all_faults() -> None:
    assert len(read_back(container_request(SPEC, Hardening()), {})) > 20


@pytest.mark.requirement("B-29")
@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"Volumes": {"/data": {}}}, "VOLUME"),
        ({"OnBuild": ["RUN evil"]}, "ONBUILD"),
        ({"Labels": {"dev.forge.managed": "bridge"}}, "dev.forge.managed"),
    ],
)
def test_an_image_that_would_change_a_container_is_refused(
    config: dict[str, Any], word: str
) -> None:
    faults = image_faults({"Os": "linux", "Config": config})
    assert len(faults) == 1
    assert word in faults[0]


@pytest.mark.requirement("B-55")
def test_a_volume_of_an_image_counts_where_nothing_covers_it() -> None:
    image: dict[str, Any] = {"Config": {"Volumes": {"/data": {}, "/etc": {}, "/var/lib/data": {}}}}
    assert image_volumes(image) == ("/data", "/etc", "/var/lib/data")
    assert coverable(image_volumes(image)) == ("/data", "/var/lib/data")
    (fault,) = image_faults(image, covered=("/data", "/var/lib/data", "/else"))
    assert "VOLUME ['/etc']" in fault
    assert image_faults({"Config": {"Volumes": {"/data": {}}}}, covered=("/data",)) == ()


@pytest.mark.requirement("B-30")
def test_only_the_labels_that_we_gave_a_built_image_are_ours() -> None:
    ours = {"dev.forge.managed": "image", "dev.forge.image-key": "k"}
    config = {"Labels": {**ours, "dev.forge.managed": "bridge", "dev.forge.more": "x"}}
    (fault,) = image_faults({"Config": config}, ours=ours)
    assert "dev.forge.managed" in fault
    assert "dev.forge.more" in fault
    assert "image-key" not in fault
    assert image_faults({"Config": {"Labels": ours}}, ours=ours) == ()


@pytest.mark.requirement("B-35")
def test_variables_of_an_image_can_be_kept_from_pid_1() -> None:
    declared = image_variables({"Config": {"Env": ["LC_ALL=x", "A=", "PATH=/evil"]}})
    assert declared == ("A", "LC_ALL", "PATH")
    assert image_variables({"Config": None}) == ()
    spec = replace(SPEC, blanked=declared, environment={"LC_ALL": "C"})
    request = container_request(spec, Hardening())
    assert {"LC_ALL=C", "A", "PATH"} <= set(request["Env"])
    inspected = as_inspected(request)
    assert read_back(request, inspected) == ()
    inspected["Config"]["Env"] = ["LC_ALL=C", "PATH=/evil"]
    (fault,) = read_back(request, inspected)
    assert "PATH" in fault
    with pytest.raises(RefusedError):
        replace(SPEC, blanked=("A=B",))


def test_an_ordinary_image_is_not() -> None:
    assert image_faults({"Os": "linux", "Config": {"Labels": {"maintainer": "x"}}}) == ()
    assert image_faults({"Config": None}) == ()
    assert image_faults({"Os": "windows", "Config": {}}) != ()
