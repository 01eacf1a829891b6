"""What settings must agree on, and which ones have no effect."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from forge_core.admission import DEFAULT_REQUEST
from forge_core.errors import RefusedError

if TYPE_CHECKING:
    from forge_bridge.settings_table import BridgeSettings

TEARDOWN_SECONDS: Final = 10
"""The least that a stop must leave for teardown after the kill grace."""

_GATES: Final = {
    "sandbox_sbom_executable": "FORGE_SANDBOX_SBOM_EXECUTABLE",
    "sandbox_vulnerability_executable": "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE",
    "sandbox_provenance_signing_key": "FORGE_SANDBOX_PROVENANCE_SIGNING_KEY",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why settings cannot be used: which variables, what is wrong, what would be right."""

    variables: tuple[str, ...]
    wrong: str
    right: str

    def __str__(self) -> str:
        return f"{', '.join(self.variables)}: {self.wrong}; {self.right}"


class ConfigurationError(RefusedError):
    """The settings cannot be used; ``problems`` holds every reason."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(
            f"cannot use the settings:\n{lines}",
            code="configuration",
            field=problems[0].variables[0],
        )
        self.problems = problems


class SettingsConflictError(ValueError):
    """Settings that are each acceptable and contradict one another."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


def find_conflicts(settings: BridgeSettings) -> tuple[Problem, ...]:
    """Every contradiction, not only the first."""
    return (
        *_identity(settings),
        *_ceilings(settings),
        *_deadlines(settings),
        *_containment(settings),
    )


def _identity(s: BridgeSettings) -> Iterator[Problem]:
    if s.api_token is not None and s.api_token_file is not None:
        yield Problem(
            ("FORGE_API_TOKEN", "FORGE_API_TOKEN_FILE"),
            "both are set, and only one can be the token",
            "keep FORGE_API_TOKEN_FILE",
        )


def _ceilings(s: BridgeSettings) -> Iterator[Problem]:
    if s.disk_low_watermark_percent >= s.disk_high_watermark_percent:
        yield Problem(
            ("FORGE_DISK_LOW_WATERMARK_PERCENT", "FORGE_DISK_HIGH_WATERMARK_PERCENT"),
            f"the low watermark ({s.disk_low_watermark_percent}) is not below the high one "
            f"({s.disk_high_watermark_percent}), so pressure would never end",
            f"set the low one to at most {s.disk_high_watermark_percent - 1}",
        )
    if s.sandbox_buildkit_cache_reserved_bytes > s.sandbox_buildkit_cache_max_bytes:
        yield Problem(
            ("FORGE_SANDBOX_BUILDKIT_CACHE_RESERVED", "FORGE_SANDBOX_BUILDKIT_CACHE_MAX"),
            "more is reserved than the cache may hold",
            f"reserve at most {s.sandbox_buildkit_cache_max_bytes}B",
        )


def _deadlines(s: BridgeSettings) -> Iterator[Problem]:
    if s.sandbox_idle_seconds > s.sandbox_hard_wall_seconds:
        yield Problem(
            ("FORGE_SANDBOX_IDLE_SECONDS", "FORGE_SANDBOX_HARD_WALL_SECONDS"),
            f"an agent may be silent for longer ({s.sandbox_idle_seconds} s) than it may run "
            f"({s.sandbox_hard_wall_seconds} s), so the idle deadline would never count",
            f"set the idle deadline to at most {s.sandbox_hard_wall_seconds}, or leave it out",
        )
    least = s.sandbox_kill_grace_seconds + TEARDOWN_SECONDS
    if s.stop_deadline_seconds < least:
        yield Problem(
            ("FORGE_STOP_DEADLINE_SECONDS", "FORGE_SANDBOX_KILL_GRACE_SECONDS"),
            f"a stop would be over ({s.stop_deadline_seconds} s) before the kill grace "
            f"({s.sandbox_kill_grace_seconds} s) and {TEARDOWN_SECONDS} s of teardown",
            f"set the stop deadline to at least {least}",
        )


