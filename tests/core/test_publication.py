"""Which remote may be pushed to, and what was seen there means."""

from __future__ import annotations

import base64
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.publication import (
    Credential,
    Pushed,
    Seen,
    after_a_crash,
    after_push,
    before_push,
    is_loopback,
    normal_url,
)
from forge_core.wire.codes import PublicationOutcome as Outcome

INPUT, RESULT, OTHER = "a" * 40, "b" * 40, "c" * 40
PASSWORD = "pass:word/with+everything-7"


@pytest.mark.requirement("B-61", "B-63")
@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("https://example.org/a/b.git", "https://example.org/a/b.git"),
        ("HTTPS://Example.ORG:443/a/b.git/", "https://example.org/a/b.git"),
        ("https://example.org:8443/a", "https://example.org:8443/a"),
        ("https://example.org/%7Ea/%e9%C3", "https://example.org/~a/%E9%C3"),
        ("http://127.0.0.1:3000/a.git", "http://127.0.0.1:3000/a.git"),
        ("http://localhost:80/a", "http://localhost/a"),
        ("http://[0:0:0:0:0:0:0:1]:3000/a", "http://[::1]:3000/a"),
        ("https://example.org/a%2Bb", "https://example.org/a%2Bb"),
    ],
)
def test_equal_remotes_have_one_spelling(url: str, normal: str) -> None:
    assert normal_url(url) == normal
    assert normal_url(normal) == normal


@pytest.mark.requirement("B-61", "B-63")
@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.org/a",
        "file:///srv/a.git",
        "ssh://git@example.org/a",
        "git@example.org:a.git",
        "ext::sh -c whoami",
        "http://example.org/a",
        "http://127.0.0.1.example.org/a",
        "http://10.0.0.1/a",
        "https://user@example.org/a",
        "https://user:password@example.org/a",
        "https://@example.org/a",
        "https://example.org@evil.example/a",
        "https://example.org/a?x=1",
        "https://example.org/a?",
        "https://example.org/a#x",
        "https://example.org",
        "https://example.org/",
        "https:///a",
        "https://example.org/a/../b",
        "https://example.org/a/%2e%2E/b",
        "https://example.org/a/./b",
        "https://example.org/a//b",
        "https://example.org/a%2fb",
        "https://example.org/a%5cb",
        "https://example.org/a%00b",
        "https://example.org/a%0ab",
        "https://example.org/a%",
        "https://example.org/a%4",
        "https://example.org/a b",
        "https://example.org/a\nb",
        "https://example.org/a\\b",
        "https://example.org\\@evil.example/a",
        "https://exämple.org/a",
        "https://-example.org/a",
        "https://example..org/a",
        "https://example.org:port/a",
        "https://example.org:99999/a",
        "https://[::1/a",
        "https://[fe80::1%25eth0]/a",
        "https://example.org/" + "a" * 2_048,
    ],
)
def test_what_is_no_remote_to_push_to_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RefusedError) as refused:
        normal_url(url)
    assert refused.value.code == "remote_refused"
    assert not url or url not in str(refused.value)


@given(st.text(alphabet=st.sampled_from("htps:/@?#%.[]0123456789aAeEfF2-~\\"), max_size=60))
def test_any_text_is_one_remote_or_none(text: str) -> None:
    try:
        normal = normal_url(f"https://{text}")
    except RefusedError:
        return
    assert normal_url(normal) == normal
    assert normal.startswith("https://")
    assert not set("@?# \\") & set(normal.removeprefix("https://").partition("/")[0])


def test_only_loopback_needs_no_proxy() -> None:
    assert is_loopback("http://127.0.0.1:3000/a")
    assert is_loopback("http://[::1]/a")
    assert not is_loopback("https://example.org/a")


