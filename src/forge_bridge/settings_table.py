"""Every setting of the bridge, in one frozen object (B-09, B-19 … B-39).

Field names say their unit; environment names are those that operators know.  Constructing the
object reads neither environment nor files: :func:`forge_bridge.settings.load_settings`
does that, once, and keeps the origin of each value.  Features that need a setting take it from
this object, which ``forge_bridge.app`` passes down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, JsonValue, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from forge_bridge import settings_types as accept
from forge_bridge.settings_rules import SettingsConflictError, find_conflicts
from forge_core.image_ports import BuildLimits
from forge_core.resources import ResourceCapacity
from forge_core.wire.codes import PublicationMode

MAX_WALL_SECONDS: Final = 8 * 60 * 60
"""Nothing runs longer than eight hours (B-36)."""

DAY_MS: Final = 24 * 60 * 60 * 1000
GIB: Final = 2**30
MIB: Final = 2**20


class LogFormat(StrEnum):
    """How log lines look."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def setting(variable: str, row: str, default: Any, meaning: str) -> Any:
    """One row of the settings table.

    :param default: a value, or a function of the fields before it.
    :param meaning: one sentence for the generated reference.
    """
    about: dict[str, JsonValue] = {"row": row}
    if callable(default):
        return Field(
            default_factory=default,
            validation_alias=variable,
            description=meaning,
            json_schema_extra=about,
        )
    return Field(
        default=default, validation_alias=variable, description=meaning, json_schema_extra=about
    )


def default_state_root(_before: Mapping[str, Any] | None = None) -> Path:
    """``$XDG_STATE_HOME/forge-bridge``; XDG has relative values ignored (basedir spec 0.8)."""
    configured = Path(os.environ.get("XDG_STATE_HOME", ""))
    if configured.is_absolute():
        return configured / "forge-bridge"
    try:
        return Path.home() / ".local/state/forge-bridge"
    except RuntimeError:  # an account without a home
        return Path("/var/lib/forge-bridge")


def _at_most(other: str, most: int) -> Any:
    """A default that never exceeds another field's value, where that has one."""

    def default(before: Mapping[str, Any]) -> int:
        ceiling = before.get(other)
        return most if ceiling is None else min(most, ceiling)

    return default


