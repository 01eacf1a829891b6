"""Files of the operator that decide something: read from one descriptor, or refused.

What was checked is what was read; another account could not have changed it, and cannot read it
either where it holds a secret.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from forge_core.errors import RefusedError


class UntrustedFile(RefusedError):  # noqa: N818 - says what is the case
    """The file cannot be used.

    :param wrong: what is wrong with it, beginning with its path or with what was tried.
    :param right: what would be right, as a request.
    """

    def __init__(self, wrong: str, right: str) -> None:
        super().__init__(f"{wrong}; {right}", code="file_untrusted")
        self.wrong = wrong
        self.right = right


def read_trusted_file(path: Path, *, max_bytes: int, private: bool = False) -> bytes:
    """The content of a regular file of this account or root that nobody else may change.

    :param private: nobody else may read it either.
    :raises UntrustedFile: unreadable, too large, of another account, or open to others.
    """
    content, mode = read_with_mode(path, max_bytes=max_bytes)
    if private:
        require_private(path, mode)
    return content


def read_with_mode(path: Path, *, max_bytes: int) -> tuple[bytes, int]:
    """The same, for one who finds out from the content whether it is a secret.

    :raises UntrustedFile: as above.
    """
    try:
        # O_NONBLOCK: a fifo under that name must not hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        right = "make it, or name another file" if missing else "name a readable file"
        raise UntrustedFile(f"cannot open {path}: {error.strerror}", right) from None
    try:
        status = os.fstat(descriptor)
        _require_trusted(path, status)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UntrustedFile(
            f"cannot read {path}: {error.strerror}", "name a readable file"
        ) from None
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise UntrustedFile(f"{path} has more than {max_bytes} bytes", "shorten it")
    return content, status.st_mode


def require_private(path: Path, mode: int) -> None:
    """:raises UntrustedFile: others may read the file."""
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UntrustedFile(
            f"{path} holds a secret and is open to other accounts (mode {mode & 0o777:04o})",
            f"run chmod 600 {path}",
        )


def _require_trusted(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedFile(f"{path} is not a regular file", "name a regular file")
    if status.st_uid not in {0, os.geteuid()}:
        raise UntrustedFile(
            f"{path} belongs to another account (uid {status.st_uid})",
            f"run chown {os.geteuid()} {path}",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFile(f"{path} can be changed by other accounts", f"run chmod 600 {path}")
