"""Tokens, settings, and the command line."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from scripted_bridge import on_stage
from typer.testing import CliRunner

from forge_core.errors import HubRefused, RefusedError
from forge_hub.cli import app
from forge_hub.principals import ApiPrincipal, RunnerPrincipal
from forge_hub.settings import load_settings
from forge_hub.tokens import parse_token_file, token_line


def made_token(path: Path, *options: str) -> str:
    outcome = CliRunner().invoke(app, ["token", "create", "--token-file", str(path), *options])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout.strip()


async def test_tokens_of_the_file_count_at_once_and_only_for_whom_they_are(
    sqlite_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    api = made_token(path, "--role", "api", "--name", "alice")
    async with on_stage(sqlite_url, token_file=path) as stage:
        bound = made_token(path, "--role", "runner", "--name", "r1", "--trust-domain", "td-1")
        headers = {"Authorization": f"Bearer {api}"}
        async with httpx.AsyncClient(base_url=stage.hub.url, headers=headers) as client:
            assert (await client.get("/api/v1/runners")).status_code == 200
        with pytest.raises(HubRefused):
            await stage.connect(token=api)
        bridge = await stage.connect("r1", token=bound)
        assert (await bridge.register(trustDomainId="td-2"))["reason"] == "trust_domain_mismatch"
        assert (await bridge.register(runnerId="r2"))["reason"] == "runner_denied"
        assert (await bridge.register())["accepted"]
        path.write_text("nonsense\n")
        await stage.connect("r1", token=bound)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert bound not in path.read_text()


@pytest.mark.requirement("B-95")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--role", "runner", "--name", "two words"), "a name is one word"),
        (("--role", "api", "--name", "two words"), "a name is one word"),
        (("--role", "runner", "--trust-domain", "a/b"), "trust domain"),
    ],
)
def test_no_token_is_made_for_a_name_that_cannot_be_read_back(
    options: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    outcome = CliRunner().invoke(app, ["token", "create", "--token-file", str(path), *options])
    assert isinstance(outcome.exception, RefusedError)
    assert word in str(outcome.exception)
    assert not path.exists()


@pytest.mark.requirement("B-95")
def test_a_token_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=f"cannot write the token file {tmp_path}"):
        CliRunner().invoke(
            app,
            ["token", "create", "--role", "api", "--token-file", str(tmp_path)],
            catch_exceptions=False,
        )


def test_a_token_line_says_whom_it_is_for() -> None:
    principals: list[ApiPrincipal | RunnerPrincipal] = [
        ApiPrincipal("alice"),
        RunnerPrincipal("r1", "td-1"),
        RunnerPrincipal(),
    ]
    text = "# people\n\n" + "\n".join(token_line(p, str(p)) for p in principals)
    assert list(parse_token_file(text).values()) == principals


@pytest.mark.parametrize("line", ["api", "runner r1 sha256:00", "api a sha256:" + "g" * 64])
def test_a_line_that_is_none_is_named(line: str) -> None:
    with pytest.raises(RefusedError, match="line 2"):
        parse_token_file(f"# first\n{line}")


async def test_a_token_file_that_others_may_change_is_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    made_token(path, "--role", "api")
    path.chmod(0o620)
    with pytest.raises(RefusedError, match="chmod 600"):
        async with on_stage(sqlite_url, token_file=path):
            pass


def test_an_open_hub_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(host="127.0.0.1").is_loopback
    with pytest.raises(RefusedError, match="without tokens"):
        load_settings(host="0.0.0.0")  # noqa: S104
    monkeypatch.setenv("FORGE_HUB_API_TOKEN", "secret-token")
    assert load_settings(host="0.0.0.0").api_token is not None  # noqa: S104
    with pytest.raises(RefusedError, match="FORGE_HUB_PORT") as caught:
        load_settings(port=70_000)
    assert "secret-token" not in str(caught.value)


@pytest.mark.requirement("B-95")
def test_serve_answers_and_stops_on_a_signal(sqlite_url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "FORGE_HUB_API_TOKEN": "t", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "forge_hub", "serve", "--port", "0", "--database"]
    with subprocess.Popen(
        [*command, sqlite_url], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            url = httpx.Response(200, content=line).json()["url"]
            assert httpx.get(f"{url}/readyz").status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()
    assert (tmp_path / "hub.sqlite3").exists()
