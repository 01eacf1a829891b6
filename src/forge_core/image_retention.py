"""Which cached images and which evidence may go (B-27, B-28, B-89, B-91): pure, oldest first.

Times are wall clock milliseconds.  What seems to come from the future, because the clock was
set back, is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

MAX_EVIDENCE_BYTES: Final = 2 << 30
"""Of all evidence together: of 200 image keys at their largest, attestations alone have 13 GB."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How many are kept whatever their age, and from which age on the others may go."""

    count: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A promoted image.

    :param image_id: ``sha256:…``: the digest that passed the gates, and that runs.
    :param used_at_ms: when an attempt last got it, to the hour.
    """

    image_key: str
    image_id: str
    project_id: str
    built_at_ms: int
    used_at_ms: int


@dataclass(frozen=True, slots=True)
class KeptEvidence:
    """Logs or attestations of one image key, when they were written, and what they take."""

    image_key: str
    written_at_ms: int
    size_bytes: int


def expendable_images(
    images: Iterable[CachedImage],
    *,
    active: Collection[str],
    retention: Retention,
    now_ms: int,
) -> tuple[CachedImage, ...]:
    """The images that pressure may take, in the order in which it should.

    An image goes only when it has expired *and* its project has ``retention.count`` newer ones.

    :param active: keys and ids of the images that attempts hold; they stay.
    """
    newer: Counter[str] = Counter()
    found = []
    for image in sorted(images, key=lambda i: (i.used_at_ms, i.image_key), reverse=True):
        is_active = image.image_key in active or image.image_id in active
        has_expired = now_ms - image.used_at_ms >= retention.ttl_ms
        if newer[image.project_id] >= retention.count and has_expired and not is_active:
            found.append(image)
        newer[image.project_id] += 1
    return tuple(reversed(found))


def expendable_evidence(
    kept: Collection[KeptEvidence],
    *,
    protected: Collection[str],
    retention: Retention,
    now_ms: int,
    max_bytes: int = MAX_EVIDENCE_BYTES,
) -> tuple[KeptEvidence, ...]:
    """What goes, now: beyond the count or the bytes, or expired; oldest first.

    :param protected: the keys of the images that can still run; their evidence stays, and the
        room that it takes is not there for the rest.
    """
    room_bytes = max_bytes - sum(k.size_bytes for k in kept if k.image_key in protected)
    found = []
    newest_first = sorted(kept, key=lambda k: (k.written_at_ms, k.image_key), reverse=True)
    for place, evidence in enumerate(newest_first):
        if evidence.image_key in protected:
            continue
        room_bytes -= evidence.size_bytes
        has_expired = now_ms - evidence.written_at_ms >= retention.ttl_ms
        if place >= retention.count or room_bytes < 0 or has_expired:
            found.append(evidence)
    return tuple(reversed(found))