class BridgeSettings(BaseSettings):
    """The settings of one bridge; sizes in bytes, durations as the names say."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,
        validate_default=False,
    )

    # Where the hub is and who we are
    server_url: Annotated[str | None, accept.server_url()] = setting(
        "FORGE_SERVER_URL", "B-19", None, "Base URL of the hub. Needed to run."
    )
    api_token: Annotated[SecretStr | None, accept.token()] = setting(
        "FORGE_API_TOKEN",
        "B-19",
        None,
        "Bearer token for the hub. Prefer FORGE_API_TOKEN_FILE: other processes of the account "
        "can read an environment.",
    )
    api_token_file: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_API_TOKEN_FILE",
        "B-19",
        None,
        "File that holds the bearer token: mode 0600, owned by the service account or root. "
        "Read again at each connection, so that a token can be rotated without a restart.",
    )
    runner_id: Annotated[str | None, accept.identifier()] = setting(
        "FORGE_RUNNER_ID",
        "B-39",
        None,
        "Stable identity of this runner; unset: made once and kept in the state root.",
    )
    trust_domain_id: Annotated[str | None, accept.identifier()] = setting(
        "FORGE_TRUST_DOMAIN_ID",
        "B-20",
        None,
        "Trust domain of this runner; offers of other domains are refused. Needed to run.",
    )
    allow_host_execution: Annotated[bool, accept.flag()] = setting(
        "FORGE_ALLOW_HOST_EXECUTION",
        "B-19",
        False,
        "Whether anything may run on the host without a sandbox, whatever the hub says: protocol "
        "v1, policy host and host fallback.",
    )

    # Capacity
    max_concurrent_sandboxes: Annotated[int, accept.whole(1, 1024)] = setting(
        "FORGE_MAX_CONCURRENT_SANDBOXES", "B-21", 1, "Slots: attempts at the same time."
    )
    max_concurrent_sandbox_builds: Annotated[int, accept.whole(1, 256)] = setting(
        "FORGE_MAX_CONCURRENT_SANDBOX_BUILDS", "B-22", 1, "Image builds at the same time."
    )
    sandbox_pid_capacity: Annotated[int, accept.whole(16, 4_194_304)] = setting(
        "FORGE_SANDBOX_PID_CAPACITY", "B-22", 2048, "Processes of all attempts together."
    )
    sandbox_memory_capacity_bytes: Annotated[int | None, accept.size(64 * MIB)] = setting(
        "FORGE_SANDBOX_MEMORY_CAPACITY",
        "B-22",
        None,
        "Memory of all attempts together; unset: admission sets no ceiling.",
    )
    sandbox_cpu_capacity_millis: Annotated[int | None, accept.whole(100, 1_024_000)] = setting(
        "FORGE_SANDBOX_CPU_CAPACITY_MILLIS",
        "B-22",
        None,
        "CPU of all attempts together, in thousandths of one CPU; unset: no ceiling.",
    )

    # The engine
    docker_context: Annotated[str | None, accept.docker_context()] = setting(
        "FORGE_DOCKER_CONTEXT",
        "B-23",
        None,
        "Docker context of the dedicated daemon; unset: DOCKER_HOST, else the CLI's own choice.",
    )
    docker_executable: Annotated[str, accept.executable()] = setting(
        "FORGE_DOCKER_EXECUTABLE", "B-23", "docker", "The Docker CLI, for image builds."
    )
    sandbox_subnet_pool: Annotated[IPv4Network, accept.subnet_pool()] = setting(
        "FORGE_SANDBOX_SUBNET_POOL",
        "B-19",
        IPv4Network("10.213.0.0/20"),
        "Where the small subnets of attempts come from; must not overlap a network in use.",
    )
    sandbox_seccomp_profile: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_SECCOMP_PROFILE",
        "B-35",
        None,
        "Hardened seccomp profile of every container; unset: the engine's own. "
        "Needed for sandbox_required.",
    )
    sandbox_lsm_security_opt: Annotated[str | None, accept.lsm_security_opt()] = setting(
        "FORGE_SANDBOX_LSM_SECURITY_OPT",
        "B-35",
        None,
        "AppArmor or SELinux option of every container. Needed for sandbox_required.",
    )

    # State and disk
    sandbox_state_root: Annotated[Path, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_STATE_ROOT",
        "B-24",
        default_state_root,
        "Directory of everything durable: mode 0700, owned by the service account.",
    )
    disk_high_watermark_percent: Annotated[int, accept.whole(2, 99, "percentage")] = setting(
        "FORGE_DISK_HIGH_WATERMARK_PERCENT", "B-25", 90, "From here on offers are refused."
    )
    disk_low_watermark_percent: Annotated[int, accept.whole(1, 98, "percentage")] = setting(
        "FORGE_DISK_LOW_WATERMARK_PERCENT",
        "B-25",
        lambda before: max(1, before.get("disk_high_watermark_percent", 90) - 10),
        "Below this they are taken again.",
    )
    minimum_workspace_bytes: Annotated[int, accept.size(0, bare=True)] = setting(
        "FORGE_MINIMUM_WORKSPACE_BYTES",
        "B-25",
        2 * GIB,
        "Free space that must remain, whatever the percentages say; also the build cache's.",
    )
    sandbox_dedicated_disk: Annotated[bool, accept.flag()] = setting(
        "FORGE_SANDBOX_DEDICATED_DISK",
        "B-26",
        False,
        "The operator's word that sandbox storage is a disk of its own, where the storage driver "
        "has no quota for each volume.",
    )
    sandbox_image_retention_count: Annotated[int, accept.whole(0, 10_000)] = setting(
        "FORGE_SANDBOX_IMAGE_RETENTION_COUNT", "B-27", 3, "Cached images kept for each project."
    )
    sandbox_image_retention_ttl_ms: Annotated[
        int, accept.whole(0, 3650 * DAY_MS, "number of milliseconds")
    ] = setting(
        "FORGE_SANDBOX_IMAGE_RETENTION_TTL_MS",
        "B-27",
        7 * DAY_MS,
        "Age from which a cached image beyond the count may go.",
    )
    sandbox_audit_retention_count: Annotated[int, accept.whole(0, 100_000)] = setting(
        "FORGE_SANDBOX_AUDIT_RETENTION_COUNT",
        "B-28",
        200,
        "Image keys whose failed-build logs and attestations are kept.",
    )
    sandbox_audit_retention_ttl_ms: Annotated[
        int, accept.whole(0, 3650 * DAY_MS, "number of milliseconds")
    ] = setting(
        "FORGE_SANDBOX_AUDIT_RETENTION_TTL_MS",
        "B-28",
        30 * DAY_MS,
        "Age from which such evidence may go; that of images in use stays.",
    )

    # Images and their gates
    agent_tooling_image: Annotated[str | None, accept.pinned_image()] = setting(
        "FORGE_AGENT_TOOLING_IMAGE",
        "B-29",
        None,
        "Image with the supervisor's interpreter, git and the agent's tools. Needed for sandboxes.",
    )
    sandbox_image_policy_enforced: Annotated[bool, accept.flag()] = setting(
        "FORGE_SANDBOX_IMAGE_POLICY_ENFORCED",
        "B-30",
        False,
        "Whether a built image must pass every gate before it is used. Without it, the gates that "
        "are configured run and only warn.",
    )
    sandbox_sbom_executable: Annotated[str | None, accept.executable()] = setting(
        "FORGE_SANDBOX_SBOM_EXECUTABLE",
        "B-30",
        None,
        "Bill of materials: called as Syft, `<image> -o spdx-json`.",
    )
    sandbox_vulnerability_executable: Annotated[str | None, accept.executable()] = setting(
        "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE",
        "B-30",
        None,
        "Vulnerability scan: called with Trivy's image arguments.",
    )
    sandbox_image_policy_file: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_IMAGE_POLICY_FILE",
        "B-30",
        None,
        "Which vulnerabilities refuse an image, and the dated exceptions; read at each use.",
    )
    sandbox_provenance_signing_key: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_PROVENANCE_SIGNING_KEY",
        "B-30",
        None,
        "Private key that signs the provenance of built images: Ed25519 or ECDSA P-256, PKCS #8 "
        "in PEM, unencrypted, mode 0600.",
    )
    sandbox_signature_executable: Annotated[str | None, accept.executable()] = setting(
        "FORGE_SANDBOX_SIGNATURE_EXECUTABLE",
        "B-31",
        None,
        "Signature check of external images: called as Cosign.",
    )
    sandbox_signature_public_key: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY",
        "B-31",
        None,
        "Public key of those signatures, in PEM; read once at the start.",
    )

    # Builds
    sandbox_build_egress_enforced: Annotated[bool, accept.flag()] = setting(
        "FORGE_SANDBOX_BUILD_EGRESS_ENFORCED",
        "B-32",
        False,
        "The operator's word that the dedicated builder is behind egress control. "
        "Needed for sandbox_required.",
    )
    sandbox_buildkit_image: Annotated[str | None, accept.pinned_image()] = setting(
        "FORGE_SANDBOX_BUILDKIT_IMAGE",
        "B-33",
        None,
        "BuildKit, for a builder of our own with the limits below; unset: the engine's builder, "
        "which cannot be limited. Needed for sandbox_required.",
    )
    sandbox_build_memory_bytes: Annotated[int, accept.size(64 * MIB)] = setting(
        "FORGE_SANDBOX_BUILD_MEMORY", "B-33", 4 * GIB, "Memory and swap of one build step."
    )
    sandbox_build_cpu_quota_us: Annotated[
        int, accept.whole(1000, 102_400_000, "number of microseconds")
    ] = setting(
        "FORGE_SANDBOX_BUILD_CPU_QUOTA",
        "B-33",
        200_000,
        "CFS quota of one build step, in microseconds of each 100000: 200000 is two CPUs.",
    )
    sandbox_build_nofile: Annotated[int, accept.whole(64, 1_048_576)] = setting(
        "FORGE_SANDBOX_BUILD_NOFILE", "B-33", 4096, "Open files of one build step."
    )
    sandbox_builder_pids_limit: Annotated[int, accept.whole(64, 32_768)] = setting(
        "FORGE_SANDBOX_BUILDER_PIDS_LIMIT",
        "B-33",
        512,
        "Processes of the dedicated builder's container, applied and verified.",
    )
    sandbox_buildkit_cache_max_bytes: Annotated[int, accept.size(64 * MIB)] = setting(
        "FORGE_SANDBOX_BUILDKIT_CACHE_MAX", "B-34", 20 * GIB, "Most that the build cache holds."
    )
    sandbox_buildkit_cache_reserved_bytes: Annotated[int, accept.size(0)] = setting(
        "FORGE_SANDBOX_BUILDKIT_CACHE_RESERVED",
        "B-34",
        _at_most("sandbox_buildkit_cache_max_bytes", 2 * GIB),
        "What pressure leaves of it.",
    )

    # Deadlines
    sandbox_hard_wall_seconds: Annotated[
        int, accept.capped(1, MAX_WALL_SECONDS, "number of seconds")
    ] = setting(
        "FORGE_SANDBOX_HARD_WALL_SECONDS",
        "B-36",
        MAX_WALL_SECONDS,
        "Longest run of an agent, from its start.",
    )
    sandbox_idle_seconds: Annotated[
        int, accept.capped(1, MAX_WALL_SECONDS, "number of seconds")
    ] = setting(
        "FORGE_SANDBOX_IDLE_SECONDS",
        "B-36",
        _at_most("sandbox_hard_wall_seconds", 30 * 60),
        "Longest silence of an agent, from its last byte of output.",
    )
    sandbox_kill_grace_seconds: Annotated[int, accept.whole(0, 300, "number of seconds")] = setting(
        "FORGE_SANDBOX_KILL_GRACE_SECONDS",
        "B-36",
        10,
        "Between SIGTERM and SIGKILL, whatever ends an agent.",
    )
    stop_deadline_seconds: Annotated[int, accept.whole(1, 3600, "number of seconds")] = setting(
        "FORGE_STOP_DEADLINE_SECONDS",
        "B-01",
        lambda before: before.get("sandbox_kill_grace_seconds", 10) + 60,
        "Longest stop of the bridge after SIGTERM: attempts are cancelled and torn down. The "
        "service manager must wait longer (TimeoutStopSec).",
    )

    # Results, services, network
    sandbox_publication_mode: Annotated[PublicationMode, accept.choice(PublicationMode)] = setting(
        "FORGE_SANDBOX_PUBLICATION_MODE",
        "B-37",
        PublicationMode.SHARED_FILESYSTEM,
        "How result commits leave. sandbox_required needs bridge_push.",
    )
    service_postgres_image: Annotated[str | None, accept.pinned_image()] = setting(
        "FORGE_SERVICE_POSTGRES_IMAGE", "B-38", None, "PostgreSQL beside an agent."
    )
    service_redis_image: Annotated[str | None, accept.pinned_image()] = setting(
        "FORGE_SERVICE_REDIS_IMAGE", "B-38", None, "Redis beside an agent."
    )
    service_browser_image: Annotated[str | None, accept.pinned_image()] = setting(
        "FORGE_SERVICE_BROWSER_IMAGE", "B-38", None, "Browser beside an agent."
    )
    sandbox_egress_proxy_image: Annotated[str | None, accept.pinned_image()] = setting(
        "FORGE_SANDBOX_EGRESS_PROXY_IMAGE",
        "B-39",
        None,
        "Squid-compatible proxy. Needed for network policy public_allowlist.",
    )
    sandbox_egress_enforced: Annotated[bool, accept.flag()] = setting(
        "FORGE_SANDBOX_EGRESS_ENFORCED",
        "B-39",
        False,
        "Whether public_allowlist is offered, through that proxy alone.",
    )
    sandbox_upstream_proxy: Annotated[str | None, accept.proxy_url()] = setting(
        "FORGE_SANDBOX_UPSTREAM_PROXY",
        "B-54",
        None,
        "HTTP proxy that the egress proxy asks; it must refuse private addresses itself.",
    )
    sandbox_upstream_proxy_login_file: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_UPSTREAM_PROXY_LOGIN_FILE",
        "B-54",
        None,
        "File with user:password for it, in mode 0600; read once at the start.",
    )
    sandbox_custom_ca: Annotated[Path | None, accept.absolute_path()] = setting(
        "FORGE_SANDBOX_CUSTOM_CA",
        "B-54",
        None,
        "Certificates in PEM that agents with a network trust instead of those of their image, "
        "where a proxy on the way looks into TLS; read once at the start.",
    )
    allow_open_public_sandbox: Annotated[bool, accept.flag()] = setting(
        "FORGE_ALLOW_OPEN_PUBLIC_SANDBOX",
        "B-39",
        False,
        "Developers only: network policy open_public. Never weakens sandbox_required.",
    )
    allow_docker_desktop_sandbox: Annotated[bool, accept.flag()] = setting(
        "FORGE_ALLOW_DOCKER_DESKTOP_SANDBOX",
        "B-39",
        False,
        "Developers only: Docker Desktop as the engine. Never weakens sandbox_required.",
    )

    # Metrics
    metrics_listen: Annotated[str | None, accept.listen_address()] = setting(
        "FORGE_METRICS_LISTEN",
        "ours",
        None,
        "Where Prometheus may scrape /metrics, and probes ask /healthz; unset: nowhere. There is "
        "no authentication: keep it on loopback or on a network of your own.",
    )

    # Logs
    log_format: Annotated[LogFormat, accept.choice(LogFormat)] = setting(
        "FORGE_LOG_FORMAT",
        "ours",
        LogFormat.AUTO,
        "auto: readable lines on a terminal, JSON elsewhere.",
    )
    log_level: Annotated[LogLevel, accept.choice(LogLevel)] = setting(
        "FORGE_LOG_LEVEL", "ours", LogLevel.INFO, "The least that is logged."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing ambient: what is not passed in has its default."""
        return (init_settings,)

    @model_validator(mode="after")
    def _agree(self) -> BridgeSettings:
        conflicts = find_conflicts(self)
        if conflicts:
            raise SettingsConflictError(conflicts)
        return self

    @property
    def resource_capacity(self) -> ResourceCapacity:
        """What admission may give away (B-21, B-22).

        Memory and CPU have a ceiling only where the operator names one: the engine may run
        elsewhere, and its own totals do not know what else that machine must carry.  Disk is
        guarded by the watermarks, not by a sum.
        """
        return ResourceCapacity(
            slots=self.max_concurrent_sandboxes,
            builds=self.max_concurrent_sandbox_builds,
            pids=self.sandbox_pid_capacity,
            memory_bytes=self.sandbox_memory_capacity_bytes,
            cpu_millis=self.sandbox_cpu_capacity_millis,
        )

    @property
    def build_limits(self) -> BuildLimits:
        """What one image build may take (B-33)."""
        return BuildLimits(
            memory_bytes=self.sandbox_build_memory_bytes,
            cpu_quota_us=self.sandbox_build_cpu_quota_us,
            nofile=self.sandbox_build_nofile,
            pids=self.sandbox_builder_pids_limit,
        )
