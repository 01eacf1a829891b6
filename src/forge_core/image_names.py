"""Labels and names of the images that we build; as for everything else, both must agree.

An image is a *candidate* until it has passed its gates, and *promoted* after: two names, so that
whoever looks at the engine sees which is which.  One whose key another image has got is
*superseded*.  No name of ours is ever taken from one of our images by another: without a name it
could not be told from what others made of it, and nobody would remove it.  The domain is one
that nobody can have (RFC 2606), so that no tool that is given such a name can fetch another image
under it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from forge_core.labels import MANAGED, PREFIX, PROJECT_ID, RUNNER_ID, TRUST_DOMAIN_ID

IMAGE_KEY: Final = f"{PREFIX}image-key"
MANAGED_AS_IMAGE: Final = "image"
"""Not that of containers: one that somebody makes from our image is not ours."""

_REPOSITORY: Final = "forge.invalid/image"
_CANDIDATE: Final = "candidate-"
_SUPERSEDED: Final = "superseded-"


@dataclass(frozen=True, slots=True)
class ImageIdentity:
    """Whose image it is, and of which inputs (:mod:`forge_core.image_key`)."""

    runner_id: str
    trust_domain_id: str
    project_id: str
    image_key: str

    @property
    def labels(self) -> dict[str, str]:
        """Exactly these."""
        return {
            MANAGED: MANAGED_AS_IMAGE,
            RUNNER_ID: self.runner_id,
            TRUST_DOMAIN_ID: self.trust_domain_id,
            PROJECT_ID: self.project_id,
            IMAGE_KEY: self.image_key,
        }

    @property
    def promoted(self) -> str:
        """``name:tag`` after the gates."""
        return f"{self._name}:{self.image_key}"

    def candidate(self, build_id: str) -> str:
        """``name:tag`` before them; one for each build, of 32 hexadecimal digits."""
        return f"{self._name}:{_CANDIDATE}{self.image_key}-{build_id}"

    def superseded(self, image_id: str) -> str:
        """``name:tag`` of the image that had the key before; one for each of them."""
        return f"{self._name}:{_SUPERSEDED}{image_id.removeprefix('sha256:')}"

    def is_passing(self, name: str) -> bool:
        """Whether an image has this name for a while only: as a candidate, or superseded."""
        prefixes = (f"{_CANDIDATE}{self.image_key}", _SUPERSEDED)
        return name.startswith(tuple(f"{self._name}:{prefix}" for prefix in prefixes))

    def is_on(self, inspected: Mapping[str, Any]) -> bool:
        """Whether the engine says that an image carries :attr:`labels`."""
        labels = (inspected.get("Config") or {}).get("Labels") or {}
        return self.labels.items() <= labels.items()

    @property
    def _name(self) -> str:
        # A runner id has letters that no image name may have.
        return f"{_REPOSITORY}-{hashlib.sha256(self.runner_id.encode()).hexdigest()[:24]}"

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> Self | None:
        """Read back :attr:`labels`; None when they are not those of an image of ours."""
        keys = (RUNNER_ID, TRUST_DOMAIN_ID, PROJECT_ID, IMAGE_KEY)
        if labels.get(MANAGED) != MANAGED_AS_IMAGE or not all(key in labels for key in keys):
            return None
        return cls(*(labels[key] for key in keys))


def images_of(runner_id: str) -> dict[str, str]:
    """The labels by which all images of one runner are listed."""
    return {MANAGED: MANAGED_AS_IMAGE, RUNNER_ID: runner_id}
