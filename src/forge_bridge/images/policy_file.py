"""The vulnerability policy, read anew whenever an image is judged (B-30)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forge_core.errors import RefusedError
from forge_core.vulnerability_policy import (
    MAX_POLICY_BYTES,
    PolicyInvalid,
    VulnerabilityPolicy,
    read_policy,
)
from forge_edges.trusted_file import UntrustedFile, read_trusted_file

VARIABLE: Final = "FORGE_SANDBOX_IMAGE_POLICY_FILE"


def load_policy(path: Path | None, *, today: str) -> VulnerabilityPolicy:
    """The policy in force; without a file, the defaults; blocks.

    :param today: ``YYYY-MM-DD…`` in UTC.
    :raises RefusedError: code ``configuration``: unreadable, changeable by others, or invalid.
    """
    if path is None:
        return VulnerabilityPolicy()
    try:
        return read_policy(read_trusted_file(path, max_bytes=MAX_POLICY_BYTES), today=today)
    except (UntrustedFile, PolicyInvalid) as error:
        raise RefusedError(
            f"cannot use the image policy {path}: {error}", code="configuration", field=VARIABLE
        ) from None
