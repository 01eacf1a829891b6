"""``forge sandbox init``: a contract and, on a base image, a Dockerfile that suit (B-41)."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a starter is made for."""

    PYTHON = "python"
    NODE = "node"
    PHP = "php"
    PLAIN = "plain"
