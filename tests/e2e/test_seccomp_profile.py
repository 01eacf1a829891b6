"""The profile of examples/: programs work under it, and calls that none of them needs fail."""

from __future__ import annotations

import json
import platform
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import anyio
import pytest

from engines import REPOSITORY, extra_image
from engines import Engine as BedEngine
from forge_bridge.doctor import PreflightSettings, Verdict, run_checks
from forge_bridge.egress.trial import EgressTrial
from forge_bridge.services.images import ServiceImages, Trial
from forge_core.labels import PREFLIGHT, Owner
from forge_core.read_back import read_back
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import ContainerSpec, Hardening, container_request
from forge_core.wire.codes import ServiceName
from forge_edges.docker_context import resolve_endpoint
from forge_edges.docker_engine import DockerEngine
from rig import Rig, running_rig

INSIDE = Path(__file__).parent / "inside"
PROFILE = REPOSITORY / "examples/seccomp/forge-sandbox.json"
HARDENED = Hardening(PROFILE.read_text("utf-8"))
UNFILTERED = Hardening('{"defaultAction": "SCMP_ACT_ALLOW"}')
MIB = 1 << 20

CALLS = (INSIDE / "seccomp_calls.py").read_text()
PYTHON_WORK = (INSIDE / "python_work.py").read_text()
GIT_WORK = """
set -e
export HOME=/tmp GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
cd /tmp && git init -q -b main r && cd r
for n in $(seq 50); do echo $n > f$n; done
git add . && git commit -qm one && git checkout -qb two && git mv f1 g1 && git commit -qm two
git checkout -q main && git merge -q two && git gc -q && git fsck --strict
git clone -q . ../c && git -C ../c log --oneline | wc -l && git -C ../c grep -l 42
git archive HEAD | tar -t | wc -l
echo worked
"""
NODE_WORK = """
const fs = require('fs'), http = require('http'), crypto = require('crypto');
const {execFileSync} = require('child_process'), {Worker} = require('worker_threads');
const zlib = require('zlib'), os = require('os');
fs.writeFileSync('/tmp/a', crypto.randomBytes(1e5)); fs.copyFileSync('/tmp/a', '/tmp/b');
zlib.gzipSync(fs.readFileSync('/tmp/b')); os.cpus(); os.networkInterfaces();
if (execFileSync('/bin/echo', ['x']).toString() !== 'x\\n') throw 1;
const worker = new Worker("require('worker_threads').parentPort.postMessage(6*7)", {eval: true});
worker.on('message', number => {
  const server = http.createServer((_, answer) => answer.end(String(number))).listen(0, '127.0.0.1',
    () => http.get({port: server.address().port}, answer => answer.on('data', data => {
      console.log(data.toString() === '42' ? 'worked' : 'failed'); server.close(); })));
});
"""
REFUSED = {"clone3": "ENOSYS", "io_uring_setup": "ENOSYS", "io_setup": "ENOSYS"}
REFUSED["execveat"] = "ENOSYS"

pytestmark = [
    pytest.mark.engine("d26", "d20", "r26"),
    pytest.mark.requirement("B-35"),
    pytest.mark.timeout(180),
]


@dataclass(frozen=True)
class Place:
    """Where containers run."""

    engine: BedEngine
    door: DockerEngine
    owner: Owner

    @property
    def trial(self) -> Trial:
        return Trial(self.door, self.owner, self.engine.tooling_image, HARDENED)

    async def run(self, *argv: str, image: str = "", hardening: Hardening = HARDENED) -> str:
        """What a program prints in a container with this hardening."""
        spec = ContainerSpec(
            owner=self.owner,
            role="helper",
            image=image or self.engine.tooling_image,
            argv=argv,
            memory_bytes=512 * MIB,
            cpu_millis=2000,
            pids=128,
        )
        request, printed = container_request(spec, hardening), b""
        container = await self.door.create_container(spec.name, request)
        try:
            assert read_back(request, await self.door.inspect_container(container)) == ()
            async with self.door.attach(container) as stream:
                await self.door.start_container(container)
                while (piece := await stream.receive()) is not None:
                    printed += piece[1]
        finally:
            with anyio.CancelScope(shield=True):
                await self.door.remove_container(container)
        return printed.decode()


async def unsigned(_references: tuple[str, ...]) -> None:
    """Signatures are not what is tried."""


@pytest.fixture
async def place(engine: BedEngine, runner_id: str) -> AsyncIterator[Place]:
    endpoint = resolve_endpoint(None, {"DOCKER_HOST": engine.base_url})
    async with DockerEngine.connect(endpoint) as door:
        yield Place(engine, door, Owner.of_runner(PREFLIGHT, runner_id, "instance", "domain"))


@pytest.mark.parametrize(
    "argv",
    [
        ("/usr/bin/python3", "-c", PYTHON_WORK),
        ("/bin/bash", "-c", GIT_WORK),
    ],
    ids=["python", "git"],
)
async def test_programs_work(place: Place, argv: tuple[str, ...]) -> None:
    printed = await place.run(*argv)
    assert printed.endswith("worked\n"), printed


async def test_node_works(place: Place, engine: BedEngine) -> None:
    printed = await place.run("node", "-e", NODE_WORK, image=extra_image(engine, "node"))
    assert printed == "worked\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
