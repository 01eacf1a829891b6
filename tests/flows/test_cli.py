"""``forge-bridge`` as a person or a script uses it: a real process, its streams and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_bridge import __version__
from forge_bridge.settings import VARIABLES

BRIDGE = (sys.executable, "-m", "forge_bridge")


def bridge(
    *arguments: str, cwd: str | Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line with nothing of ours in its environment but ``environment``."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [*BRIDGE, *arguments],
        env=kept | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What the command line prints to a terminal."""
    ours, theirs = pty.openpty()
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    process = subprocess.Popen(
        [*BRIDGE, *arguments],
        env={"TERM": "xterm-256color", "COLUMNS": "100"} | kept | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = bytearray()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                piece = terminal.read(65_536)
            except OSError:  # EIO: the last writer is gone (pty(7))
                break
            if not piece:
                break
            output += piece
    assert process.wait(timeout=60) == 0
    return output.decode()


@pytest.mark.requirement("B-40")
def test_version_and_help_answer() -> None:
    assert bridge("version").stdout == f"forge-bridge {__version__}\n"
    assert bridge("--version").stdout == f"forge-bridge {__version__}\n"
    assert json.loads(bridge("version", "--json").stdout)["version"] == __version__
    help_text = bridge("--help").stdout
    for command in ("run", "config", "status", "add-repo", "remove-repo", "list-repos"):
        assert f"  {command}" in help_text
        assert bridge(command, "--help").returncode == 0


def test_version_imports_nothing_that_it_does_not_need() -> None:
    seen = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "forge_bridge", "version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in seen.stderr.splitlines()}
    heavy = {"pydantic_settings", "docker", "aiohttp", "websockets", "anyio", "structlog"}
    assert imported & {"typer", "forge_bridge.cli"} == {"typer", "forge_bridge.cli"}
    assert not imported & (heavy | {"cryptography", "rich", "asyncio"})


@pytest.mark.parametrize("arguments", [("run",), ()])
def test_running_without_what_it_needs_says_everything_that_is_missing(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    ended = bridge(*arguments, FORGE_SANDBOX_STATE_ROOT=str(tmp_path / "state"))
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "error: cannot use the settings:\n"
        "  FORGE_SERVER_URL: it is not set; set it to the hub's base URL\n"
        "  FORGE_TRUST_DOMAIN_ID: it is not set; set it to the trust domain of the projects\n"
    )


def test_config_shows_values_origins_and_no_secret(tmp_path: Path) -> None:
    settings_file = tmp_path / "bridge.env"
    settings_file.write_text("FORGE_API_TOKEN=hunter2\nFORGE_SANDBOX_BUILD_MEMORY=100MB\n")
    settings_file.chmod(0o600)
    arguments = ("config", "--settings", str(settings_file))
    environment = {
        "FORGE_MAX_CONCURRENT_SANDBOXES": "3",
        "FORGE_RUNNERID": "x",
        "FORGE_SERVER_URL": "http://localhost:8080",
        "FORGE_TRUST_DOMAIN_ID": "domain",
    }
    plain = bridge(*arguments, **environment)
    assert plain.returncode == 0
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in plain.stdout.splitlines()}
    assert set(VARIABLES) <= set(rows)
    assert rows["FORGE_API_TOKEN"].split() == ["********", "file"]
    assert rows["FORGE_SANDBOX_BUILD_MEMORY"].split() == ["100000000", "(≈95.4", "MiB)", "file"]
    assert rows["FORGE_MAX_CONCURRENT_SANDBOXES"].split() == ["3", "environment"]
    assert rows["FORGE_SANDBOX_PID_CAPACITY"].split() == ["2048", "default"]
    assert plain.stderr == (
        "warning: FORGE_RUNNERID is not a setting: did you mean FORGE_RUNNER_ID?\n"
    )
    parsed = json.loads(bridge(*arguments, "--json", **environment).stdout)
    assert parsed["settings"]["FORGE_SANDBOX_BUILD_MEMORY"] == {
        "value": 100_000_000,
        "origin": "file",
    }
    assert list(parsed["settings"]) == list(VARIABLES)
    assert "hunter2" not in plain.stdout + plain.stderr + json.dumps(parsed)


