"""Logs: JSON lines for machines, readable lines for a terminal, never a secret.

Everything that is logged, the libraries' own lines included, passes the same processors: values
under names that speak of secrets are withheld, known secrets are masked in every text (tracebacks
too), and every value is bounded.  Tracebacks never show local variables.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

from forge_bridge.settings_table import LogFormat, LogLevel
from forge_core.redaction import MAX_SECRETS, Masker

MAX_TEXT_CHARACTERS: Final = 4096
MAX_ITEMS: Final = 64
MAX_DEPTH: Final = 4
MAX_KNOWN_SECRETS: Final = 64
"""A day and more of a token that is replaced every half hour."""

WITHHELD: Final = "[withheld]"

_SECRET_WORDS: Final = frozenset(
    {"authorization", "credential", "credentials", "key", "keys", "mac", "passphrase"}
    | {"password", "secret", "secrets", "token", "tokens", "handle", "cookie"}
)
_HARMLESS_NAMES: Final = frozenset({"image_key", "idempotency_key"})
_INTERNAL: Final = frozenset({"_record", "_from_structlog"})
"""What structlog hands from one of its processors to the next; never rendered."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# What terminals and log viewers would take for a new line or a command.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

Mask = Callable[[str], str]
"""Takes a text and returns it without any known secret."""


def configure_logging(
    log_format: LogFormat = LogFormat.AUTO,
    log_level: LogLevel = LogLevel.INFO,
    *,
    mask: Mask | None = None,
    stream: TextIO | None = None,
) -> None:
    """Set up structlog and the standard library's logging, once, for the process.

    :param mask: removes known secrets from every text; None: there are none yet.
    :param stream: else standard error.
    """
    target = sys.stderr if stream is None else stream
    console = log_format is LogFormat.CONSOLE or (log_format is LogFormat.AUTO and target.isatty())
    level = logging.getLevelNamesMapping()[log_level.value.upper()]
    prepare: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
        Bound(mask),
    ]
    render: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(
            colors=target.isatty() and "NO_COLOR" not in os.environ,
            exception_formatter=structlog.dev.plain_traceback,
            timestamp_key="time",
        )
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False, default=_cut_repr)
    )
    structlog.configure(
        processors=[*prepare, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    _route_libraries(target, max(level, logging.WARNING), prepare, render)


def configure_command_logging(log_format: LogFormat, log_level: LogLevel) -> None:
    """The same for a command: its result says what was done, the log only what was strange."""
    quiet = LogLevel.WARNING if log_level is LogLevel.INFO else log_level
    configure_logging(log_format, quiet)


class KnownSecrets:
    """What this process has used as a secret: the newest :data:`MAX_KNOWN_SECRETS` are masked."""

    def __init__(self) -> None:
        self._secrets: dict[str, None] = {}
        self._masker = Masker(())

    def learn(self, secret: str) -> None:
        """Mask it from now on; what was learnt before stays masked."""
        is_new = secret not in self._secrets
        self._secrets.pop(secret, None)
        self._secrets[secret] = None
        while len(self._secrets) > MAX_KNOWN_SECRETS or sum(map(len, self._secrets)) > MAX_SECRETS:
            del self._secrets[next(iter(self._secrets))]
        if is_new:
            self._masker = Masker(self._secrets)

    def mask(self, text: str) -> str:
        """The text without any of them."""
        return self._masker.mask(text)


class Bound:
    """Processor that withholds, masks and bounds every value of an entry."""

    def __init__(self, mask: Mask | None) -> None:
        self._mask = mask

    def __call__(
        self, _logger: object, _method: str, entry: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {
            self._text(str(name), 128): (
                entry[name] if name in _INTERNAL else self._value(name, entry[name], MAX_DEPTH)
            )
            for name in list(entry)[:MAX_ITEMS]
        }

    def _value(self, name: str, value: Any, depth: int) -> Any:
        if names_a_secret(name):
            return WITHHELD
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)  # JSON has neither NaN nor inf
        if isinstance(value, str):
            return self._text(value, 4 * MAX_TEXT_CHARACTERS if name == "exception" else None)
        if isinstance(value, bytes | bytearray | memoryview):
            return f"<{len(value)} bytes>"
        if depth == 0:
            return "…"
        if isinstance(value, Mapping):
            return {
                self._text(str(key), 128): self._value(str(key), item, depth - 1)
                for key, item in list(value.items())[:MAX_ITEMS]
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self._value("", item, depth - 1) for item in list(value)[:MAX_ITEMS]]
        return self._text(_cut_repr(value))

    def _text(self, text: str, limit: int | None = None) -> str:
        # Mask before cutting: half a secret is no longer recognised.
        masked = text if self._mask is None else self._mask(text)
        return _cut(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", masked), limit)


def names_a_secret(name: str) -> bool:
    """Whether a value of this name is never logged, whatever it is."""
    if name in _HARMLESS_NAMES:
        return False
    return not _SECRET_WORDS.isdisjoint(word.lower() for word in _WORD.findall(name))


def _cut(text: str, limit: int | None = None) -> str:
    most = MAX_TEXT_CHARACTERS if limit is None else limit
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _cut_repr(value: object) -> str:
    return _cut(repr(value))


def _route_libraries(
    stream: TextIO,
    level: int,
    prepare: list[structlog.typing.Processor],
    render: structlog.typing.Processor,
) -> None:
    """Send the standard library's log records through the same processors."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *prepare],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
