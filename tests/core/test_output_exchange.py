"""Claims of a helper and headers of a bundle, read without trust."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.output_exchange import (
    HelperReply,
    attempt_ref,
    helper_request,
    parse_bundle_header,
    parse_helper_reply,
)

pytestmark = pytest.mark.requirement("B-61")

BASE, RESULT = "a" * 40, "b" * 40
REF = attempt_ref("att-1", 7)


def test_a_ref_holds_a_digest_and_never_an_id() -> None:
    assert REF == "refs/forge/attempts/20864c4631c6b45febd49bfc459367c6/7"


def test_the_request_says_how_long_its_listing_is() -> None:
    request = helper_request(
        b"listing\nwith a line",
        input_commit=BASE,
        ref=REF,
        author_name="F",
        author_email="f@x",
        date_seconds=1,
        message="m\n",
        max_bytes=2,
        max_files=3,
    )
    line, _, listing = request.partition(b"\n")
    assert json.loads(line)["listingBytes"] == len(listing)


def test_replies() -> None:
    line = json.dumps({"resultCommit": RESULT, "files": 1, "bytes": 2, "warnings": ["w"]})
    assert parse_helper_reply(line.encode()) == HelperReply(RESULT, 1, 2, None, ("w",))
    refused = {"rule": "size", "detail": "too\x1b much"}
    line = json.dumps({"resultCommit": None, "files": 0, "bytes": 0, "refused": refused})
    assert parse_helper_reply(line.encode()).refused == "size: too\ufffd much"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(["resultCommit", "files", "bytes", "refused", "warnings", "rule"])


REPLIES = st.dictionaries(FIELDS, JSON).map(lambda reply: json.dumps(reply).encode())


@given(st.binary(max_size=200) | REPLIES)
def test_a_reply_is_read_or_refused(line: bytes) -> None:
    with suppress(RefusedError):
        reply = parse_helper_reply(line)
        assert reply.result_commit is None or len(reply.result_commit) in (40, 64)
        assert all(len(warning) <= 1000 for warning in reply.warnings)


def test_headers_that_are_good() -> None:
    need, offer = f"-{BASE}\n", f"{RESULT} {REF}\n"
    for header in (
        f"# v2 git bundle\n{need}{offer}\n",
        f"# v2 git bundle\n-{BASE} subject of it\n{offer}\n",
        f"# v3 git bundle\n@object-format=sha1\n{need}{offer}\n",
    ):
        assert parse_bundle_header(header.encode(), input_commit=BASE, ref=REF) == RESULT
    long_base, long_result = "c" * 64, "d" * 64
    header = f"# v3 git bundle\n@object-format=sha256\n-{long_base}\n{long_result} {REF}\n\n"
    assert parse_bundle_header(header.encode(), input_commit=long_base, ref=REF) == long_result
    with pytest.raises(RefusedError):
        parse_bundle_header(
            f"# v2 git bundle\n-{long_base}\n{long_result} {REF}\n\n".encode(),
            input_commit=long_base,
            ref=REF,
        )


PIECES = st.sampled_from(
    [
        *(b"# v2 git bundle\n", b"# v3 git bundle\n", b"@object-format=sha1\n"),
        *(f"-{BASE}\n".encode(), f"{RESULT} {REF}\n".encode(), RESULT.encode(), REF.encode()),
        *(b"\n", b"-", b" ", b"\0"),
    ]
)


@given(st.lists(PIECES | st.binary(max_size=5), max_size=8).map(b"".join))
def test_a_header_is_read_or_refused(header: bytes) -> None:
    with suppress(RefusedError):
        parse_bundle_header(header, input_commit=BASE, ref=REF)
        assert header.count(REF.encode()) == 1
        assert header.count(f"\n-{BASE}".encode()) == 1