def test_config_says_all_that_keeps_a_bridge_from_starting(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("two words")
    token.chmod(0o600)
    plain = bridge("config", FORGE_API_TOKEN_FILE=str(token))
    assert plain.returncode == 1
    assert "FORGE_API_TOKEN_FILE" in plain.stdout
    named = [line.split(": ")[1] for line in plain.stderr.splitlines()]
    assert named == ["FORGE_SERVER_URL", "FORGE_TRUST_DOMAIN_ID", "FORGE_API_TOKEN_FILE"]
    parsed = bridge("config", "--json", FORGE_API_TOKEN_FILE=str(token))
    assert parsed.returncode == 1
    assert len(json.loads(parsed.stdout)["problems"]) == 3
    started = bridge("run", FORGE_API_TOKEN_FILE=str(token), FORGE_SANDBOX_STATE_ROOT="/nowhere")
    assert started.returncode == 2
    assert started.stderr.count("  FORGE_") == 3
    refused = bridge("config", FORGE_MAX_CONCURRENT_SANDBOXES="none")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("  FORGE_") == 3


def test_the_settings_file_may_be_named_before_the_command_or_by_the_environment(
    tmp_path: Path,
) -> None:
    settings_file = tmp_path / "bridge.env"
    settings_file.write_text("FORGE_RUNNER_ID=from-file\n")
    for arguments, environment in (
        (("--settings", str(settings_file), "config"), {}),
        (("config",), {"FORGE_BRIDGE_SETTINGS_FILE": str(settings_file)}),
    ):
        assert "from-file" in bridge(*arguments, **environment).stdout


def test_errors_are_sentences_and_never_tracebacks(tmp_path: Path) -> None:
    root = {"FORGE_SANDBOX_STATE_ROOT": str(tmp_path / "state")}
    wrong = bridge("config", FORGE_SANDBOX_BUILD_MEMORY="512")
    assert wrong.returncode == 2
    assert "FORGE_SANDBOX_BUILD_MEMORY: '512' cannot be used: it has no unit" in wrong.stderr
    assert bridge("nonsense").returncode == 2
    assert bridge("add-repo", "name").returncode == 2
    no_repository = bridge("add-repo", "name", str(tmp_path), **root)
    assert no_repository.returncode == 1
    assert no_repository.stderr.startswith(f"error: cannot add {tmp_path}: it is not a Git")
    bad_name = bridge("remove-repo", "../name", **root)
    assert bad_name.returncode == 2
    (tmp_path / "state").chmod(0o755)
    open_root = bridge("remove-repo", "name", **root)
    assert open_root.returncode == 1
    assert f"chmod 700 {tmp_path}/state" in open_root.stderr
    for ended in (wrong, no_repository, bad_name, open_root):
        assert ended.stdout == ""
        assert "Traceback" not in ended.stderr


@pytest.mark.requirement("B-40")
def test_repositories_are_added_listed_and_removed(tmp_path: Path) -> None:
    root = {"FORGE_SANDBOX_STATE_ROOT": str(tmp_path / "state")}
    clone = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", str(clone)], check=True, timeout=60)
    assert bridge("list-repos", **root).stdout.startswith("no repositories")
    added = bridge("add-repo", "Forge", ".", cwd=clone, **root)
    assert (added.returncode, added.stdout) == (0, f"added Forge {clone}\n")
    again = bridge("add-repo", "Forge", str(clone), **root)
    assert (again.returncode, again.stdout) == (0, f"already there: Forge {clone}\n")
    remote = "https://example.org/forge.git"
    listed = json.loads(bridge("list-repos", "--json", **root).stdout)
    assert listed == {"Forge": {"path": str(clone), "remote": None}}
    named = bridge("add-repo", "Forge", str(clone), "--remote", remote, **root)
    assert named.stdout.splitlines()[1] == f"its results can be pushed to {remote}"
    row = bridge("list-repos", **root).stdout.splitlines()[1].split()
    assert row == ["Forge", str(clone), remote]
    refused = bridge("add-repo", "Forge", str(clone), "--remote", "ssh://example.org/x", **root)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "it is not https://HOST/PATH" in refused.stderr
    assert bridge("remove-repo", "Forge", **root).stdout == "removed Forge\n"
    assert bridge("remove-repo", "Forge", **root).stdout == "was not there: Forge\n"
    assert bridge("list-repos", "--json", **root).stdout == "{}\n"


def test_the_parents_of_a_chosen_state_root_are_never_made(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", str(clone)], check=True, timeout=60)
    mistyped = tmp_path / "mistyped/state"
    refused = bridge("add-repo", "a", str(clone), FORGE_SANDBOX_STATE_ROOT=str(mistyped))
    assert refused.returncode == 1
    assert f"mkdir -p {mistyped.parent}" in refused.stderr
    assert not mistyped.parent.exists()
    home = tmp_path / "home"
    home.mkdir()
    assert bridge("add-repo", "a", str(clone), HOME=str(home)).returncode == 0
    assert (home / ".local/state/forge-bridge").stat().st_mode & 0o777 == 0o700


def test_a_terminal_gets_a_table_and_no_color_is_honoured(tmp_path: Path) -> None:
    root = {
        "FORGE_SANDBOX_STATE_ROOT": str(tmp_path),
        "FORGE_SERVER_URL": "http://localhost:8080",
        "FORGE_TRUST_DOMAIN_ID": "domain",
    }
    coloured = on_a_terminal("config", **root)
    assert "\x1b[1m" in coloured
    assert "FORGE_SANDBOX_STATE_ROOT" in coloured
    assert "\x1b[3" not in on_a_terminal("config", NO_COLOR="1", **root)
    assert "\x1b" not in bridge("config", **root).stdout


def test_shell_completion_is_offered(tmp_path: Path) -> None:
    completed = bridge(
        _FORGE_BRIDGE_COMPLETE="complete_bash", COMP_WORDS="forge-bridge re", COMP_CWORD="1"
    )
    assert completed.stdout.split() == ["remove-repo"]


@pytest.mark.requirement("B-41")
def test_the_doctor_says_what_it_could_not_look_at(tmp_path: Path) -> None:
    socket = f"unix://{tmp_path}/no-engine.sock"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DOCKER_HOST": socket}
    command = [sys.executable, "-c", "from forge_cli.main import main; main()"]
    plain, for_programs = (
        subprocess.run(
            [*command, "sandbox", "doctor", *option],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for option in ((), ("--json",))
    )
    assert plain.returncode == 2
    assert f"cannot reach the Docker Engine at {socket}" in plain.stdout
    assert "sandbox_required: not ready (" in plain.stdout
    blockers = re.search(r"not ready \((.*)\)", plain.stdout)
    assert blockers is not None
    to_mend = plain.stdout.partition("to mend")[2]
    for name in blockers[1].split(", "):
        assert re.search(rf"^{name} +\S", to_mend, re.MULTILINE), name
    found = json.loads(for_programs.stdout)
    assert (for_programs.returncode, found["exitCode"]) == (2, 2)
    engine = next(check for check in found["checks"] if check["id"] == "engine")
    assert (engine["verdict"], engine["looked"]) == ("block_all", False)
    assert engine["remedy"]
    assert found["capabilities"]["sandboxRequired"]["ready"] is False
    assert plain.stderr + for_programs.stderr == ""
