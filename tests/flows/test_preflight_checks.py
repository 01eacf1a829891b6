"""Each finding of the preflight on what a probe could have seen: good, and spoilt in one place."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forge_bridge.doctor.checks as checks_module
import forge_bridge.doctor.egress_checks as egress_checks_module
import forge_bridge.doctor.engine_checks as engine_checks_module
import forge_bridge.doctor.host_checks as host_checks_module
import forge_bridge.doctor.inside_checks as inside_checks_module
import forge_bridge.doctor.policy_checks as policy_checks_module
from forge_bridge.doctor import (
    CheckResult,
    PreflightSettings,
    Verdict,
    exit_code,
    read_hardening,
)
from forge_bridge.doctor.checks import capabilities
from forge_bridge.doctor.egress_checks import egress_checks, network_policies
from forge_bridge.doctor.engine_checks import engine_checks
from forge_bridge.doctor.host_checks import account_of, host_checks, host_uid
from forge_bridge.doctor.inside_checks import inside_checks, quota_check, quota_supported
from forge_bridge.doctor.lsm_checks import prove_enforcing
from forge_bridge.doctor.policy_checks import policy_checks
from forge_bridge.doctor.probe import PROBE_MEMORY_BYTES, PROBE_PIDS, QUOTA_BYTES, Inside
from forge_bridge.doctor.results import Check, Gate
from forge_bridge.settings import default_bridge_service_config
from forge_core.blockers import OF_A_SESSION, Blocker
from forge_core.errors import RefusedError
from forge_core.labels import Owner
from forge_core.resources import ResourceCapacity
from forge_core.sandbox_spec import Hardening
from forge_core.services import CATALOGUE
from forge_core.wire.codes import NetworkPolicy, PublicationMode, ServiceName
from forge_core.wire.shapes import EngineFacts, EngineLimits

SETTINGS = PreflightSettings(
    owner=Owner("runner", "instance", "preflight", 1, "preflight", "domain"),
    tooling_image="tooling@sha256:" + "0" * 64,
    hardening=Hardening('{"defaultAction": "SCMP_ACT_ERRNO"}', "apparmor=forge"),
    capacity=ResourceCapacity(1),
)
HARD = "rw,nosuid,nodev,noexec,relatime"
GOOD: dict[str, Any] = {
    "status": {
        "CapInh": "0000000000000000",
        "CapPrm": "0000000000000000",
        "CapEff": "0000000000000000",
        "CapBnd": "0000000000000000",
        "CapAmb": "0000000000000000",
        "NoNewPrivs": "1",
        "Seccomp": "2",
    },
    "pid": 1,
    "uid": 1000,
    "uidMap": [[0, 1000, 1], [1, 100_000, 65_536]],
    "gid": 1000,
    "groups": [1000],
    "lsm": "forge (enforce)",
    "mounts": [
        ["/", "overlay", "ro"],
        ["/proc", "proc", HARD],
        ["/sys", "sysfs", "ro,nosuid"],
        ["/sys/fs/cgroup", "cgroup2", "ro,nosuid"],
        ["/tmp", "tmpfs", HARD],
        ["/run", "tmpfs", HARD],
        ["/dev/shm", "tmpfs", HARD],
        ["/etc/hosts", "ext4", "ro"],
    ],
    "devices": ["full", "null", "random", "tty", "urandom", "zero"],
    "interfaces": ["lo"],
    "resolvesLocalhost": True,
    "rootWriteError": "EROFS",
    "tmpExecError": "EACCES",
    "userNamespaceError": "EPERM",
    "limits": {
        "memory": str(PROBE_MEMORY_BYTES),
        "swap": "0",
        "pids": str(PROBE_PIDS),
        "quota": "50000",
        "period": "100000",
    },
    "throttled": True,
    "processesUntilRefused": PROBE_PIDS,
    "memoryIsKilled": True,
    "nofile": 4096,
    "corePattern": "core",
    "core": 1,
    "volumeBytes": None,
    "python": [3, 11, 2],
    "git": "git version 2.39.5",
}


def findings(
    settings: PreflightSettings = SETTINGS, *, account: str | None = None, **spoilt: Any
) -> dict[str, CheckResult]:
    seen = Inside.model_validate({**GOOD, **spoilt})
    results = (*inside_checks(seen, settings), *host_checks(seen, account))
    return {result.id: result for result in results}


def test_a_good_container_passes_everything() -> None:
    assert {result.verdict for result in findings().values()} == {Verdict.PASS}


@pytest.mark.requirement("B-50")
@pytest.mark.parametrize("pattern", ["|/usr/share/apport/apport %p", "@/run/coredump.socket"])
def test_a_host_that_hands_crashes_to_a_program_is_warned_of(pattern: str) -> None:
    found = findings(corePattern=pattern)["core_pattern"]
    assert found.verdict is Verdict.WARN
    assert pattern in found.evidence
    assert "kernel.core_pattern=core" in str(found.remedy)
    assert findings(corePattern=None)["core_pattern"].verdict is Verdict.WARN
    assert findings(corePattern="")["core_pattern"].verdict is Verdict.PASS


@pytest.mark.requirement("B-50")
def test_a_sandbox_whose_user_is_somebody_on_the_host_is_warned_of() -> None:
    found = findings(account="alice", uidMap=[[0, 0, 4_294_967_295]])["host_account"]
    assert found.verdict is Verdict.WARN
    assert "uid 1000 is uid 1000" in found.evidence
    assert "alice" in found.evidence
    assert "userns-remap" in str(found.remedy)
    assert "uid 1000 is uid 100999" in findings()["host_account"].evidence


@pytest.mark.parametrize(
    ("uid_map", "uid"),
    [
        ([(0, 0, 4_294_967_295)], 1000),
        ([(0, 1000, 1), (1, 100_000, 65_536)], 100_999),
        ([(0, 100_000, 1000), (1000, 7, 1)], 7),
        ([(0, 100_000, 1000)], None),
        ([], None),
    ],
)
def test_a_user_is_followed_out_of_its_namespace(
    uid_map: list[tuple[int, int, int]], uid: int | None
) -> None:
    assert host_uid(uid_map, 1000) == uid


async def test_an_account_is_looked_up_on_this_host() -> None:
    here = pwd.getpwuid(os.getuid())
    for outside, name in ((here.pw_uid, here.pw_name), (2**31 - 5, None), (2**70, None)):
        seen = Inside.model_validate({**GOOD, "uidMap": [[1000, outside, 1]]})
        assert await account_of(seen) == name


def changed(key: str, **changes: str) -> dict[str, Mapping[str, str]]:
    return {key: {**GOOD[key], **changes}}


@pytest.mark.requirement("B-05", "B-51")
@pytest.mark.parametrize(
    ("check", "verdict", "spoilt"),
    [
        ("user", Verdict.BLOCK_ALL, {"uid": 0}),
        ("user", Verdict.BLOCK_ALL, {"pid": 4711}),
        ("user", Verdict.BLOCK_ALL, {"groups": [1000, 0]}),
        ("capabilities", Verdict.BLOCK_ALL, changed("status", CapEff="00000000a80425fb")),
        ("capabilities", Verdict.BLOCK_ALL, changed("status", CapBnd="0000000000000001")),
        ("no_new_privileges", Verdict.BLOCK_ALL, changed("status", NoNewPrivs="0")),
        ("seccomp", Verdict.BLOCK_REQUIRED, changed("status", Seccomp="0")),
        ("seccomp", Verdict.BLOCK_REQUIRED, {"userNamespaceError": None}),
        ("lsm", Verdict.BLOCK_REQUIRED, {"lsm": ""}),
        ("lsm", Verdict.BLOCK_REQUIRED, {"lsm": "unconfined"}),
        ("lsm", Verdict.BLOCK_REQUIRED, {"lsm": "forge (complain)"}),
        ("lsm", Verdict.BLOCK_REQUIRED, {"lsm": "forge-other (enforce)"}),
        ("read_only_root", Verdict.BLOCK_ALL, {"rootWriteError": None}),
        ("read_only_root", Verdict.BLOCK_ALL, {"rootWriteError": "EACCES"}),
        ("tmpfs", Verdict.BLOCK_ALL, {"tmpExecError": None}),
        ("tmpfs", Verdict.BLOCK_ALL, {"mounts": [["/tmp", "tmpfs", HARD]]}),
        ("mounts", Verdict.BLOCK_ALL, {"mounts": [*GOOD["mounts"], ["/host", "ext4", "rw"]]}),
        (
            "mounts",
            Verdict.BLOCK_ALL,
            {"mounts": [*GOOD["mounts"], ["/run/docker.sock", "tmpfs", "rw"]]},
        ),
        ("mounts", Verdict.BLOCK_ALL, {"mounts": [*GOOD["mounts"], ["/sys", "sysfs", "rw"]]}),
        ("mounts", Verdict.BLOCK_ALL, {"devices": ["null", "kvm"]}),
        ("network", Verdict.BLOCK_ALL, {"interfaces": ["eth0", "lo"]}),
        ("limits", Verdict.BLOCK_REQUIRED, changed("limits", memory="max")),
        ("limits", Verdict.BLOCK_REQUIRED, changed("limits", swap="max")),
        ("limits", Verdict.BLOCK_REQUIRED, changed("limits", pids="")),
        ("limits", Verdict.BLOCK_REQUIRED, changed("limits", quota="-1")),
        ("limits", Verdict.BLOCK_REQUIRED, changed("limits", quota="max")),
        ("limits", Verdict.BLOCK_REQUIRED, {"memoryIsKilled": False}),
        ("limits", Verdict.BLOCK_REQUIRED, {"processesUntilRefused": None}),
        ("tooling_image", Verdict.BLOCK_ALL, {"python": [3, 8, 0]}),
        ("tooling_image", Verdict.BLOCK_ALL, {"git": "git version 2.20.1"}),
        ("tooling_image", Verdict.BLOCK_ALL, {"git": "cannot run /usr/bin/git"}),
    ],
)
def test_one_spoilt_thing_is_one_named_finding(
    check: str, verdict: Verdict, spoilt: dict[str, Any]
) -> None:
    found = findings(**spoilt)
    assert [key for key in found if found[key].verdict is not Verdict.PASS] == [check]
    assert found[check].verdict is verdict
    assert found[check].remedy


@pytest.mark.requirement("B-35", "B-51")
@pytest.mark.parametrize(
    ("mode", "verdict", "word"),
    [
        ("1\n", Verdict.PASS, "is 1"),
        ("0\n", Verdict.BLOCK_REQUIRED, "only reports"),
        (None, Verdict.BLOCK_REQUIRED, "cannot read"),
    ],
)
async def test_a_label_counts_only_where_selinux_enforces_it(
    tmp_path: Path, mode: str | None, verdict: Verdict, word: str
) -> None:
    if mode is not None:
        (tmp_path / "enforce").write_text(mode)
    hardening = replace(SETTINGS.hardening, lsm_security_opt="label=type:forge_t")
    proofs = await prove_enforcing(hardening.lsm_security_opt, tmp_path / "enforce")
    settings = replace(SETTINGS, hardening=hardening).with_proofs(proofs)
    labelled = {"lsm": "system_u:system_r:forge_t:s0:c1,c2"}
    found = findings(settings, **labelled)["lsm"]
    assert found.verdict is verdict
    assert word in found.evidence
    unlabelled = findings(settings, lsm="system_u:system_r:container_t:s0")["lsm"]
    assert unlabelled.verdict is Verdict.BLOCK_REQUIRED


@pytest.mark.requirement("B-10")
def test_swap_that_cgroup_v1_does_not_count_is_a_weak_limit() -> None:
    limits = {key: value for key, value in GOOD["limits"].items() if key != "swap"}
    weak = findings(limits={**limits, "memory_and_swap": ""})["limits"]
    assert weak.verdict is Verdict.BLOCK_REQUIRED
    assert "memory_and_swap is unset" in weak.evidence
    good = findings(limits={**limits, "memory_and_swap": limits["memory"]})["limits"]
    assert good.verdict is Verdict.PASS


@pytest.mark.requirement("B-26")
def test_a_quota_is_believed_when_the_volume_has_its_size() -> None:
    sized = Inside.model_validate({**GOOD, "volumeBytes": QUOTA_BYTES})
    boundless = Inside.model_validate({**GOOD, "volumeBytes": 10**12})
    assert quota_supported(sized)
    assert not quota_supported(boundless)
    assert quota_check(sized, SETTINGS).verdict is Verdict.PASS
    assert quota_check(boundless, SETTINGS).verdict is Verdict.BLOCK_REQUIRED
    assert quota_check(None, SETTINGS).verdict is Verdict.BLOCK_REQUIRED


def facts(**changes: Any) -> EngineFacts:
    values: dict[str, Any] = {
        "id": "e1",
        "version": "26.1.5",
        "api_version": "1.45",
        "rootless": True,
        "desktop": False,
        "cgroup_version": "2",
        "storage_driver": "overlay2",
        "limits": EngineLimits(memory=True, pids=True, cpu=True),
    }
    return EngineFacts(**{**values, **changes})


@pytest.mark.requirement("B-39", "B-50")
@pytest.mark.parametrize(
    ("allowed", "verdict"), [(False, Verdict.BLOCK_ALL), (True, Verdict.BLOCK_REQUIRED)]
)
def test_docker_desktop_never_meets_sandbox_required(allowed: bool, verdict: Verdict) -> None:
    settings = PreflightSettings(
        owner=SETTINGS.owner,
        tooling_image=None,
        hardening=Hardening(),
        capacity=ResourceCapacity(1),
        docker_desktop_allowed=allowed,
    )
    found = {result.id: result for result in engine_checks(facts(desktop=True), {}, settings)}
    assert found["docker_desktop"].verdict is verdict


@pytest.mark.requirement("B-50")
def test_a_rootful_engine_is_not_for_production() -> None:
    found = {result.id: result for result in engine_checks(facts(rootless=False), {}, SETTINGS)}
    assert found["rootless"].verdict is Verdict.BLOCK_REQUIRED
    assert "docker context use rootless" in str(found["rootless"].remedy)


@pytest.mark.requirement("B-06", "B-37", "B-51")
def test_a_way_out_is_advertised_once_it_was_shown_to_work() -> None:
    container = (CHECK.passed("a container ran"),)

    def seen(settings: PreflightSettings) -> tuple[tuple[PublicationMode, ...], Verdict]:
        (verdict,) = [r.verdict for r in policy_checks(settings) if r.id == "publication_mode"]
        return capabilities(container, settings, facts()).publication_modes, verdict

    chosen = replace(SETTINGS, publication_mode=PublicationMode.BRIDGE_PUSH)
    shown = replace(chosen, proofs={"publication_mode": "pushed to a repository of our own"})
    assert seen(SETTINGS) == ((PublicationMode.SHARED_FILESYSTEM,), Verdict.BLOCK_REQUIRED)
    assert seen(chosen) == ((), Verdict.BLOCK_REQUIRED)
    assert seen(shown) == ((PublicationMode.BRIDGE_PUSH,), Verdict.PASS)


@pytest.mark.requirement("B-39", "B-54")
def test_an_allowlist_is_offered_once_the_way_out_was_shown_to_hold() -> None:
    enforced = replace(SETTINGS, egress_enforced=True)
    failing = replace(enforced, failures={"egress": "the host can be reached"})
    shown = replace(enforced, proofs={"egress": "tried"})
    for settings, verdict in (
        (SETTINGS, Verdict.WARN),
        (enforced, Verdict.BLOCK_REQUIRED),
        (failing, Verdict.BLOCK_REQUIRED),
        (shown, Verdict.PASS),
    ):
        [result] = egress_checks(settings)
        assert (result.id, result.verdict) == ("egress", verdict)
        offered = network_policies(settings, facts())
        assert (NetworkPolicy.PUBLIC_ALLOWLIST in offered) == (settings is shown)
        assert NetworkPolicy.OPEN_PUBLIC not in offered
    [result] = egress_checks(failing)
    assert "the host can be reached" in result.evidence


@pytest.mark.requirement("B-39")
def test_an_open_network_is_an_opt_in_that_is_warned_of() -> None:
    allowed = replace(SETTINGS, open_public_allowed=True)
    [_, warning] = egress_checks(allowed)
    assert (warning.id, warning.verdict) == ("open_public", Verdict.WARN)
    for version, is_offered in (("26.1.5", True), ("20.10.24+dfsg1", False)):
        offered = network_policies(allowed, facts(version=version))
        assert (NetworkPolicy.OPEN_PUBLIC in offered) == is_offered
    assert network_policies(allowed, None) == (NetworkPolicy.NONE,)


@pytest.mark.requirement("B-55")
def test_services_are_offered_only_where_their_network_contains_them() -> None:
    settings = replace(
        SETTINGS, services=(ServiceName.REDIS,), proofs={"service_redis": "answered"}
    )
    container = (CHECK.passed("a container ran"),)
    for version, services in (("26.1.5", (ServiceName.REDIS,)), ("20.10.24", ())):
        assert capabilities(container, settings, facts(version=version)).services == services


CHECK = Gate("id", "title", "somewhere")


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ((), 0),
        ((CHECK.passed("seen"), CHECK.warns("seen", "do")), 0),
        ((CHECK.passed("seen"), CHECK.blocks_required("seen", "do")), 1),
        ((CHECK.blocks_all("seen", "do"),), 1),
        ((CHECK.blocks_all("seen", "do"), CHECK.unseen("why", "do")), 2),
    ],
)
def test_the_exit_code_says_whether_to_believe_it(
    results: tuple[CheckResult, ...], code: int
) -> None:
    assert exit_code(results) == code


def test_the_reference_lists_every_check() -> None:
    modules = (
        egress_checks_module,
        engine_checks_module,
        host_checks_module,
        inside_checks_module,
        policy_checks_module,
        checks_module,
    )
    checks = [v for module in modules for v in vars(module).values() if isinstance(v, Check)]
    assert {c.id for c in checks if isinstance(c, Gate)} == set(Blocker) - OF_A_SESSION
    ids = {check.id for check in checks}
    ids |= {kind.check_id for kind in CATALOGUE.values()}
    page = Path(__file__).parents[2] / "docs" / "reference" / "hardening.md"
    section = page.read_text().partition("## Preflight")[2]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(ids)


@pytest.mark.requirement("B-35")
@pytest.mark.parametrize("mode", [0o664, 0o646])
async def test_a_seccomp_profile_that_others_may_write_is_refused(
    tmp_path: Path, mode: int
) -> None:
    profile = tmp_path / "seccomp.json"
    profile.write_text("{}")
    settings = default_bridge_service_config(sandbox_seccomp_profile=profile)
    profile.chmod(0o644)
    assert (await read_hardening(settings)).seccomp_profile_json == "{}"
    profile.chmod(mode)
    with pytest.raises(RefusedError, match="can be changed by other accounts") as refused:
        await read_hardening(settings)
    assert refused.value.field == "FORGE_SANDBOX_SECCOMP_PROFILE"


@pytest.mark.requirement("B-35")
@pytest.mark.parametrize("content", [None, b"\xff", b" " * (1 + (1 << 20))])
async def test_a_seccomp_profile_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes | None
) -> None:
    profile = tmp_path / "seccomp.json"
    if content is not None:
        profile.write_bytes(content)
        profile.chmod(0o600)
    settings = default_bridge_service_config(sandbox_seccomp_profile=profile)
    with pytest.raises(RefusedError, match=f"cannot use the seccomp profile {profile}: "):
        await read_hardening(settings)


@pytest.mark.requirement("B-10")
def test_a_quota_that_a_busy_machine_did_not_reach_is_a_quota() -> None:
    found = findings(throttled=False)["limits"]
    assert found.verdict is Verdict.PASS
    assert "did not reach" in found.evidence
