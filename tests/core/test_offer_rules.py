"""A start may say nothing that its offer did not: only the offer was judged (B-04)."""

from __future__ import annotations

from typing import Any

import pytest
from wire_parts import KEY

from forge_core.offer_rules import REPEATED, departure
from forge_core.wire.from_hub import Offer, Start

pytestmark = pytest.mark.requirement("B-04", "B-51")

SAME = {
    "offerId": "offer-1",
    "attemptId": "attempt-1",
    "fence": 7,
    "runnerInstanceId": "instance-1",
    "sessionId": "session-1",
    "projectId": "project-1",
    "trustDomainId": "domain-1",
    "repository": "sample",
    "approvedCommit": "a" * 40,
}
SERVICES = [{"name": "postgres", "version": "16"}, {"name": "redis"}]
OFFER = Offer.model_validate(
    {
        **SAME,
        "policy": "sandbox_required",
        "resources": {"slots": 1},
        "expiresInMs": 1_000,
        "requirements": {
            "networkPolicy": "public_allowlist",
            "services": SERVICES,
            "publicationMode": "bridge_push",
        },
    }
)


def start(**lies: Any) -> Start:
    """The go that the offer asked for, but for the lies."""
    return Start.model_validate(
        {
            **SAME,
            "inputCommit": "b" * 40,
            "branch": "result",
            "agent": {"provider": "command", "argv": ["true"]},
            "lease": {"ttlMs": 1_000, "sequence": 0, "key": KEY},
            "limits": {"hardWallMs": 1_000, "idleMs": 1_000, "maxOutputBytes": 1},
            "network": {"policy": "public_allowlist", "domains": ["example.org"]},
            "services": SERVICES,
            "publication": {"mode": "bridge_push", "handle": "opaque"},
            **lies,
        }
    )


def test_what_was_agreed_on_may_start() -> None:
    assert departure(OFFER, start()) is None
    assert departure(OFFER, start(services=SERVICES[::-1])) is None


def test_every_property_that_both_have_is_compared() -> None:
    assert {Start.model_fields[name].alias for name in REPEATED} == SAME.keys()


@pytest.mark.parametrize("name", SAME)
def test_another_value_is_named(name: str) -> None:
    other = {"fence": 8, "approvedCommit": "c" * 40}.get(name, "another")
    assert departure(OFFER, start(**{name: other})) == f"{name} is not that of the offer"


def test_an_approved_commit_is_neither_dropped_nor_brought() -> None:
    assert departure(OFFER, start(approvedCommit=None)) is not None
    unapproved = OFFER.model_copy(update={"approved_commit": None})
    assert departure(unapproved, start()) is not None
    assert departure(unapproved, start(approvedCommit=None)) is None


@pytest.mark.parametrize(
    ("lies", "named"),
    [
        ({"network": {"policy": "open_public"}}, "open_public"),
        ({"network": {"policy": "none"}}, "none"),
        ({"publication": {"mode": "shared_filesystem"}}, "shared_filesystem"),
        ({"services": SERVICES[:1]}, "postgres"),
        ({"services": []}, "none"),
        ({"services": [*SERVICES, SERVICES[1]]}, "postgres, redis, redis"),
        ({"services": [{"name": "postgres", "version": "17"}, {"name": "redis"}]}, "postgres"),
    ],
)
def test_requirements_are_what_was_offered_no_more_and_no_less(
    lies: dict[str, Any], named: str
) -> None:
    assert named in str(departure(OFFER, start(**lies)))
