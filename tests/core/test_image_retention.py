"""What may go of images and evidence, and what never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.image_retention import (
    MAX_EVIDENCE_BYTES,
    CachedImage,
    KeptEvidence,
    Retention,
    expendable_evidence,
    expendable_images,
)

DAY_MS = 86_400_000
NOW_MS = 100 * DAY_MS
KEEP = Retention(count=3, ttl_ms=7 * DAY_MS)
EVIDENCE = Retention(count=200, ttl_ms=30 * DAY_MS)


def image(key: str, days: float, project: str = "project") -> CachedImage:
    """Last used so many days ago."""
    used_at_ms = NOW_MS - int(days * DAY_MS)
    return CachedImage(key, f"sha256:{key}", project, used_at_ms, used_at_ms)


def going(*images: CachedImage, active: tuple[str, ...] = ()) -> list[str]:
    found = expendable_images(images, active=active, retention=KEEP, now_ms=NOW_MS)
    return [one.image_key for one in found]


@pytest.mark.requirement("B-27", "B-89")
def test_only_expired_images_beyond_the_count_go_and_the_oldest_first() -> None:
    old = [image(f"{days:02}", days) for days in (8, 30, 9, 12, 20)]
    assert going(*old) == ["30", "20"]
    assert going(*old[:3]) == []
    assert going(*(image(str(n), 6.9) for n in range(9))) == []


@pytest.mark.requirement("B-27")
def test_each_project_has_a_count_of_its_own() -> None:
    many = [image(f"a{n}", 8 + n, "a") for n in range(4)]
    few = [image(f"b{n}", 50 + n, "b") for n in range(3)]
    assert going(*many, *few) == ["a3"]


@pytest.mark.requirement("B-89")
def test_what_an_attempt_holds_stays_by_its_key_and_by_its_digest() -> None:
    old = [image(str(days), days) for days in (8, 9, 10, 11, 12)]
    assert going(*old, active=("12", "sha256:11")) == []


def test_a_clock_that_was_set_back_expires_nothing() -> None:
    assert going(*(image(str(n), -400 - n) for n in range(9))) == []


images = st.builds(
    image, st.uuids().map(lambda u: u.hex), st.floats(-5, 50), st.sampled_from(["a", "b", "c"])
)


@given(st.lists(images, unique_by=lambda i: i.image_key, max_size=20), st.data())
def test_the_newest_of_each_project_and_the_active_ones_always_stay(
    cache: list[CachedImage], data: st.DataObject
) -> None:
    active = data.draw(st.sets(st.sampled_from([i.image_key for i in cache]))) if cache else set()
    gone = expendable_images(cache, active=active, retention=KEEP, now_ms=NOW_MS)
    assert [i.used_at_ms for i in gone] == sorted(i.used_at_ms for i in gone)
    assert not active & {i.image_key for i in gone}
    assert all(NOW_MS - i.used_at_ms >= KEEP.ttl_ms for i in gone)
    for project in {i.project_id for i in cache}:
        mine = [i for i in cache if i.project_id == project]
        assert len([i for i in mine if i not in gone]) >= min(KEEP.count, len(mine))


def evidence(key: str, days: float, size_bytes: int = 1) -> KeptEvidence:
    return KeptEvidence(key, NOW_MS - int(days * DAY_MS), size_bytes)


def dropped(*kept: KeptEvidence, protected: tuple[str, ...] = (), **bounds: int) -> list[str]:
    found = expendable_evidence(
        kept, protected=protected, retention=EVIDENCE, now_ms=NOW_MS, **bounds
    )
    return [one.image_key for one in found]


@pytest.mark.requirement("B-28", "B-91")
def test_evidence_goes_beyond_the_count_or_when_it_has_expired() -> None:
    assert dropped(evidence("new", 29), evidence("old", 31), evidence("older", 40)) == [
        "older",
        "old",
    ]
    many = [evidence(f"{n:03}", n / 100) for n in range(202)]
    assert dropped(*many) == ["201", "200"]


@pytest.mark.requirement("B-28", "B-91")
def test_evidence_of_an_image_that_can_run_stays() -> None:
    assert dropped(evidence("a", 90), evidence("b", 91), protected=("a",)) == ["b"]


@pytest.mark.requirement("B-28", "B-91")
def test_evidence_goes_beyond_the_bytes_the_oldest_first() -> None:
    kept = [evidence("a", 1, 40), evidence("b", 2, 60), evidence("c", 3, 1), evidence("d", 4, 0)]
    assert dropped(*kept, max_bytes=101) == []
    assert dropped(*kept, max_bytes=100) == ["d", "c"]
    assert dropped(*kept, max_bytes=99) == ["d", "c", "b"]
    whole = MAX_EVIDENCE_BYTES
    assert dropped(evidence("a", 1, whole), evidence("b", 2, 1)) == ["b"]


@pytest.mark.requirement("B-28", "B-91")
def test_evidence_of_an_image_that_can_run_takes_its_bytes_first() -> None:
    kept = [evidence("new", 1, 30), evidence("older", 2, 30), evidence("usable", 90, 70)]
    assert dropped(*kept, protected=("usable",), max_bytes=100) == ["older"]
    assert dropped(*kept, protected=("usable",), max_bytes=10) == ["older", "new"]


kept_evidence = st.builds(
    evidence, st.uuids().map(lambda u: u.hex), st.floats(-5, 29), st.integers(0, 100)
)


@given(st.lists(kept_evidence, unique_by=lambda k: k.image_key, max_size=20), st.data())
def test_what_stays_fits_and_no_older_one_stays_in_place_of_a_newer(
    kept: list[KeptEvidence], data: st.DataObject
) -> None:
    usable = data.draw(st.sets(st.sampled_from([k.image_key for k in kept]))) if kept else set()
    gone = set(dropped(*kept, protected=tuple(usable), max_bytes=300))
    assert not gone & usable
    rest = [k for k in kept if k.image_key not in usable]
    staying = [k for k in rest if k.image_key not in gone]
    taken_bytes = sum(k.size_bytes for k in kept if k.image_key in usable)
    assert sum(k.size_bytes for k in staying) <= max(0, 300 - taken_bytes)
    for one in staying:
        assert all(k.written_at_ms <= one.written_at_ms for k in rest if k.image_key in gone)
