"""What an image of ours is called, and how it is told from others."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.image_names import ImageIdentity, images_of
from forge_core.labels import MANAGED, Owner

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", fullmatch=True)
keys = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)
identities = st.builds(ImageIdentity, ids, ids, ids, keys)
REFERENCE = re.compile(r"forge\.invalid/[a-z0-9][a-z0-9-]*:[a-z0-9][a-z0-9-]{0,127}")

BUILD = "0" * 32


@pytest.mark.requirement("B-27")
@given(identities)
def test_labels_read_back(identity: ImageIdentity) -> None:
    assert ImageIdentity.from_labels(identity.labels) == identity
    assert images_of(identity.runner_id).items() <= identity.labels.items()


@given(identities)
def test_names_are_references_that_no_registry_serves(identity: ImageIdentity) -> None:
    assert REFERENCE.fullmatch(identity.promoted)
    assert REFERENCE.fullmatch(identity.candidate(BUILD))


@pytest.mark.requirement("B-89")
@given(identities)
def test_each_build_has_a_name_that_is_known_for_what_it_is(identity: ImageIdentity) -> None:
    candidates = {identity.candidate(BUILD), identity.candidate("1" * 32)}
    assert len(candidates) == 2
    superseded = identity.superseded(f"sha256:{identity.image_key}")
    assert all(map(identity.is_passing, (*candidates, superseded)))
    assert not identity.is_passing(identity.promoted)


@given(identities, identities)
def test_runners_never_share_a_name(one: ImageIdentity, other: ImageIdentity) -> None:
    same = (one.runner_id, one.image_key) == (other.runner_id, other.image_key)
    names = [{i.promoted, i.candidate(BUILD)} for i in (one, other)]
    assert (set.intersection(*names) != set()) == same


@pytest.mark.requirement("B-80")
@given(identities)
def test_a_container_made_from_an_image_is_not_taken_for_ours(identity: ImageIdentity) -> None:
    assert Owner.from_labels(identity.labels) is None
    for label in identity.labels:
        rest = {key: value for key, value in identity.labels.items() if key != label}
        assert ImageIdentity.from_labels(rest) is None
    assert ImageIdentity.from_labels({**identity.labels, MANAGED: "bridge"}) is None
