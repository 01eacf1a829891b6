"""What a hardened container can and cannot do, tried from inside on real engines.

docs/reference/hardening.md is the list; each line of it is tried here.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest

from engines import Engine as BedEngine
from forge_core.labels import Owner
from forge_core.ports import ExitStatus
from forge_core.read_back import read_back
from forge_core.sandbox_spec import (
    WORKSPACE_VOLUME,
    ContainerSpec,
    Hardening,
    VolumeMount,
    container_request,
    image_faults,
)
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine

MIB = 1 << 20
WAIT_MS = 30_000
pytestmark = pytest.mark.requirement("B-35", "A-03")
everywhere = pytest.mark.engine("d26", "d20", "r26")
enforcing = pytest.mark.engine("d26", "d20")


@dataclass(frozen=True)
class Sandbox:
    """Makes containers as the bridge does, and runs a shell script in each."""

    door: DockerEngine
    owner: Owner
    image: str

    def spec(self, script: str, **changes: Any) -> ContainerSpec:
        spec = ContainerSpec(
            owner=self.owner,
            role="agent",
            image=self.image,
            argv=("/bin/sh", "-c", script),
            memory_bytes=64 * MIB,
            cpu_millis=500,
            pids=32,
        )
        return replace(spec, **changes)

    async def run(
        self, script: str, *, hardening: Hardening | None = None, **changes: Any
    ) -> tuple[ExitStatus, str]:
        """The exit status and everything that was printed, standard error included."""
        spec, printed = self.spec(script, **changes), b""
        request = container_request(spec, hardening or Hardening())
        container = await self.door.create_container(spec.name, request)
        try:
            assert read_back(request, await self.door.inspect_container(container)) == ()
            async with self.door.attach(container) as attachment:
                await self.door.start_container(container)
                while (piece := await attachment.receive()) is not None:
                    printed += piece[1]
            status = await self.door.wait_container(container, timeout_ms=WAIT_MS)
        finally:
            with anyio.CancelScope(shield=True):
                await self.door.remove_container(container)
        return status, printed.decode()


@pytest.fixture
async def sandbox(engine: BedEngine, runner_id: str) -> AsyncIterator[Sandbox]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    owner = Owner(runner_id, "instance", "attempt", 1, "project", "domain")
    async with DockerEngine.connect(endpoint) as door:
        yield Sandbox(door, owner, engine.busybox_image)


@everywhere
async def test_pid_1_has_no_privilege(sandbox: Sandbox) -> None:
    _, printed = await sandbox.run("cat /proc/self/status; id; echo pid $$")
    fields = dict(re.findall(r"^(\w+):\s*(.*)$", printed, re.MULTILINE))
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"
    assert "uid=1000" in printed
    assert "gid=1000" in printed
    assert "pid 1\n" in printed


@everywhere
async def test_nothing_can_be_written_but_the_bounded_tmpfs(sandbox: Sandbox) -> None:
    script = """
    for f in /x /etc/x /bin/x /usr/x /proc/sys/kernel/hostname /sys/kernel/x /dev/x; do
        if echo x > $f; then echo "WROTE $f"; fi
    done 2>/dev/null
    echo x > /tmp/x && echo x > /run/x && echo x > /dev/shm/x && echo tmpfs written
    dd if=/dev/zero of=/tmp/big bs=1M count=40 2>&1
    """
    _, printed = await sandbox.run(script, tmp_bytes=16 * MIB)
    assert "WROTE" not in printed
    assert "tmpfs written" in printed
    assert "No space left" in printed


@everywhere
@pytest.mark.parametrize("tmp_exec", [False, True])
async def test_programs_run_from_tmp_only_where_the_contract_says_so(
    sandbox: Sandbox, tmp_exec: bool
) -> None:
    script = "for d in /tmp /run /dev/shm; do cp /bin/busybox $d/ && $d/busybox echo RAN $d; done"
    _, printed = await sandbox.run(script, tmp_exec=tmp_exec)
    assert re.findall(r"RAN (\S+)", printed) == (["/tmp"] if tmp_exec else [])
    assert printed.count("Permission denied") == (2 if tmp_exec else 3)


@everywhere
async def test_nothing_of_the_host_is_inside(sandbox: Sandbox) -> None:
    script = """
    find / -name 'docker.sock' 2>/dev/null
    cut -d' ' -f2 /proc/self/mounts
    ls /dev
    cat /proc/kcore 2>/dev/null | head -c 1 | wc -c
    """
    _, printed = await sandbox.run(script)
    assert "docker.sock" not in printed
    allowed = re.compile(r"/|/(proc|sys|dev)(/.*)?|/tmp|/run|/etc/(hosts|hostname|resolv\.conf)")
    mounts = [line for line in printed.splitlines() if line.startswith("/")]
    assert [target for target in mounts if not allowed.fullmatch(target)] == []
    assert not {"mem", "kmsg", "sda", "vda", "fuse", "kvm"} & set(printed.split())
    assert printed.splitlines()[-1].strip() == "0"


@everywhere
@pytest.mark.parametrize("resolves_localhost", [True, False])
async def test_network_none_has_loopback_and_nothing_else(
    sandbox: Sandbox, resolves_localhost: bool
) -> None:
    script = """
    ls /sys/class/net; tail -n +2 /proc/net/route | wc -l
    grep -c '127.0.0.1.*localhost' /etc/hosts
    nc -w 2 10.0.2.2 80 </dev/null 2>&1 || echo unreachable
    """
    _, printed = await sandbox.run(script, resolves_localhost=resolves_localhost)
    lines = printed.split()
    assert lines[:3] == ["lo", "0", "1" if resolves_localhost else "0"]
    assert "unreachable" in printed


@enforcing
@pytest.mark.requirement("B-10")
async def test_a_fork_bomb_meets_the_process_limit_and_hurts_nobody(sandbox: Sandbox) -> None:
    peer = sandbox.spec("read x; exit 3", role="helper")
    container = await sandbox.door.create_container(peer.name, container_request(peer, Hardening()))
    async with sandbox.door.attach(container) as attachment:
        await sandbox.door.start_container(container)
        bomb = "i=0; while [ $i -lt 200 ]; do sleep 60 & i=$((i+1)); done; echo all started"
        _, printed = await sandbox.run(bomb)
        await attachment.send(b"alive?\n")
        status = await sandbox.door.wait_container(container, timeout_ms=WAIT_MS)
    await sandbox.door.remove_container(container)
    assert "can't fork" in printed
    assert "all started" not in printed
    assert status.exit_code == 3


@enforcing
@pytest.mark.requirement("B-10")
async def test_memory_beyond_the_limit_is_killed_and_swap_is_no_way_out(sandbox: Sandbox) -> None:
    status, _ = await sandbox.run("", argv=("tail", "-c", "200m", "/dev/zero"))
    assert status.exit_code == 137
    assert status.oom_killed


@enforcing
@pytest.mark.requirement("B-10")
async def test_a_tmpfs_counts_as_memory(sandbox: Sandbox) -> None:
    script = "dd if=/dev/zero of=/tmp/big bs=1M count=200 || echo stopped"
    status, printed = await sandbox.run(script, tmp_bytes=300 * MIB)
    assert status.exit_code == 137 or "stopped" in printed


@enforcing
@pytest.mark.requirement("B-10")
async def test_the_cpu_quota_holds(sandbox: Sandbox) -> None:
    script = """
    stat=$(ls /sys/fs/cgroup/cpu.stat /sys/fs/cgroup/cpu/cpu.stat 2>/dev/null | head -n 1)
    i=0; while grep -q 'nr_throttled 0' $stat && [ $i -lt 5000 ]; do i=$((i+1)); done
    grep nr_throttled $stat
    """
    _, printed = await sandbox.run(script, cpu_millis=100)
    match = re.search(r"nr_throttled (\d+)", printed)
    assert match is not None
    assert int(match[1]) > 0


@everywhere
async def test_open_files_and_core_dumps_are_limited(sandbox: Sandbox) -> None:
    _, printed = await sandbox.run("ulimit -n; ulimit -Hn; ulimit -c", nofile=256)
    assert printed.split() == ["256", "256", "0"]


@everywhere
async def test_the_configured_seccomp_profile_is_the_one_in_force(sandbox: Sandbox) -> None:
    rule = {"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1}
    profile = json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]})
    script = "mkdir /tmp/d 2>/dev/null && echo MADE || echo refused"
    _, free = await sandbox.run(script)
    _, bound = await sandbox.run(script, hardening=Hardening(profile))
    assert (free, bound) == ("MADE\n", "refused\n")


@everywhere
async def test_a_volume_is_read_only_where_it_was_asked_to_be(sandbox: Sandbox) -> None:
    owner = sandbox.owner
    volume = await sandbox.door.create_volume(owner.name("workspace"), owner.labels("workspace"))
    mounts = (VolumeMount(volume, WORKSPACE_VOLUME, read_only=True),)
    script = f"grep ' {WORKSPACE_VOLUME} ' /proc/self/mounts"
    _, printed = await sandbox.run(script, mounts=mounts)
    await sandbox.door.remove_volume(volume)
    assert "ro" in printed.split()[3].split(",")


async def committed_image(sandbox: Sandbox, engine: BedEngine, changes: str) -> str:
    spec = sandbox.spec("true", role="helper")
    request = container_request(spec, Hardening())
    request["Labels"] = {}
    container = await sandbox.door.create_container(spec.name, request)
    status, body = engine.api.call("POST", "/commit", {"container": container, "changes": changes})
    await sandbox.door.remove_container(container)
    assert status == 201, body
    return str(json.loads(body)["Id"])


@everywhere
async def test_an_image_cannot_make_pid_1_run_other_code(
    sandbox: Sandbox, engine: BedEngine
) -> None:
    changes = "ENV LD_PRELOAD=/evil.so PYTHONSTARTUP=/evil.py BASH_ENV=/evil.sh ENV=/evil.sh"
    image = await committed_image(sandbox, engine, f"{changes}\nENTRYPOINT /evil\nUSER 0")
    try:
        _, printed = await sandbox.run("env; id -u", image=image)
    finally:
        engine.api.call("DELETE", f"/images/{image}")
    assert "evil" not in printed
    assert printed.splitlines()[-1] == "1000"


@everywhere
async def test_an_image_with_volumes_or_loader_variables_we_do_not_know_is_caught(
    sandbox: Sandbox, engine: BedEngine
) -> None:
    changes = "ENV LD_SOMETHING=1\nVOLUME /data\nLABEL dev.forge.managed=bridge"
    image = await committed_image(sandbox, engine, changes)
    spec = sandbox.spec("true", image=image)
    request = container_request(spec, Hardening())
    try:
        faults = image_faults(await sandbox.door.inspect_image(image))
        container = await sandbox.door.create_container(spec.name, request)
        differences = read_back(request, await sandbox.door.inspect_container(container))
        await sandbox.door.remove_container(container)
    finally:
        engine.api.call("DELETE", f"/images/{image}")
    assert [fault.split()[2] for fault in faults] == ["VOLUME", "the"]
    assert [difference.split(":")[0] for difference in differences] == ["Env", "Mounts"]
