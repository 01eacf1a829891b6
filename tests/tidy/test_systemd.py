"""The units are what systemd takes them for, agree with the code, and let go of what they can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from lib.debian import Packages
from lib.layout import BedError
from tracked import ROOT

from engines import BedCommandError, describe
from forge_bridge.app import CLOSE_MS
from forge_bridge.flows.stop import DELIVER_MS
from forge_bridge.settings import default_bridge_service_config
from forge_bridge.terminal import EXIT_TEMPORARY, EXIT_USAGE
from needs import unavailable

UNITS = ("forge-bridge.service", "forge-bridge-reap.service", "forge-bridge-reap.timer")
SERVICES = UNITS[:2]
RECORDED_EXPOSURE = "1.3"
MOST_EXPOSURE = 1.5
"""What systemd counts changes a little from version to version."""
INSTALLED = "/opt/forge-bridge/bin/forge-bridge"

pytestmark = pytest.mark.requirement("B-43")


def settings_of(unit: str) -> dict[str, list[str]]:
    """Name → values in their order."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "systemd" / unit).read_text("utf-8").splitlines():
        if re.match(r"[A-Z]\w*=", line):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def hardening(unit: str) -> list[str]:
    """Everything below the line that begins the hardening."""
    lines = (ROOT / "systemd" / unit).read_text("utf-8").splitlines()
    first, last = lines.index("NoNewPrivileges=yes"), lines.index("SystemCallErrorNumber=EPERM")
    return lines[first : last + 1]


@pytest.fixture(scope="module")
def analyze() -> Sequence[str]:
    """``systemd-analyze``: the machine's, or one that is unpacked beside it."""
    if found := shutil.which("systemd-analyze"):
        return (found,)
    try:
        prefix = Packages(Path(describe()["cache"])).unpack_missing(["systemd"])
    except (BedError, BedCommandError) as error:
        unavailable(f"no systemd-analyze: {error}")
    libraries = prefix / f"usr/lib/{os.uname().machine}-linux-gnu"
    path = f"LD_LIBRARY_PATH={libraries}:{libraries}/systemd"
    return ("env", path, str(prefix / "usr/bin/systemd-analyze"))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units as they would be on a machine that has the program."""
    for unit in UNITS:
        text = (ROOT / "systemd" / unit).read_text("utf-8")
        program = str(Path(sys.executable).with_name("forge-bridge"))
        (tmp_path / unit).write_text(text.replace(INSTALLED, program))
    return tmp_path


def run(command: Sequence[str], directory: Path) -> str:
    """What it printed; it must have succeeded."""
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("manager", ["--system", "--user"])
def test_systemd_has_nothing_to_say_about_them(
    analyze: Sequence[str], installed: Path, manager: str
) -> None:
    if manager == "--user":
        (installed / "forge-.service.d").mkdir()
        shutil.copy(ROOT / "systemd" / "user.conf", installed / "forge-.service.d")
    checks = (manager, "verify", "--man=no", "--recursive-errors=no")
    assert run([*analyze, *checks, *(f"./{unit}" for unit in UNITS)], installed) == ""


@pytest.mark.parametrize("unit", SERVICES)
def test_what_is_still_exposed_is_what_the_documentation_says(
    analyze: Sequence[str], installed: Path, unit: str
) -> None:
    said = run([*analyze, "security", "--offline=true", "--no-pager", f"./{unit}"], installed)
    exposure = re.search(r"Overall exposure level for \S+: (\d+\.\d)", said)
    assert exposure is not None, said
    assert float(exposure[1]) <= MOST_EXPOSURE
    page = (ROOT / "docs/how-to/systemd.md").read_text("utf-8")
    assert f"exposure level {RECORDED_EXPOSURE}" in page


def test_both_services_are_one_account_with_one_configuration() -> None:
    bridge, reap = map(settings_of, SERVICES)
    assert hardening(SERVICES[0]) == hardening(SERVICES[1])
    same = ("User", "EnvironmentFile", "StateDirectory", "StateDirectoryMode", "UMask")
    assert {name: bridge[name] for name in same} == {name: reap[name] for name in same}
    assert bridge["StateDirectoryMode"] == ["0700"]


def test_the_bridge_is_given_the_time_that_it_takes() -> None:
    bridge = settings_of(SERVICES[0])
    stop_ms = default_bridge_service_config().stop_deadline_seconds * 1000
    assert bridge["TimeoutStopSec"] == ["2min"]
    assert stop_ms + DELIVER_MS + CLOSE_MS <= 120_000
    assert bridge["RestartPreventExitStatus"] == [str(EXIT_USAGE)]
    assert bridge["ExecStart"] == [f"{INSTALLED} run"]
    assert "forge-bridge-reap.service" in bridge["After"][0].split()


def test_the_cleanup_runs_every_minute_and_may_find_the_bridge() -> None:
    reap, timer = settings_of(SERVICES[1]), settings_of(UNITS[2])
    assert reap["ExecStart"] == [f"{INSTALLED} sandbox reap --quiet"]
    assert reap["SuccessExitStatus"] == [str(EXIT_TEMPORARY)]
    assert timer["OnActiveSec"] == timer["OnUnitInactiveSec"] == ["1min"]
    assert "OnCalendar" not in timer, "a step of the clock would skip or repeat runs"
