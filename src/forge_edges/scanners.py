"""The programs that look into a built image: bill of materials and vulnerabilities (B-30).

Both are given a tag of ours that only the engine knows.  Each is told to ask the engine and
nobody else, so that an image that vanished is not fetched from somewhere under that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from forge_core.bill_of_materials import MAX_BILL_BYTES
from forge_core.vulnerability_report import MAX_REPORT_BYTES
from forge_edges.gate_tools import ToolFailed, ToolSetting, complaint, run_tool
from forge_edges.process import Bounds

SCAN_TIMEOUT_MS: Final = 600_000
OWN_TIMEOUT_S: Final = SCAN_TIMEOUT_MS // 1000 - 15
"""A little earlier, so that the program can say what it was at."""

SYFT_ARGUMENTS: Final = ("-o", "spdx-json")
"""After the image, as B-30 has it; the rest is said by environment, which others may ignore."""

SYFT_ENVIRONMENT: Final = {"SYFT_FROM": "docker", "SYFT_CHECK_FOR_APP_UPDATE": "false"}

TRIVY_ARGUMENTS: Final = (
    *("image", "--quiet", "--format", "json"),
    *("--scanners", "vuln", "--list-all-pkgs"),
    *("--image-src", "docker"),
    *("--exit-code", "0"),
    *("--timeout", f"{OWN_TIMEOUT_S}s"),
)
"""Before the image.  Findings are no failure of the program: the policy judges them."""

TRIVY_ENVIRONMENT: Final = {"TRIVY_DISABLE_TELEMETRY": "true", "TRIVY_SKIP_VERSION_CHECK": "true"}


@dataclass(frozen=True, slots=True)
class Scanner:
    """One such program.

    :param before: arguments before the image.
    :param after: arguments after it.
    :param environment: added to that of all tools.
    """

    executable: str
    setting: ToolSetting
    bounds: Bounds
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    async def scan(self, reference: str) -> bytes:
        """What it printed about the image; whether that means anything is for the caller.

        :raises ToolFailed: it cannot be run, failed, took too long, or printed too much.
        """
        assert not reference.startswith("-"), reference
        setting = replace(
            self.setting, environment={**self.setting.environment, **self.environment}
        )
        outcome = await run_tool(
            self.executable,
            lambda _: [*self.before, reference, *self.after],
            setting,
            self.bounds,
        )
        if outcome.exit_code != 0:
            raise ToolFailed(complaint(outcome))
        return outcome.stdout


def bill_scanner(executable: str, setting: ToolSetting) -> Scanner:
    """Syft, or a program that is called like it."""
    bounds = Bounds(timeout_ms=SCAN_TIMEOUT_MS, stdout_bytes=MAX_BILL_BYTES)
    return Scanner(executable, setting, bounds, after=SYFT_ARGUMENTS, environment=SYFT_ENVIRONMENT)


def vulnerability_scanner(executable: str, setting: ToolSetting) -> Scanner:
    """Trivy, or a program that is called like it."""
    bounds = Bounds(timeout_ms=SCAN_TIMEOUT_MS, stdout_bytes=MAX_REPORT_BYTES)
    return Scanner(
        executable, setting, bounds, before=TRIVY_ARGUMENTS, environment=TRIVY_ENVIRONMENT
    )