def _containment(s: BridgeSettings) -> Iterator[Problem]:
    if s.sandbox_egress_enforced and s.sandbox_egress_proxy_image is None:
        yield Problem(
            ("FORGE_SANDBOX_EGRESS_ENFORCED", "FORGE_SANDBOX_EGRESS_PROXY_IMAGE"),
            "egress is to be enforced and there is no proxy to enforce it",
            "set FORGE_SANDBOX_EGRESS_PROXY_IMAGE",
        )
    if s.sandbox_upstream_proxy_login_file is not None and s.sandbox_upstream_proxy is None:
        yield Problem(
            ("FORGE_SANDBOX_UPSTREAM_PROXY_LOGIN_FILE", "FORGE_SANDBOX_UPSTREAM_PROXY"),
            "there is a login and no proxy that would take it",
            "set FORGE_SANDBOX_UPSTREAM_PROXY",
        )
    for name, variable in _GATES.items():
        if s.sandbox_image_policy_enforced and getattr(s, name) is None:
            yield Problem(
                ("FORGE_SANDBOX_IMAGE_POLICY_ENFORCED", variable),
                "the image policy is to be enforced and one of its gates is missing",
                f"set {variable}",
            )
    if (s.sandbox_signature_executable is None) != (s.sandbox_signature_public_key is None):
        yield Problem(
            ("FORGE_SANDBOX_SIGNATURE_EXECUTABLE", "FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY"),
            "one is set and the other is not, so no signature could be verified",
            "set both or neither",
        )


def find_warnings(settings: BridgeSettings) -> tuple[str, ...]:
    """What is allowed and probably not meant: one sentence each."""
    return tuple(_warnings(settings))


def _warnings(s: BridgeSettings) -> Iterator[str]:
    if s.server_url is not None and _is_plaintext_far_away(s.server_url):
        yield (
            "FORGE_SERVER_URL: everything, the token included, crosses the network "
            "unencrypted; use https"
        )
    for variable, ceiling, default in (
        ("FORGE_SANDBOX_PID_CAPACITY", s.sandbox_pid_capacity, DEFAULT_REQUEST.pids),
        (
            "FORGE_SANDBOX_MEMORY_CAPACITY",
            s.sandbox_memory_capacity_bytes,
            DEFAULT_REQUEST.memory_bytes,
        ),
        (
            "FORGE_SANDBOX_CPU_CAPACITY_MILLIS",
            s.sandbox_cpu_capacity_millis,
            DEFAULT_REQUEST.cpu_millis,
        ),
    ):
        if ceiling is not None and ceiling < default:
            yield (
                f"{variable}: an offer that names no amount counts as {default}, more than there "
                f"is ({ceiling}), and will be refused"
            )
    if s.sandbox_egress_proxy_image is not None and not s.sandbox_egress_enforced:
        yield (
            "FORGE_SANDBOX_EGRESS_PROXY_IMAGE has no effect without "
            "FORGE_SANDBOX_EGRESS_ENFORCED=true"
        )
    if s.sandbox_upstream_proxy is not None and not s.sandbox_egress_enforced:
        yield (
            "FORGE_SANDBOX_UPSTREAM_PROXY has no effect without FORGE_SANDBOX_EGRESS_ENFORCED=true"
        )
    if s.sandbox_image_policy_file is not None and s.sandbox_vulnerability_executable is None:
        yield (
            "FORGE_SANDBOX_IMAGE_POLICY_FILE has no effect without "
            "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE"
        )
    if not s.sandbox_image_policy_enforced:
        for name, variable in _GATES.items():
            if getattr(s, name) is not None:
                yield f"{variable} only warns without FORGE_SANDBOX_IMAGE_POLICY_ENFORCED=true"
    elif s.sandbox_signature_executable is None:
        yield (
            "FORGE_SANDBOX_IMAGE_POLICY_ENFORCED: signatures of external images are not verified "
            "without FORGE_SANDBOX_SIGNATURE_EXECUTABLE and FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY"
        )


def _is_plaintext_far_away(server_url: str) -> bool:
    parts = urlsplit(server_url)
    if parts.scheme not in {"http", "ws"} or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True
