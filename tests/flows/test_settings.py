"""Settings: the whole table, its origins, its refusals and its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from forge_bridge.settings import (
    VARIABLES,
    BridgeSettings,
    ConfigurationError,
    Origin,
    default_bridge_service_config,
    load_settings,
    read_api_token,
    require_to_run,
)
from forge_bridge.settings_show import MASKED, effective_settings, settings_json
from forge_core.resources import ResourceCapacity
from needs import require_root

PINNED = "registry.example.org/tools@sha256:" + "a" * 64

TABLE = {
    # variable: (accepted text, value, default)
    "FORGE_SERVER_URL": ("https://hub.example.org/", "https://hub.example.org/", None),
    "FORGE_API_TOKEN": ("t0ken", SecretStr("t0ken"), None),
    "FORGE_API_TOKEN_FILE": ("/etc/forge/token", Path("/etc/forge/token"), None),
    "FORGE_RUNNER_ID": ("runner-1", "runner-1", None),
    "FORGE_TRUST_DOMAIN_ID": ("team_a", "team_a", None),
    "FORGE_ALLOW_HOST_EXECUTION": ("true", True, False),
    "FORGE_MAX_CONCURRENT_SANDBOXES": ("8", 8, 1),
    "FORGE_MAX_CONCURRENT_SANDBOX_BUILDS": ("2", 2, 1),
    "FORGE_SANDBOX_PID_CAPACITY": ("4096", 4096, 2048),
    "FORGE_SANDBOX_MEMORY_CAPACITY": ("8GB", 8 * 10**9, None),
    "FORGE_SANDBOX_CPU_CAPACITY_MILLIS": ("4000", 4000, None),
    "FORGE_DOCKER_CONTEXT": ("forge-rootless", "forge-rootless", None),
    "FORGE_DOCKER_EXECUTABLE": ("/usr/bin/docker", "/usr/bin/docker", "docker"),
    "FORGE_DISK_HIGH_WATERMARK_PERCENT": ("95", 95, 90),
    "FORGE_DISK_LOW_WATERMARK_PERCENT": ("70", 70, 80),
    "FORGE_MINIMUM_WORKSPACE_BYTES": ("1073741824", 2**30, 2**31),
    "FORGE_SANDBOX_DEDICATED_DISK": ("true", True, False),
    "FORGE_SANDBOX_IMAGE_RETENTION_COUNT": ("5", 5, 3),
    "FORGE_SANDBOX_IMAGE_RETENTION_TTL_MS": ("1000", 1000, 604_800_000),
    "FORGE_SANDBOX_AUDIT_RETENTION_COUNT": ("10", 10, 200),
    "FORGE_SANDBOX_AUDIT_RETENTION_TTL_MS": ("1000", 1000, 2_592_000_000),
    "FORGE_AGENT_TOOLING_IMAGE": (PINNED, PINNED, None),
    "FORGE_SANDBOX_SBOM_EXECUTABLE": ("syft", "syft", None),
    "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE": ("/opt/trivy", "/opt/trivy", None),
    "FORGE_SANDBOX_IMAGE_POLICY_FILE": ("/etc/forge/p.yml", Path("/etc/forge/p.yml"), None),
    "FORGE_SANDBOX_PROVENANCE_SIGNING_KEY": ("/etc/forge/key", Path("/etc/forge/key"), None),
    "FORGE_SANDBOX_BUILD_EGRESS_ENFORCED": ("true", True, False),
    "FORGE_SANDBOX_BUILD_MEMORY": ("2g", 2**31, 4 * 2**30),
    "FORGE_SANDBOX_BUILD_CPU_QUOTA": ("100000", 100_000, 200_000),
    "FORGE_SANDBOX_BUILD_NOFILE": ("1024", 1024, 4096),
    "FORGE_SANDBOX_BUILDER_PIDS_LIMIT": ("256", 256, 512),
    "FORGE_SANDBOX_BUILDKIT_CACHE_MAX": ("10GiB", 10 * 2**30, 20 * 2**30),
    "FORGE_SANDBOX_BUILDKIT_CACHE_RESERVED": ("1GiB", 2**30, 2 * 2**30),
    "FORGE_SANDBOX_SECCOMP_PROFILE": ("/etc/forge/s.json", Path("/etc/forge/s.json"), None),
    "FORGE_SANDBOX_LSM_SECURITY_OPT": ("apparmor=forge", "apparmor=forge", None),
    "FORGE_SANDBOX_HARD_WALL_SECONDS": ("3600", 3600, 28_800),
    "FORGE_SANDBOX_IDLE_SECONDS": ("600", 600, 1800),
    "FORGE_SANDBOX_PUBLICATION_MODE": ("bridge_push", "bridge_push", "shared_filesystem"),
    "FORGE_SERVICE_POSTGRES_IMAGE": (PINNED, PINNED, None),
    "FORGE_SERVICE_REDIS_IMAGE": (PINNED, PINNED, None),
    "FORGE_SERVICE_BROWSER_IMAGE": (PINNED, PINNED, None),
    "FORGE_SANDBOX_EGRESS_PROXY_IMAGE": (PINNED, PINNED, None),
    "FORGE_SANDBOX_UPSTREAM_PROXY": ("http://proxy:3128", "http://proxy:3128", None),
    "FORGE_SANDBOX_CUSTOM_CA": ("/etc/forge/ca.pem", Path("/etc/forge/ca.pem"), None),
    "FORGE_ALLOW_OPEN_PUBLIC_SANDBOX": ("true", True, False),
    "FORGE_ALLOW_DOCKER_DESKTOP_SANDBOX": ("true", True, False),
}
REFUSED = {
    "FORGE_SERVER_URL": ["ftp://hub", "hub", "https://user:hunter2@hub"],
    "FORGE_API_TOKEN": ["hunter2 hunter2", "hunter2\n", "hunter2" * 2000],
    "FORGE_API_TOKEN_FILE": ["token", "/etc/../token"],
    "FORGE_RUNNER_ID": ["-x", "a/b", "a" * 129],
    "FORGE_ALLOW_HOST_EXECUTION": ["maybe", "2"],
    "FORGE_MAX_CONCURRENT_SANDBOXES": ["0", "-1", "1.5", "1e3", "nan", "1_0", "9" * 40],
    "FORGE_SANDBOX_SUBNET_POOL": ["8.8.0.0/16", "10.0.0.1/8", "10.0.0.0/30", "fd00::/8", "x"],
    "FORGE_SANDBOX_UPSTREAM_PROXY": [
        *("proxy:3128", "https://proxy:3128", "http://proxy", "http://proxy:0", "http://-a:1"),
        *(
            "http://user:hunter2@proxy:3128",
            "http://proxy:3128/",
            "http://proxy:99999",
            "http://a b:1",
        ),
    ],
    "FORGE_DOCKER_EXECUTABLE": ["docker run", "./docker", "-x"],
    "FORGE_DISK_HIGH_WATERMARK_PERCENT": ["100", "0", "95%"],
    "FORGE_MINIMUM_WORKSPACE_BYTES": ["-1", "1.5GiB", "99999999TiB"],
    "FORGE_AGENT_TOOLING_IMAGE": ["python:3", "python@sha256:abc", "@sha256:" + "a" * 64],
    "FORGE_SANDBOX_BUILD_MEMORY": ["4", "4294967296", "-4g", "nan", "1k"],
    "FORGE_SANDBOX_LSM_SECURITY_OPT": ["apparmor=unconfined", "label=disable", "seccomp=x"],
    "FORGE_SANDBOX_HARD_WALL_SECONDS": ["0", "-5", "8h"],
    "FORGE_SANDBOX_PUBLICATION_MODE": ["push"],
}


@pytest.mark.requirement("B-19", "B-20", "B-21", "B-22", "B-23", "B-24", "B-25", "B-26")
@pytest.mark.requirement("B-27", "B-28", "B-29", "B-30", "B-31", "B-32", "B-33", "B-34")
@pytest.mark.requirement("B-35", "B-36", "B-37", "B-38", "B-39")
@pytest.mark.parametrize("variable", TABLE)
def test_each_setting_has_its_default_and_is_read_from_the_environment(variable: str) -> None:
    text, value, default = TABLE[variable]
    field = VARIABLES[variable]
    assert getattr(default_bridge_service_config(), field) == default
    environment = {variable: text}
    loaded = load_settings(environment=environment)
    assert getattr(loaded.settings, field) == value
    assert loaded.origins[variable] is Origin.ENVIRONMENT
    others = {name: origin for name, origin in loaded.origins.items() if name != variable}
    assert set(others.values()) == {Origin.DEFAULT}
    assert list(loaded.origins) == list(VARIABLES)


@pytest.mark.requirement("B-30", "B-31", "B-39")
@pytest.mark.parametrize(
    "names",
    [
        ("SANDBOX_EGRESS_ENFORCED=true", f"SANDBOX_EGRESS_PROXY_IMAGE={PINNED}"),
        ("SANDBOX_UPSTREAM_PROXY_LOGIN_FILE=/etc/l", "SANDBOX_UPSTREAM_PROXY=http://proxy:1"),
        ("SANDBOX_SIGNATURE_EXECUTABLE=cosign", "SANDBOX_SIGNATURE_PUBLIC_KEY=/etc/cosign.pub"),
        (
            "SANDBOX_IMAGE_POLICY_ENFORCED=true",
            "SANDBOX_SBOM_EXECUTABLE=syft",
            "SANDBOX_VULNERABILITY_EXECUTABLE=trivy",
            "SANDBOX_PROVENANCE_SIGNING_KEY=/etc/key",
        ),
    ],
)
def test_settings_that_need_one_another(names: tuple[str, ...]) -> None:
    environment = dict(f"FORGE_{text}".split("=", 1) for text in names)
    load_settings(environment=environment)
    rest = dict(list(environment.items())[:1])
    with pytest.raises(ConfigurationError) as refused:
        load_settings(environment=rest)
    assert set(environment) <= {name for p in refused.value.problems for name in p.variables}


@pytest.mark.parametrize(
    ("variable", "text"), [(name, text) for name, texts in REFUSED.items() for text in texts]
)
def test_a_refusal_names_the_variable_what_is_wrong_and_what_is_right(
    variable: str, text: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(environment={variable: text})
    (problem,) = refused.value.problems
    assert problem.variables == (variable,)
    assert problem.wrong
    assert problem.right.startswith("give ")
    assert "hunter2" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.requirement("B-33")
def test_a_bare_number_is_refused_with_both_readings() -> None:
    with pytest.raises(ConfigurationError, match=r"no unit; write 512MiB .* or 512MB"):
        load_settings(environment={"FORGE_SANDBOX_BUILD_MEMORY": "512"})


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(
            environment={
                "FORGE_SANDBOX_BUILD_MEMORY": "512",
                "FORGE_MAX_CONCURRENT_SANDBOXES": "none",
                "FORGE_DISK_LOW_WATERMARK_PERCENT": "95",
                "FORGE_SANDBOX_EGRESS_ENFORCED": "true",
                "FORGE_SANDBOX_IDLE_SECONDS": "700",
                "FORGE_SANDBOX_HARD_WALL_SECONDS": "600",
            }
        )
    named = [problem.variables[0] for problem in refused.value.problems]
    assert sorted(named) == [
        "FORGE_DISK_LOW_WATERMARK_PERCENT",
        "FORGE_MAX_CONCURRENT_SANDBOXES",
        "FORGE_SANDBOX_BUILD_MEMORY",
        "FORGE_SANDBOX_EGRESS_ENFORCED",
        "FORGE_SANDBOX_IDLE_SECONDS",
    ]


def test_a_refused_value_hides_no_contradiction_and_nothing_that_is_missing(
    tmp_path: Path,
) -> None:
    path = _settings_file(
        tmp_path / "bridge.env",
        "no assignment\nFORGE_SANDBOX_IMAGE_POLICY_ENFORCED=true\n"
        "FORGE_SANDBOX_SBOM_EXECUTABLE=a/b\n",
    )
    with pytest.raises(ConfigurationError) as refused:
        load_settings(path, {"FORGE_MAX_CONCURRENT_SANDBOXES": "0"}, to_run=True)
    named = [problem.variables[-1] for problem in refused.value.problems]
    assert sorted(named) == [
        "FORGE_BRIDGE_SETTINGS_FILE",
        "FORGE_MAX_CONCURRENT_SANDBOXES",
        "FORGE_SANDBOX_PROVENANCE_SIGNING_KEY",
        "FORGE_SANDBOX_SBOM_EXECUTABLE",
        "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE",
    ]
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(ConfigurationError) as refused:
        load_settings(path, {"FORGE_SERVER_URL": "http://hub"}, to_run=True)
    named = [problem.variables[-1] for problem in refused.value.problems]
    assert named[-1] == "FORGE_TRUST_DOMAIN_ID"
    assert "FORGE_SERVER_URL" not in named
    with pytest.raises(ConfigurationError) as refused:
        load_settings(path, {})
    assert "FORGE_TRUST_DOMAIN_ID" not in str(refused.value)


@pytest.mark.requirement("B-25", "B-34", "B-36")
@pytest.mark.parametrize(
    "environment",
    [
        {"FORGE_DISK_LOW_WATERMARK_PERCENT": "90", "FORGE_DISK_HIGH_WATERMARK_PERCENT": "90"},
        {"FORGE_SANDBOX_IDLE_SECONDS": "61", "FORGE_SANDBOX_HARD_WALL_SECONDS": "60"},
        {"FORGE_API_TOKEN": "hunter2", "FORGE_API_TOKEN_FILE": "/etc/forge/token"},
        {
            "FORGE_SANDBOX_BUILDKIT_CACHE_RESERVED": "2GiB",
            "FORGE_SANDBOX_BUILDKIT_CACHE_MAX": "1GiB",
        },
        {"FORGE_STOP_DEADLINE_SECONDS": "30", "FORGE_SANDBOX_KILL_GRACE_SECONDS": "60"},
        {
            "FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY": "/etc/cosign.pub",
            "FORGE_SANDBOX_SIGNATURE_EXECUTABLE": "",
        },
    ],
)
def test_contradictions_are_refused_under_both_names(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(environment=environment)
    (problem,) = refused.value.problems
    assert set(problem.variables) == set(environment)
    assert "hunter2" not in str(refused.value)


@pytest.mark.requirement("B-36")
def test_deadlines_beyond_eight_hours_count_as_eight_hours_and_say_so() -> None:
    loaded = load_settings(environment={"FORGE_SANDBOX_HARD_WALL_SECONDS": "90000"})
    assert loaded.settings.sandbox_hard_wall_seconds == 28_800
    assert loaded.warnings == (
        "FORGE_SANDBOX_HARD_WALL_SECONDS=90000 counts as 28800, the eight-hour maximum",
    )


@pytest.mark.requirement("B-25", "B-36")
def test_a_default_follows_the_value_that_bounds_it() -> None:
    settings = default_bridge_service_config(
        sandbox_hard_wall_seconds=60, disk_high_watermark_percent=50
    )
    assert settings.sandbox_idle_seconds == 60
    assert settings.disk_low_watermark_percent == 40


@pytest.mark.requirement("B-09")
def test_the_settings_are_frozen_and_read_nothing_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORGE_MAX_CONCURRENT_SANDBOXES", "7")
    settings = default_bridge_service_config(max_concurrent_sandbox_builds=3)
    assert isinstance(settings, BridgeSettings)
    assert (settings.max_concurrent_sandboxes, settings.max_concurrent_sandbox_builds) == (1, 3)
    assert load_settings().settings.max_concurrent_sandboxes == 7
    with pytest.raises(ValidationError):
        settings.max_concurrent_sandboxes = 2  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="did you mean max_concurrent_sandboxes"):
        default_bridge_service_config(max_concurrent_sandbox=3)
    with pytest.raises(ConfigurationError, match="FORGE_MAX_CONCURRENT_SANDBOXES"):
        default_bridge_service_config(max_concurrent_sandboxes=float("nan"))


@pytest.mark.requirement("B-21", "B-22")
def test_capacity_has_the_ceilings_that_are_named() -> None:
    assert default_bridge_service_config().resource_capacity == ResourceCapacity(
        slots=1, builds=1, pids=2048, memory_bytes=None, cpu_millis=None, disk_bytes=None
    )
    capacity = load_settings(
        environment={
            "FORGE_MAX_CONCURRENT_SANDBOXES": "4",
            "FORGE_SANDBOX_MEMORY_CAPACITY": "8GiB",
            "FORGE_SANDBOX_CPU_CAPACITY_MILLIS": "3500",
        }
    ).settings.resource_capacity
    assert (capacity.slots, capacity.memory_bytes, capacity.cpu_millis) == (4, 2**33, 3500)


@pytest.mark.requirement("B-24")
def test_the_state_root_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_bridge_service_config().sandbox_state_root == tmp_path / "state/forge-bridge"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    expected = tmp_path / ".local/state/forge-bridge"
    assert default_bridge_service_config().sandbox_state_root == expected


@pytest.mark.requirement("B-19", "B-20")
def test_running_needs_a_hub_and_a_trust_domain() -> None:
    with pytest.raises(ConfigurationError) as refused:
        require_to_run(default_bridge_service_config())
    assert [problem.variables for problem in refused.value.problems] == [
        ("FORGE_SERVER_URL",),
        ("FORGE_TRUST_DOMAIN_ID",),
    ]
    require_to_run(
        default_bridge_service_config(server_url="https://hub", trust_domain_id="domain")
    )


@pytest.mark.parametrize(
    ("environment", "warning"),
    [
        (
            {"FORGE_MAX_CONCURENT_SANDBOXES": "4"},
            (
                "FORGE_MAX_CONCURENT_SANDBOXES is not a setting: "
                "did you mean FORGE_MAX_CONCURRENT_SANDBOXES?"
            ),
        ),
        ({"FORGE_COFFEE": "1"}, "FORGE_COFFEE is not a setting: remove it"),
        (
            {"FORGE_SANDBOX_SBOM_EXECUTABLE": "syft"},
            (
                "FORGE_SANDBOX_SBOM_EXECUTABLE only warns without "
                "FORGE_SANDBOX_IMAGE_POLICY_ENFORCED=true"
            ),
        ),
        (
            {"FORGE_SANDBOX_IMAGE_POLICY_FILE": "/etc/forge/policy.yml"},
            (
                "FORGE_SANDBOX_IMAGE_POLICY_FILE has no effect without "
                "FORGE_SANDBOX_VULNERABILITY_EXECUTABLE"
            ),
        ),
        (
            {"FORGE_SERVER_URL": "http://hub.example.org"},
            (
                "FORGE_SERVER_URL: everything, the token included, crosses the network "
                "unencrypted; use https"
            ),
        ),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(environment: dict[str, str], warning: str) -> None:
    assert load_settings(environment=environment).warnings == (warning,)


def test_loopback_hubs_and_variables_of_other_programs_need_no_warning() -> None:
    environment = {
        "FORGE_SERVER_URL": "http://127.0.0.1:8700",
        "FORGE_HUB_DATABASE_URL": "sqlite://",
        "PATH": "/bin",
    }
    assert load_settings(environment=environment).warnings == ()


def _settings_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_environment_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    text = (
        "# a comment\n; another\n\n"
        "FORGE_MAX_CONCURRENT_SANDBOXES=4\n"
        "  FORGE_RUNNER_ID = r\n".replace(" = ", "=")
        + "FORGE_TRUST_DOMAIN_ID='team_a'\n"
        'FORGE_API_TOKEN="a\\"b$c"\n'
        "FORGE_DOCKER_CONTEXT=\nOTHER=1\n"
    )
    path = _settings_file(tmp_path / "bridge.env", text)
    environment = {
        "FORGE_BRIDGE_SETTINGS_FILE": str(path),
        "FORGE_MAX_CONCURRENT_SANDBOXES": "5",
    }
    loaded = load_settings(environment=environment)
    assert loaded.settings.max_concurrent_sandboxes == 5
    assert loaded.settings.runner_id == "r"
    assert loaded.settings.trust_domain_id == "team_a"
    assert loaded.settings.docker_context is None
    assert loaded.settings.api_token == SecretStr('a"b$c')
    assert loaded.origins["FORGE_MAX_CONCURRENT_SANDBOXES"] is Origin.ENVIRONMENT
    assert loaded.origins["FORGE_RUNNER_ID"] is Origin.FILE
    assert loaded.origins["FORGE_DOCKER_CONTEXT"] is Origin.DEFAULT
    assert loaded.warnings == ()
    assert load_settings(path, {}).settings.max_concurrent_sandboxes == 4


@pytest.mark.parametrize(
    "line",
    [
        "FORGE_RUNNER_ID",
        "export FORGE_RUNNER_ID=hunter2",
        "FORGE_RUNNER_ID='hunter2",
        'FORGE_RUNNER_ID="hunter2" # comment',
        "FORGE_RUNNER_ID=hunter2\\",
        "FORGE_RUNNER_ID=a'hunter2'",
        "FORGE_RUNNER_ID=a\nFORGE_RUNNER_ID=hunter2",
    ],
)
def test_a_line_that_two_readers_could_read_differently_is_refused(
    tmp_path: Path, line: str
) -> None:
    path = _settings_file(tmp_path / "bridge.env", f"# first\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"line [23] of") as refused:
        load_settings(path, {})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "mode", "accepted"),
    [
        ("FORGE_RUNNER_ID=r\n", 0o644, True),
        ("FORGE_RUNNER_ID=r\n", 0o664, False),
        ("FORGE_API_TOKEN=hunter2\n", 0o600, True),
        ("FORGE_API_TOKEN=hunter2\n", 0o640, False),
        ("FORGE_API_TOKEN='hunter2'\n", 0o604, False),
        ("FORGE_API_TOKEN=\n", 0o644, True),
    ],
)
def test_a_file_with_the_token_is_private(
    tmp_path: Path, text: str, mode: int, accepted: bool
) -> None:
    path = _settings_file(tmp_path / "bridge.env", text, mode)
    if accepted:
        load_settings(path, {})
        return
    with pytest.raises(ConfigurationError, match=f"run chmod 600 {path}") as refused:
        load_settings(path, {})
    assert "hunter2" not in str(refused.value)


def test_settings_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "large").write_text("#" * 70_000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("fifo", "large", "binary", "missing", "."):
        with pytest.raises(ConfigurationError, match="FORGE_BRIDGE_SETTINGS_FILE"):
            load_settings(tmp_path / name, {})


@pytest.mark.requirement("B-19")
def test_the_token_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = _settings_file(tmp_path / "token", "first\n")
    settings = default_bridge_service_config(api_token_file=path)
    assert read_api_token(settings) == SecretStr("first")
    path.write_text("second\n")
    assert read_api_token(settings) == SecretStr("second")
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_api_token(settings)
    path.chmod(0o600)
    for content in ("", "two words\n"):
        path.write_text(content)
        with pytest.raises(ConfigurationError, match="holds no token") as refused:
            read_api_token(settings)
        assert "two words" not in str(refused.value)
    path.unlink()
    with pytest.raises(ConfigurationError, match="FORGE_API_TOKEN_FILE"):
        read_api_token(settings)


def test_a_token_file_of_another_account_is_refused(tmp_path: Path) -> None:
    require_root("give a file away")
    path = _settings_file(tmp_path / "token", "secret\n")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigurationError, match="belongs to another account"):
        read_api_token(default_bridge_service_config(api_token_file=path))


def test_shown_settings_mask_the_token_and_echo_sizes_in_bytes() -> None:
    environment = {"FORGE_API_TOKEN": "hunter2", "FORGE_SANDBOX_BUILD_MEMORY": "100MB"}
    loaded = load_settings(environment=environment)
    shown = {setting.row.variable: setting for setting in effective_settings(loaded)}
    assert shown["FORGE_API_TOKEN"].text == MASKED
    assert shown["FORGE_SANDBOX_BUILD_MEMORY"].text == "100000000 (≈95.4 MiB)"
    assert shown["FORGE_SANDBOX_BUILDKIT_CACHE_MAX"].text == "21474836480 (20 GiB)"
    for text in (str(settings_json(loaded)), repr(loaded), str(loaded.settings)):
        assert "hunter2" not in text
    assert "hunter2" not in loaded.settings.model_dump_json()


@given(st.dictionaries(st.sampled_from(list(VARIABLES)), st.text(max_size=40), max_size=6))
def test_any_text_is_accepted_or_refused_by_name(environment: dict[str, str]) -> None:
    try:
        load_settings(environment=environment)
    except ConfigurationError as refused:
        for problem in refused.problems:
            assert set(problem.variables) <= set(VARIABLES)
            assert set(problem.variables) & set(environment)