@pytest.mark.requirement("B-62")
def test_a_credential_is_shown_nowhere_masked_in_every_form_and_wiped() -> None:
    credential = Credential("forge", PASSWORD)
    pair = base64.b64encode(f"forge:{PASSWORD}".encode()).decode()
    assert credential.header == f"Authorization: Basic {pair}"
    assert PASSWORD not in repr(credential)
    for form in (
        PASSWORD,
        pair,
        json.dumps(PASSWORD),
        base64.b64encode(PASSWORD.encode()).decode(),
    ):
        assert form not in credential.mask(f"before {form} after")
    memory = credential._basic
    credential.wipe()
    assert not memory
    with pytest.raises(AssertionError):
        credential.header  # noqa: B018 - that it cannot be had
    with pytest.raises(AssertionError):
        credential.mask(PASSWORD)


@pytest.mark.requirement("B-62")
@pytest.mark.parametrize(
    ("username", "password"),
    [
        ("", PASSWORD),
        ("forge", ""),
        ("forge", "abc"),
        ("a:b", PASSWORD),
        ("forge", f"{PASSWORD}\r\nX-Evil: 1"),
        ("forge\n", PASSWORD),
        ("forge", "x" * 20_000),
    ],
)
def test_a_credential_that_cannot_be_sent_or_masked_is_refused(
    username: str, password: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        Credential(username, password)
    assert refused.value.code == "credential_refused"
    assert not password or password not in str(refused.value)


@pytest.mark.requirement("B-63")
@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (INPUT, None),
        (None, None),
        (RESULT, Outcome.ALREADY_PUBLISHED),
        (OTHER, Outcome.STALE_REMOTE),
    ],
)
def test_only_the_input_commit_or_no_branch_is_replaced(
    seen: str | None, outcome: Outcome | None
) -> None:
    assert before_push(Seen(seen), input_commit=INPUT, result_commit=RESULT) is outcome


@pytest.mark.requirement("B-63")
@pytest.mark.parametrize(
    ("accepted", "after", "outcome"),
    [
        (True, Seen(RESULT), Outcome.PUSHED),
        (True, Seen(OTHER), Outcome.PUSHED),
        (True, None, Outcome.PUSHED),
        (True, Seen(INPUT), Outcome.UNKNOWN),
        (False, Seen(RESULT), Outcome.PUSHED),
        (False, Seen(OTHER), Outcome.STALE_REMOTE),
        (False, Seen(None), Outcome.STALE_REMOTE),
        (False, Seen(INPUT), Outcome.ABORTED),
        (False, None, Outcome.UNKNOWN),
    ],
)
def test_what_came_of_a_push(accepted: bool, after: Seen | None, outcome: Outcome) -> None:
    pushed = Pushed(accepted=accepted)
    assert after_push(Seen(INPUT), pushed, after, result_commit=RESULT) is outcome


@pytest.mark.requirement("B-63")
def test_nothing_is_called_published_without_a_sign_of_it() -> None:
    commits = (None, INPUT, RESULT, OTHER)
    for before, after, accepted in itertools.product(commits[:2], commits, (True, False)):
        outcome = after_push(Seen(before), Pushed(accepted), Seen(after), result_commit=RESULT)
        assert (outcome is Outcome.PUSHED) <= (accepted or after == RESULT)


@pytest.mark.requirement("B-64")
@pytest.mark.parametrize(
    ("seen", "may_still_come", "outcome"),
    [
        (RESULT, True, Outcome.PUSHED),
        (RESULT, False, Outcome.PUSHED),
        (OTHER, True, Outcome.STALE_REMOTE),
        (INPUT, True, None),
        (None, True, None),
        (INPUT, False, Outcome.ABORTED),
        (None, False, Outcome.ABORTED),
    ],
)
def test_a_push_of_which_nobody_tells_is_settled_by_the_branch(
    seen: str | None, may_still_come: bool, outcome: Outcome | None
) -> None:
    settled = after_a_crash(
        Seen(seen), input_commit=INPUT, result_commit=RESULT, may_still_come=may_still_come
    )
    assert settled is outcome
