"""Logs: one form for everything, nothing secret, everything bounded."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from forge_bridge import app
from forge_bridge.logs import (
    MAX_KNOWN_SECRETS,
    MAX_TEXT_CHARACTERS,
    Bound,
    KnownSecrets,
    configure_logging,
    names_a_secret,
)
from forge_bridge.settings import BridgeSettings, LogFormat, LogLevel, default_bridge_service_config
from forge_core.errors import ForgeError, RefusedError
from forge_edges.signalr import SignalRConnectionFactory
from forge_edges.signalr_settings import LearnSecret

SECRET = "hunter2-hunter2"


def mask(text: str) -> str:
    return text.replace(SECRET, "***")


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def logged(log_format: LogFormat = LogFormat.JSON, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(log_format, level, mask=mask, stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_entry_is_one_line_of_json_with_time_and_level() -> None:
    stream = logged()
    structlog.get_logger().info("attempt started", attempt_id="a1", fence=7, ratio=0.5, none=None)
    structlog.get_logger().debug("not shown")
    (entry,) = lines(stream)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "event": "attempt started",
        "level": "info",
        "attempt_id": "a1",
        "fence": 7,
        "ratio": 0.5,
        "none": None,
    }


def test_secrets_are_masked_in_every_place_and_withheld_under_their_names() -> None:
    stream = logged()
    log = structlog.get_logger()
    log.info(
        f"cannot use {SECRET}",
        api_token="x1",
        leaseKey="x2",
        headers={"Authorization": "x3", "Accept": SECRET},
        argv=["git", f"https://u:{SECRET}@h"],
        raw=SECRET.encode(),
        image_key="shown",
    )
    try:
        raise ValueError(f"bad {SECRET}")
    except ValueError:
        log.exception("failed")
    with structlog.contextvars.bound_contextvars(session=SECRET):
        log.info("bound")
    text = stream.getvalue()
    assert SECRET not in text
    assert not any(f'"{hidden}"' in text for hidden in ("x1", "x2", "x3"))
    first, second, third = lines(stream)
    assert first["event"] == "cannot use ***"
    assert first["headers"] == {"Authorization": "[withheld]", "Accept": "***"}
    assert first["raw"] == "<15 bytes>"
    assert first["image_key"] == "shown"
    assert "ValueError: bad ***" in second["exception"]
    assert third["session"] == "***"


def test_tracebacks_never_show_local_variables() -> None:
    for log_format in (LogFormat.JSON, LogFormat.CONSOLE):
        stream = logged(log_format)
        password_of_nobody = "local-value"
        try:
            raise RuntimeError(str(len(password_of_nobody)))
        except RuntimeError:
            structlog.get_logger().exception("failed")
        shown = stream.getvalue().replace('password_of_nobody = "local-value"', "")
        assert "RuntimeError: 11" in shown
        assert "local-value" not in shown


def test_values_are_bounded_in_length_depth_and_number() -> None:
    stream = logged()
    deep: Any = "x"
    for _ in range(50):
        deep = {"a": deep}
    structlog.get_logger().info("e", long="y" * 10**6, many=list(range(10**5)), deep=deep)
    assert len(stream.getvalue()) < 10_000
    (entry,) = lines(stream)
    assert entry["long"].endswith(f"… ({10**6} characters)")
    assert len(entry["long"]) < MAX_TEXT_CHARACTERS + 50


def test_a_secret_across_the_cut_is_masked_all_the_same() -> None:
    stream = logged()
    structlog.get_logger().info("e", text="y" * (MAX_TEXT_CHARACTERS - 5) + SECRET)
    assert SECRET[:5] not in stream.getvalue()


def test_every_token_of_this_life_is_masked_also_after_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [f"token-{number}-{SECRET}" for number in range(3)]
    token_file = tmp_path / "token"

    def write(token: str) -> None:
        token_file.write_text(token)
        token_file.chmod(0o600)

    def refuse() -> None:
        raise RefusedError("enough", code="enough")

    @asynccontextmanager
    async def open_bridge(settings: BridgeSettings, *, learn: LearnSecret) -> AsyncIterator[None]:
        """Tries to connect with each token, and tells all of them."""
        factory = SignalRConnectionFactory(app.signalr_settings(settings, learn))
        for token in tokens[1:]:
            write(token)
            async with anyio.create_task_group() as tasks:
                with pytest.raises(ForgeError):
                    await factory.create(tasks).start()
        structlog.get_logger().error("the hub says", detail=" and ".join(tokens))
        refuse()
        yield

    write(tokens[0])
    monkeypatch.setattr(app, "open_bridge", open_bridge)
    settings = default_bridge_service_config(
        server_url="http://127.0.0.1:9", api_token_file=token_file, log_format=LogFormat.JSON
    )
    with pytest.raises(RefusedError, match="enough"):
        app.run_bridge(settings)
    (entry,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert entry["detail"] == "*** and *** and ***"


def test_as_many_secrets_are_known_as_there_is_room_for_and_the_newest() -> None:
    known = KnownSecrets()
    secrets = [f"secret-number-{number:06d}" for number in range(MAX_KNOWN_SECRETS + 2)]
    for secret in secrets[:-1]:
        known.learn(secret)
        known.learn(secrets[0])
    known.learn(secrets[-1])
    shown = [known.mask(secret) for secret in secrets]
    assert shown[0] == shown[-1] == "***"
    assert shown.count("***") == MAX_KNOWN_SECRETS
    assert shown[1:3] == secrets[1:3]


def test_libraries_speak_through_the_same_processors_from_warning_on() -> None:
    stream = logged(level=LogLevel.DEBUG)
    logging.getLogger("websockets.client").info("> Authorization: Bearer %s", SECRET)
    logging.getLogger("websockets.client").warning("cannot reach %s", SECRET)
    (entry,) = lines(stream)
    assert entry["logger"] == "websockets.client"
    assert entry["event"] == "cannot reach ***"


def test_a_terminal_is_not_commanded_by_what_is_logged() -> None:
    stream = logged(LogFormat.CONSOLE)
    structlog.get_logger().info("agent said \x1b]0;owned\x07\x1b[2J", text="a\r\x9bb")
    assert not set(stream.getvalue()) & set("\x1b\x07\r\x9b")


@pytest.mark.parametrize("name", ["token", "API_TOKEN", "leaseKey", "secretHandle", "x-auth-mac"])
def test_names_that_speak_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ["event", "image_key", "monkey", "tokenizer", "machine", "hockey"])
def test_names_that_do_not(name: str) -> None:
    assert not names_a_secret(name)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1), _values, max_size=8), st.text())
def test_anything_can_be_logged_and_no_secret_comes_out(entry: dict[str, Any], around: str) -> None:
    entry["_text"] = [f"{around}{SECRET}{around}", {around: SECRET}]
    shown = Bound(mask)(None, "info", entry)
    assert SECRET not in json.dumps(shown, ensure_ascii=False, allow_nan=False)