async def test_what_no_agent_needs_is_refused_by_the_profile_alone(place: Place) -> None:
    filtered = json.loads(await place.run("/usr/bin/python3", "-c", CALLS))
    free = json.loads(await place.run("/usr/bin/python3", "-c", CALLS, hardening=UNFILTERED))
    assert filtered == {name: REFUSED.get(name, "EPERM") for name in filtered}
    # The kernel may lack some of them, and an engine forbid others by other means.
    lacking = {n for n, outcome in free.items() if outcome in {"ENOSYS", "EPROTONOSUPPORT"}}
    works = {n for n, outcome in free.items() if outcome == "done"}
    assert works | lacking >= {"ptrace", "process_vm_readv", "kcmp", "keyctl", "io_setup"}
    assert len(works) >= len(free) // 2, free


@pytest.mark.requirement("B-51")
async def test_the_preflight_takes_it(place: Place) -> None:
    settings = PreflightSettings(
        owner=place.owner,
        tooling_image=place.engine.tooling_image,
        hardening=HARDENED,
        capacity=ResourceCapacity(1),
    )
    preflight = await run_checks(place.door, settings)
    found = {result.id: result for result in preflight.results}
    assert found["seccomp"].verdict is Verdict.PASS, found["seccomp"].evidence
    assert "EPERM" in found["seccomp"].evidence
    assert preflight.capabilities.seccomp_digest == HARDENED.seccomp_digest
    assert not [r for r in preflight.results if r.verdict is Verdict.BLOCK_ALL]


@pytest.mark.engine("d26", "r26")
@pytest.mark.requirement("B-54")
async def test_the_proxy_works(place: Place, engine: BedEngine) -> None:
    pool = IPv4Network("10.213.0.0/20")
    assert await EgressTrial(extra_image(engine, "squid"), pool, unsigned).prove(place.trial)


@pytest.mark.engine("d26", "r26")
@pytest.mark.requirement("B-55")
@pytest.mark.parametrize(
    "name",
    [
        ServiceName.POSTGRES,
        ServiceName.REDIS,
        pytest.param(ServiceName.BROWSER, marks=pytest.mark.slow),
    ],
)
async def test_a_service_works(place: Place, engine: BedEngine, name: ServiceName) -> None:
    images = ServiceImages({name: extra_image(engine, name)}, unsigned)
    shown, failed, _unseen = await images.prove(place.trial)
    assert failed == {}
    assert shown


@pytest.fixture
def rig(engine: BedEngine, tmp_path: Path, runner_id: str) -> Iterator[Rig]:
    installed = tmp_path / "seccomp.json"
    installed.write_bytes(PROFILE.read_bytes())
    installed.chmod(0o644)
    setting = {"FORGE_SANDBOX_SECCOMP_PROFILE": str(installed)}
    with running_rig(tmp_path / "rig", engine, runner_id, **setting) as rig:
        yield rig


@pytest.mark.engine("d26", "r26")
def test_an_attempt_goes_through(rig: Rig) -> None:
    changes = "echo changed > /workspace/tree/README; git -C /workspace/tree status --short"
    session_id = rig.dispatch("/bin/sh", "-c", changes)
    result = rig.wait_over(session_id)
    assert result["outcome"] == "succeeded"
    assert result["resultCommit"]


# -- the file itself -------------------------------------------------------------------------------

DANGEROUS = {
    *("unshare", "setns", "mount", "umount2", "move_mount", "open_tree", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "pivot_root", "chroot", "ptrace", "kcmp", "bpf"),
    *("process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise", "keyctl"),
    *("add_key", "request_key", "perf_event_open", "userfaultfd", "io_uring_setup", "clone3"),
    *("io_uring_enter", "io_uring_register", "init_module", "finit_module", "delete_module"),
    *("kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "syslog", "iopl"),
    *("ioperm", "modify_ldt", "quotactl", "open_by_handle_at", "name_to_handle_at", "execveat"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "uselib"),
    *("setdomainname", "fanotify_init", "lookup_dcookie", "nfsservctl", "vhangup", "ustat"),
}


def rules() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(PROFILE.read_text())["syscalls"]
    return loaded


def test_it_refuses_by_default_and_allows_nothing_dangerous() -> None:
    profile = json.loads(PROFILE.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    machines = {entry["architecture"]: entry["subArchitectures"] for entry in profile["archMap"]}
    assert machines == {"SCMP_ARCH_X86_64": [], "SCMP_ARCH_AARCH64": []}
    allowed = {n for rule in rules() if rule["action"] == "SCMP_ACT_ALLOW" for n in rule["names"]}
    assert not allowed & DANGEROUS
    guarded = {name for rule in rules() if rule.get("args") for name in rule["names"]}
    plain = {n for r in rules() if not r.get("args") for n in r["names"]}
    assert guarded == {"clone", "personality", "socket", "socketpair"}
    assert not guarded & plain, "a rule without conditions would undo those with"


def test_every_rule_says_what_it_is_for_and_is_in_order() -> None:
    assert all(rule["comment"] for rule in rules())
    assert all(rule["names"] == sorted(set(rule["names"])) for rule in rules())
    unconditional = [n for r in rules() if not r.get("args") for n in r["names"]]
    assert len(unconditional) == len(set(unconditional))


def test_the_page_names_what_is_dangerous() -> None:
    page = (REPOSITORY / "docs/reference/seccomp.md").read_text("utf-8")
    for name in ("ptrace", "keyctl", "bpf", "perf_event_open", "userfaultfd", "clone3", "unshare"):
        assert f"`{name}`" in page
    assert replace(HARDENED).seccomp_digest is not None
