"""Who may talk to the hub: bearer tokens, of which only digests are kept.

The token file has one line per token, made by ``forge-hub token create``::

    api     <name>                             sha256:<64 hex>
    runner  <runner id or *> <trust domain or *> sha256:<64 hex>

Tokens are 256 random bits, so a plain digest of one tells nothing.  The file is read again when
it changes.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import structlog

from forge_core.errors import RefusedError
from forge_hub.principals import ApiPrincipal, Principal, RunnerPrincipal

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_ID: Final = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
TOKEN_BYTES: Final = 32
_log = structlog.get_logger(__name__)


def digest_of(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def token_line(principal: Principal, token: str) -> str:
    """The line of the token file for a token."""
    if isinstance(principal, ApiPrincipal):
        words = ["api", principal.name]
    else:
        words = ["runner", principal.runner_id or "*", principal.trust_domain_id or "*"]
    return " ".join([*words, f"sha256:{digest_of(token)}"])


def parse_token_file(text: str) -> dict[str, Principal]:
    """Principals by the digest of their token.

    :raises RefusedError: code ``invalid_token_file``, naming the line.
    """
    principals: dict[str, Principal] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        principal = _principal(words[:-1])
        digest = _DIGEST.fullmatch(words[-1])
        if principal is None or digest is None:
            raise RefusedError(
                f"cannot read the token file: line {number} is neither"
                " `api NAME sha256:HEX` nor `runner ID TRUST-DOMAIN sha256:HEX`",
                code="invalid_token_file",
            )
        principals[digest[1]] = principal
    return principals


def _principal(words: list[str]) -> Principal | None:
    match words:
        case ["api", name]:
            return ApiPrincipal(name)
        case ["runner", runner_id, domain] if _ID.fullmatch(runner_id) and _ID.fullmatch(domain):
            return RunnerPrincipal(_or_any(runner_id), _or_any(domain))
    return None


def _or_any(word: str) -> str | None:
    return None if word == "*" else word


class Tokens:
    """Answers who a bearer token belongs to.

    :param fixed: tokens from the settings, with whom they stand for.
    :param path: the token file, or None.

    With neither, everybody may do everything; the settings allow that on loopback only.
    """

    def __init__(self, fixed: Iterable[tuple[str, Principal]], path: Path | None) -> None:
        self._fixed = {digest_of(token): who for token, who in fixed}
        self._path = path
        self._from_file: dict[str, Principal] = {}
        self._seen: tuple[int, int, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return not self._fixed and self._path is None

    async def principal(self, token: str | None) -> Principal | None:
        """Who this is; None: nobody known."""
        if token is None:
            return None
        try:
            await self.load()
        except RefusedError as error:
            _log.error("tokens.unreadable", error=str(error), detail="the last good ones count")
        # The look-up is by digest: how long it takes tells nothing about a token.
        digest = digest_of(token)
        return self._fixed.get(digest) or self._from_file.get(digest)

    async def load(self) -> None:
        """Read the token file if it has changed.

        :raises RefusedError: code ``invalid_token_file``.
        """
        if self._path is not None:
            await anyio.to_thread.run_sync(self._read_if_changed, self._path)

    def _read_if_changed(self, path: Path) -> None:
        try:
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen == self._seen:
                return
            _require_private(path, status.st_mode, status.st_size)
            self._from_file = parse_token_file(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RefusedError(
                f"cannot read the token file {path}: {error}", code="invalid_token_file"
            ) from error
        self._seen = seen


def _require_private(path: Path, mode: int, size_bytes: int) -> None:
    if not stat.S_ISREG(mode) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RefusedError(
            f"cannot trust the token file {path}: it is not a regular file that only its owner"
            f" may change; run chmod 600 {path}",
            code="invalid_token_file",
        )
    if size_bytes > _MAX_FILE_BYTES:
        raise RefusedError(
            f"cannot read the token file {path}: it is larger than {_MAX_FILE_BYTES} bytes",
            code="invalid_token_file",
        )
