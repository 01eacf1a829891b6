"""What may stand in the way of ``sandbox_required``, by name (B-51).

Names of what a runner lacks come out of its own checks and travel in its advertisement; the names
of what a session lacks come out of placement, and again out of the runner's admission.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Blocker(StrEnum):
    """The closed list; a name never changes its meaning."""

    ENGINE = "engine"
    DOCKER_DESKTOP = "docker_desktop"
    ROOTLESS = "rootless"
    TOOLING_IMAGE = "tooling_image"
    CONTAINER = "container"
    USER = "user"
    CAPABILITIES = "capabilities"
    NO_NEW_PRIVILEGES = "no_new_privileges"
    SECCOMP = "seccomp"
    LSM = "lsm"
    READ_ONLY_ROOT = "read_only_root"
    TMPFS = "tmpfs"
    MOUNTS = "mounts"
    NETWORK = "network"
    LIMITS = "limits"
    DISK_QUOTA = "disk_quota"
    IMAGE_POLICY = "image_policy"
    SIGNATURES = "signatures"
    BUILDER = "builder"
    BUILD_EGRESS = "build_egress"
    PUBLICATION_MODE = "publication_mode"
    EGRESS = "egress"

    APPROVED_COMMIT = "approved_commit"
    OPEN_PUBLIC = "open_public"


OF_A_SESSION: Final = frozenset({Blocker.APPROVED_COMMIT, Blocker.OPEN_PUBLIC})
"""No runner can make up for them."""


def session_blockers(*, has_approved_commit: bool, is_open: bool) -> tuple[Blocker, ...]:
    """What a session lacks for ``sandbox_required``.

    :param has_approved_commit: a commit whose contract counts is named (B-52).
    :param is_open: it asks for the network policy ``open_public``, which is developer-only (B-54).
    """
    found = {Blocker.APPROVED_COMMIT: not has_approved_commit, Blocker.OPEN_PUBLIC: is_open}
    return tuple(blocker for blocker, lacks in found.items() if lacks)
