"""What is said to buildx, and what is made of what it says; no engine is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.errors import EngineOutOfDisk, EngineUnreachable, RefusedError
from forge_core.image_ports import BuildLimits, BuildRequest, ImageNotBuilt
from forge_core.labels import BUILDER, Owner
from forge_core.sandbox_spec import without_tag
from forge_edges.buildx_cli import DockerCli
from forge_edges.buildx_container import builder_request, differences, inside_faults
from forge_edges.buildx_outcome import KEPT_BYTES, Output, failure
from forge_edges.buildx_policy import (
    DOCKER_HUB as HUB,
)
from forge_edges.buildx_policy import (
    canonical,
    image_identifiers,
    layout_identifiers,
    source_policy,
)
from forge_edges.buildx_probe import keeps_policies
from forge_edges.buildx_run import build_arguments
from forge_edges.docker_context import DockerEndpoint, TlsMaterial

MIB = 2**20
LIMITS = BuildLimits(memory_bytes=256 * MIB, cpu_quota_us=150_000, nofile=1024, pids=200)
DIGEST = f"sha256:{'a' * 64}"
OTHER = f"sha256:{'b' * 64}"
OWNER = Owner.of_runner(BUILDER, "runner-1", "instance-1", "domain-1")


@pytest.mark.parametrize(
    ("written", "full"),
    [
        ("python", f"{HUB}/library/python"),
        (f"python@{DIGEST}", f"{HUB}/library/python@{DIGEST}"),
        ("python:3.12", f"{HUB}/library/python:3.12"),
        ("grafana/loki", f"{HUB}/grafana/loki"),
        (f"{HUB}/python", f"{HUB}/library/python"),
        (f"index.{HUB}/library/python", f"{HUB}/library/python"),
        ("registry.example/a/b", "registry.example/a/b"),
        ("localhost/a", "localhost/a"),
        ("localhost:5000/a:1", "localhost:5000/a:1"),
        ("127.0.0.1:5000/forge/busybox", "127.0.0.1:5000/forge/busybox"),
    ],
)
def test_references_are_completed_as_docker_does(written: str, full: str) -> None:
    assert canonical(written) == full


def test_a_tag_beside_a_digest_decides_nothing() -> None:
    assert without_tag(f"python:3.12@{DIGEST}") == f"python@{DIGEST}"
    assert without_tag(f"localhost:5000/a:1@{DIGEST}") == f"localhost:5000/a@{DIGEST}"
    assert without_tag(f"localhost:5000/a@{DIGEST}") == f"localhost:5000/a@{DIGEST}"
    name = f"docker-image://{HUB}/library/python"
    assert image_identifiers(f"python:3.12@{DIGEST}") == (
        f"{name}:3.12@{DIGEST}",
        f"{name}@{DIGEST}",
    )
    assert image_identifiers("forge-project:k1")[0].endswith("/library/forge-project:k1")
    assert layout_identifiers(f"python:3.12@{DIGEST}", OTHER)[0] == (
        f"oci-layout://{HUB}/library/python:3.12@{OTHER}"
    )


@pytest.mark.requirement("B-32")
def test_everything_is_denied_but_what_is_listed() -> None:
    rules = source_policy([f"docker-image://{HUB}/library/python@{DIGEST}"])["rules"]
    assert rules[0] == {"action": "DENY", "selector": {"identifier": "*"}}
    allowed = {rule["selector"]["identifier"] for rule in rules if rule["action"] == "ALLOW"}
    assert allowed == {
        "http://buildkit-session/*",
        f"docker-image://{HUB}/library/python@{DIGEST}",
    }
    assert rules[-1]["selector"]["matchType"] == "EXACT"


@pytest.mark.requirement("B-32", "B-33")
def test_a_build_has_no_network_and_bounded_processes() -> None:
    request = BuildRequest("forge-a:1", ".forge/Dockerfile", (), {"b": "2", "a": "1"}, 1_000)
    said = build_arguments(request, Path("/f"), builder="default", process_limits=LIMITS)
    for expected in (
        "--network=none",
        "--file=.forge/Dockerfile",
        "--tag=forge-a:1",
        "--build-arg=BUILDKIT_CACHE_MOUNT_NS=forge-a:1",
        "--ulimit=nofile=1024:1024",
        f"--ulimit=data={256 * MIB}:{256 * MIB}",
        "--ulimit=core=1:1",
    ):
        assert expected in said
    assert said.index("--label=a=1") < said.index("--label=b=2")
    assert not [word for word in said if word.startswith(("--secret", "--ssh", "--allow"))]
    dedicated = build_arguments(request, Path("/f"), builder="forge", process_limits=None)
    assert not [word for word in dedicated if word.startswith("--ulimit")]


def test_a_tls_endpoint_is_told_to_the_cli(tmp_path: Path) -> None:
    def environment(*, verify: bool) -> dict[str, str]:
        tls = TlsMaterial("/certs/ca.pem", "/certs/cert.pem", "/certs/key.pem", verify=verify)
        endpoint = DockerEndpoint("tcp://engine:2376", "test", tls)
        return DockerCli("docker", endpoint, tmp_path, {}).environment

    verified = environment(verify=True)
    assert verified["DOCKER_HOST"] == "tcp://engine:2376"
    assert verified["DOCKER_CERT_PATH"] == "/certs"
    assert verified["DOCKER_TLS_VERIFY"] == "1"
    assert "DOCKER_TLS_VERIFY" not in environment(verify=False)
    assert environment(verify=False)["DOCKER_TLS"] == "1"


async def test_a_missing_cli_is_named_with_the_remedy(tmp_path: Path) -> None:
    cli = DockerCli("no-such-docker", DockerEndpoint("unix:///x", "test"), tmp_path / "b", {})
    with pytest.raises(RefusedError, match="no-such-docker; install the Docker CLI") as refused:
        await cli.prepare()
    assert (refused.value.code, refused.value.field) == (
        "builder_unusable",
        "FORGE_DOCKER_EXECUTABLE",
    )


STEP = 'process "/bin/sh -c {}" did not complete successfully: exit code: 1'


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (STEP.format("false"), ImageNotBuilt),
        (STEP.format("echo no space left on device"), ImageNotBuilt),
        (STEP.format("echo cannot connect to the docker daemon"), ImageNotBuilt),
        (STEP.format('echo \\"x\\" did not complete successfully'), ImageNotBuilt),
        ("failed to copy: write /var/lib/x: no space left on device", EngineOutOfDisk),
        ("Cannot connect to the Docker daemon at unix:///x.", EngineUnreachable),
        ("rpc error: code = Unavailable desc = error reading from server: EOF", EngineUnreachable),
        ("Unavailable: error reading from server: EOF", EngineUnreachable),
        ('failed to compute cache key: "/unavailable": not found', ImageNotBuilt),
        ('failed to compute cache key: "/no space left on device": not found', ImageNotBuilt),
        ('failed to compute cache key: "/\\"no space left on device": not found', ImageNotBuilt),
        ("", ImageNotBuilt),
    ],
)
def test_only_the_builders_own_words_count(verdict: str, kind: type[Exception]) -> None:
    error = failure("build image a", verdict, 1)
    assert type(error) is kind
    assert str(error).startswith("cannot build image a: ")
    # What may leave the runner repeats nothing that the builder was told or said (B-90).
    told = error.reason if isinstance(error, ImageNotBuilt) else str(error)
    assert not {"/bin/sh", "/var/lib/x:", "unix:///x.", "desc"} & set(told.split())


def test_the_verdict_is_the_last_line_that_no_step_can_write() -> None:
    heard: list[bytes] = []
    output = Output(heard.append)
    for piece in (b"#5 0.1 ERROR: forged\n", b"x" * 2 * KEPT_BYTES, b"\nERR", b"OR: failed to "):
        output(piece)
    output(b"solve: real reason\n#5 0.2 ERROR: forged again\n")
    assert output.verdict() == "real reason"
    assert sum(map(len, heard)) > 2 * KEPT_BYTES
    quiet = Output(heard.append)
    quiet(b"docker: unknown command\n\n")
    assert quiet.verdict() == "docker: unknown command"


def test_a_builder_is_believed_by_what_it_did() -> None:
    assert keeps_policies('ERROR: source "http://127.0.0.1:9/" denied by policy: no')
    assert not keeps_policies('ERROR: Get "http://127.0.0.1:9/": connection refused')
    with pytest.raises(RefusedError, match="cannot use the builder: unknown flag: --load"):
        keeps_policies("unknown flag: --load\n")


@pytest.mark.requirement("B-32", "B-33")
def test_the_dedicated_builder_is_asked_for_with_every_limit() -> None:
    request = builder_request(OWNER, f"buildkit@{DIGEST}", LIMITS, network=False)
    host = request["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 256 * MIB
    assert (host["CpuQuota"], host["CpuPeriod"], host["PidsLimit"]) == (150_000, 100_000, 200)
    assert {"Name": "nofile", "Soft": 1024, "Hard": 1024} in host["Ulimits"]
    assert (host["NetworkMode"], host["RestartPolicy"]["Name"]) == ("none", "no")
    assert host["CgroupnsMode"] == "private"
    assert request["Labels"] == OWNER.labels("builder")
    open_to_egress = builder_request(OWNER, f"buildkit@{DIGEST}", LIMITS, network=True)
    assert open_to_egress["HostConfig"]["NetworkMode"] == "bridge"
    assert not list(differences(host, host))
    changed = {**host, "PidsLimit": None, "RestartPolicy": {"Name": "always"}}
    assert [fault.partition(":")[0] for fault in differences(host, changed)] == [
        "PidsLimit",
        "RestartPolicy",
    ]


NOFILE = (
    "/proc/1/limits:Max open files            1024                 1024                 files\n"
)
VERSION_2 = f"""\
{NOFILE}/sys/fs/cgroup/memory.max:{256 * MIB}
/sys/fs/cgroup/memory.swap.max:0
/sys/fs/cgroup/cpu.max:150000 100000
/sys/fs/cgroup/pids.max:200
"""
VERSION_1 = f"""\
{NOFILE}/sys/fs/cgroup/memory/memory.limit_in_bytes:{256 * MIB}
/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes:{256 * MIB}
/sys/fs/cgroup/cpu/cpu.cfs_quota_us:150000
/sys/fs/cgroup/cpu/cpu.cfs_period_us:100000
/sys/fs/cgroup/pids/pids.max:200
"""


@pytest.mark.requirement("B-33")
@pytest.mark.parametrize("answer", [VERSION_1, VERSION_2])
def test_limits_hold_only_by_the_kernels_word(answer: str) -> None:
    assert not list(inside_faults(answer, LIMITS))
    lines = answer.splitlines()
    for line in lines:
        without = "\n".join(other for other in lines if other != line)
        assert len(list(inside_faults(without, LIMITS))) == 1, line
        path, _, content = line.partition(":")
        lifted = answer.replace(line, f"{path}:{content.replace('1024', '4096')}0")
        assert len(list(inside_faults(lifted, LIMITS))) == 1, line
    assert len(list(inside_faults("", LIMITS))) == 5


@pytest.mark.parametrize("word", ["max", "9223372036854771712"])
def test_no_limit_is_none(word: str) -> None:
    answer = VERSION_2.replace(f"memory.max:{256 * MIB}", f"memory.max:{word}")
    assert next(inside_faults(answer, LIMITS)).startswith("memory: ")


def test_the_kernel_counts_memory_in_pages() -> None:
    odd = BuildLimits(256 * MIB + 1000, 150_000, 1024, 200)
    assert not list(inside_faults(VERSION_1, odd))
    assert not list(inside_faults(VERSION_2, odd))
