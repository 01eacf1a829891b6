"""Labels and names of everything that the engine holds for us (sandbox.md, Labels).

A resource is ours only when its labels *and* the name derived from them agree: another user
of the engine can carry our labels, so a label alone never justifies a removal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from forge_core.wire.base import ID_PATTERN, MAX_INT

MANAGED: Final = "dev.forge.managed"
MANAGED_BY_BRIDGE: Final = "bridge"
RUNNER_ID: Final = "dev.forge.runner-id"
INSTANCE_ID: Final = "dev.forge.runner-instance-id"
ATTEMPT_ID: Final = "dev.forge.attempt-id"
FENCE: Final = "dev.forge.fence"
ROLE: Final = "dev.forge.role"
PROJECT_ID: Final = "dev.forge.project-id"
TRUST_DOMAIN_ID: Final = "dev.forge.trust-domain-id"
PREFIX: Final = "dev.forge."
PREFLIGHT: Final = "preflight"
TOOLING: Final = "tooling"
BUILDER: Final = "builder"
BUILD_CACHE: Final = "build-cache"
_OF_RUNNER: Final = frozenset({PREFLIGHT, TOOLING, BUILDER})
"""What a runner makes for itself, not for a dispatch."""
NO_DISPATCH: Final = 0
"""The fence of it: no hub can send one, whatever ids it makes up (fences count from 1)."""

Key = tuple[str, int]
"""An attempt id and a fence: one dispatch."""

_ID_LABELS: Final = (RUNNER_ID, INSTANCE_ID, ATTEMPT_ID, PROJECT_ID, TRUST_DOMAIN_ID)
_ID: Final = re.compile(ID_PATTERN)
_ROLE: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose resource it is: one dispatch of one attempt to one runner instance."""

    runner_id: str
    runner_instance_id: str
    attempt_id: str
    fence: int
    project_id: str
    trust_domain_id: str

    @property
    def key(self) -> Key:
        """The dispatch that it is."""
        return self.attempt_id, self.fence

    def labels(self, role: str) -> dict[str, str]:
        """Exactly the labels of sandbox.md."""
        return {
            MANAGED: MANAGED_BY_BRIDGE,
            RUNNER_ID: self.runner_id,
            INSTANCE_ID: self.runner_instance_id,
            ATTEMPT_ID: self.attempt_id,
            FENCE: str(self.fence),
            ROLE: role,
            PROJECT_ID: self.project_id,
            TRUST_DOMAIN_ID: self.trust_domain_id,
        }

    def name(self, role: str) -> str:
        """The deterministic name: a create that timed out and happened later is found by it."""
        return name_from_labels(self.labels(role))

    @classmethod
    def of_runner(
        cls, purpose: str, runner_id: str, runner_instance_id: str, trust_domain_id: str
    ) -> Self:
        """Whose resource it is when the runner needs it itself.

        :param purpose: :data:`PREFLIGHT`, the probe's; :data:`TOOLING`, what PID 1 runs from;
            :data:`BUILDER`, where images are built.
        """
        assert purpose in _OF_RUNNER, purpose
        return cls(runner_id, runner_instance_id, purpose, NO_DISPATCH, purpose, trust_domain_id)

    @property
    def is_runner(self) -> bool:
        """No dispatch of a hub, so that none can be told of it."""
        return (
            self.fence == NO_DISPATCH
            and self.attempt_id == self.project_id
            and self.attempt_id in _OF_RUNNER
        )

    @property
    def is_lasting(self) -> bool:
        """Lives as long as the instance that made it."""
        return self.is_runner and self.attempt_id in {TOOLING, BUILDER}

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> Self | None:
        """Read back :meth:`labels`; None when any is missing or ill-formed."""
        try:
            if labels[MANAGED] != MANAGED_BY_BRIDGE:
                return None
            fence = labels[FENCE]
            if not fence.isascii() or not fence.isdecimal() or fence != str(int(fence)):
                return None
            ids = [labels[key] for key in _ID_LABELS]
            if not all(map(_ID.match, ids)) or not NO_DISPATCH <= int(fence) <= MAX_INT:
                return None
        except (KeyError, ValueError):
            return None
        runner_id, instance_id, attempt_id, project_id, trust_domain_id = ids
        owner = cls(runner_id, instance_id, attempt_id, int(fence), project_id, trust_domain_id)
        return owner if owner.fence > NO_DISPATCH or owner.is_runner else None


def name_from_labels(labels: Mapping[str, str]) -> str:
    """``forge-<role>-<digest of the whole key>``; no two keys share their encoding."""
    role = labels[ROLE]
    keys = (RUNNER_ID, INSTANCE_ID, ATTEMPT_ID, FENCE, ROLE, PROJECT_ID, TRUST_DOMAIN_ID)
    material = json.dumps([labels[key] for key in keys])
    return f"forge-{role}-{hashlib.sha256(material.encode()).hexdigest()[:24]}"


def build_cache(runner_id: str, trust_domain_id: str) -> tuple[str, dict[str, str]]:
    """Name and labels of the volume that keeps a runner's build cache.

    It outlives instances, so it is nobody's in the sense of :class:`Owner` and no pass removes it.
    """
    labels = {
        MANAGED: MANAGED_BY_BRIDGE,
        RUNNER_ID: runner_id,
        ROLE: BUILD_CACHE,
        TRUST_DOMAIN_ID: trust_domain_id,
    }
    material = json.dumps([runner_id, BUILD_CACHE, trust_domain_id])
    return f"forge-{BUILD_CACHE}-{hashlib.sha256(material.encode()).hexdigest()[:24]}", labels


def is_ours(name: str, labels: Mapping[str, str]) -> bool:
    """Whether labels and name agree, so that the resource may be touched."""
    return name == name_of(labels)


def name_of(labels: Mapping[str, str]) -> str | None:
    """The name of what carries these labels; None: they are none of ours."""
    if Owner.from_labels(labels) is None or _ROLE.match(labels.get(ROLE, "")) is None:
        return None
    return name_from_labels(labels)


def runner_filter(runner_id: str) -> dict[str, str]:
    """The labels by which everything of one runner is listed."""
    return {MANAGED: MANAGED_BY_BRIDGE, RUNNER_ID: runner_id}


def attempt_filter(owner: Owner) -> dict[str, str]:
    """The labels by which everything of one dispatch is listed."""
    labels = owner.labels("")
    del labels[ROLE]
    return labels
