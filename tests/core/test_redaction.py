"""Known secrets never leave, however they are encoded and wherever the text is cut."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import textwrap
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.redaction import (
    MASK,
    MAX_SECRETS,
    MIN_BEFORE_LINE_END,
    MIN_LINE,
    PIECE,
    Masker,
)

pytestmark = pytest.mark.requirement("B-60")

PEM = "\n".join(
    (
        "-----BEGIN PRIVATE KEY-----",
        "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj",
        "MzEfYyjiWA4R4/M2bS1GB4t7NXp98C3SC6dVMvDuictGeurT8jNbvJZHtCSuYEvu",
        "NMoSfm76oqFvAp8Gy0iz5sxjZmSnXyCdPEovGhLa0VzMaQ8s+CLOyS56YyCFGeJZ",
        "-----END PRIVATE KEY-----",
        "",
    )
)
TOKEN = 'ghp_R4nd0m/Chars+and "quotes" & ümlauts?'

# Few letters make overlaps and near misses likely; the mask's own character is not among them.
letters = st.text("abA \n", min_size=4, max_size=2 * PIECE + 5)
secret_sets = st.lists(letters, max_size=4)


@st.composite
def texts_with_cuts(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    secrets = draw(secret_sets)
    parts = st.one_of(st.text("abA \n", max_size=10), *(st.just(secret) for secret in secrets))
    text = "".join(draw(st.lists(parts, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return secrets, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(texts_with_cuts())
@example((["a" * 4, "a" * 9], ["aaa", "aaaaa", "a", "", "aaaa b"]))
@example((["A" * 11 + " "], ["A" * 11 + " ", "b"]))
def test_where_the_text_is_cut_makes_no_difference(case: tuple[list[str], list[str]]) -> None:
    secrets, chunks = case
    masker = Masker(secrets)
    stream = masker.stream()
    streamed = "".join(stream.feed(chunk) for chunk in chunks) + stream.end()
    assert streamed == masker.mask("".join(chunks))


@given(texts_with_cuts())
def test_no_secret_is_left(case: tuple[list[str], list[str]]) -> None:
    secrets, chunks = case
    masker = Masker(secrets)
    masked = masker.mask("".join(chunks))
    for secret in secrets:
        assert secret in masker.refused or secret not in masked


@given(secret_sets, st.text("xyz \n", max_size=200))
def test_other_text_is_left_alone(secrets: list[str], text: str) -> None:
    assert Masker([secret for secret in secrets if secret.strip()]).mask(text) == text


@given(texts_with_cuts())
def test_little_is_held_back(case: tuple[list[str], list[str]]) -> None:
    secrets, chunks = case
    stream = Masker(secrets).stream()
    for chunk in chunks:
        stream.feed(chunk)
        assert len(stream._held) < PIECE


def test_what_cannot_begin_a_secret_is_not_held_back() -> None:
    stream = Masker([TOKEN, PEM]).stream()
    assert stream.feed("Continue? [y/n] ") == "Continue? [y/n] "
    assert stream.feed("token ghp_") == "token "
    assert stream.feed("other") == "ghp_other"


def test_a_secret_printed_in_two_halves_is_masked() -> None:
    stream = Masker([TOKEN]).stream()
    assert stream.feed(f"a {TOKEN[:20]}") == "a "
    assert stream.feed(f"{TOKEN[20:]} !") == f"{MASK} !"


def test_a_secret_that_is_cut_off_at_the_end_is_masked() -> None:
    assert Masker([TOKEN]).mask(f"a {TOKEN[:25]}") == f"a {MASK}"
    assert Masker([TOKEN]).mask(f"a {TOKEN[:7]}") == f"a {TOKEN[:7]}"


@pytest.mark.parametrize(
    "flatten",
    [
        lambda pem: pem,
        lambda pem: pem.replace("\n", " "),
        lambda pem: pem.replace("\n", ""),
        lambda pem: pem.replace("\n", "\r\n"),
        lambda pem: pem.replace("\n", "\\n"),
        lambda pem: json.dumps({"key": pem}),
        lambda pem: textwrap.indent(pem, "    "),
        lambda pem: "\n".join(f"2026-11-29 INFO {line}" for line in pem.splitlines()),
        lambda pem: " ".join(pem.split()),
    ],
)
def test_a_multi_line_secret_is_masked_however_its_lines_end(flatten: object) -> None:
    masked = Masker([PEM]).mask(f"before {flatten(PEM)} after")  # type: ignore[operator]
    for line in PEM.split("\n")[1:4]:
        assert line not in masked
        assert all(line[n : n + 12] not in masked for n in range(0, 52, 4))
    assert masked.startswith("before ")
    assert masked.endswith(" after")


@pytest.mark.parametrize(
    "encode",
    [
        lambda s: json.dumps(s)[1:-1],
        lambda s: json.dumps(s, ensure_ascii=False)[1:-1],
        lambda s: json.dumps(s)[1:-1].replace("/", "\\/"),
        lambda s: quote(s, safe=""),
        lambda s: quote(s),
        quote_plus,
        lambda s: re.sub("%..", lambda escape: escape[0].lower(), quote(s, safe="")),
        lambda s: s.encode().hex(),
        lambda s: s.encode().hex().upper(),
        lambda s: base64.b64encode(s.encode()).decode().rstrip("="),
        lambda s: base64.urlsafe_b64encode(s.encode()).decode().rstrip("="),
    ],
)
@pytest.mark.parametrize("secret", [TOKEN, "s3cr3t-päss", "abcd", "hunter22"])
def test_encodings_are_masked(encode: object, secret: str) -> None:
    encoded: str = encode(secret)  # type: ignore[operator]
    masked = Masker([secret]).mask(f"<{encoded}>")
    assert MASK in masked
    # One character at each edge may depend on what stands beside the secret.
    assert len(masked) <= len(f"<{MASK}>") + 1


@given(st.binary(max_size=7), st.text(min_size=8, max_size=80), st.binary(max_size=7))
def test_base64_of_a_text_around_the_secret_shows_nothing_of_it(
    before: bytes, secret: str, after: bytes
) -> None:
    if len(secret.strip()) < 8:
        return
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        masked = Masker([secret]).mask(encode(before + secret.encode() + after).decode())
        shown = len(masked) - len(MASK)
        assert MASK in masked
        assert shown <= (len(before) + len(after)) * 8 / 6 + 8


def test_base64_as_the_command_wraps_it_is_masked() -> None:
    secret = PEM * 3
    wrapped = subprocess.run(
        ["base64"], input=secret.encode(), capture_output=True, check=True
    ).stdout.decode()
    masked = Masker([secret]).mask(wrapped)
    assert len(masked.replace(MASK, "").strip()) <= 3 * len(wrapped.splitlines())


@given(
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=8, max_size=120),
    st.integers(0, 90),
    st.sampled_from([40, 64, 76]),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_wrapped_base64_of_a_text_around_the_secret_shows_nothing_of_it(
    secret: str, before: int, width: int, line_end: str, cuts: list[int]
) -> None:
    """Wherever lines end, and wherever the text is cut."""
    encoded = base64.b64encode(b"\xff" * before + secret.encode() + b"\xff\xff").decode()
    first, last = -(-before * 8 // 6), (before + len(secret)) * 8 // 6
    text = line_end.join(textwrap.wrap(encoded, width)) + line_end
    masker = Masker([secret])
    stream, places = masker.stream(), sorted(min(cut, len(text)) for cut in cuts)
    chunks = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    masked = "".join(map(stream.feed, chunks)) + stream.end()
    assert masked == masker.mask(text)
    told = "".join(masked.split())
    for at in range(first, last - MIN_LINE):
        assert encoded[at : at + MIN_LINE] not in told


def test_a_line_is_not_held_back_for_what_the_next_one_may_hold() -> None:
    stream = Masker([TOKEN]).stream()
    encoded = base64.b64encode(TOKEN.encode()).decode()
    for shift in range(1, MIN_BEFORE_LINE_END):
        assert stream.feed(f"done {encoded[:shift]}\n") == f"done {encoded[:shift]}\n"
    assert stream.feed(f"done {encoded[:9]}\n") == "done "


def test_overlapping_secrets_are_masked_as_one() -> None:
    assert Masker(["abcdef", "defghi", "cdef"]).mask("xabcdefghiy") == f"x{MASK}y"
    assert Masker(["abcd"]).mask("abcdabcd abcd") == f"{MASK} {MASK}"


@pytest.mark.parametrize("value", ["a", "abc", "   ", " ab ", "\n\n\n\n\n"])
def test_values_too_short_to_mask_are_refused_by_name(value: str) -> None:
    masker = Masker([value, "long enough"])
    assert masker.refused == {value}
    assert masker.mask(f"a banana\n {value} b") == f"a banana\n {value} b"


def test_no_secret_masks_nothing() -> None:
    for masker in (Masker(()), Masker([""])):
        assert masker.refused == frozenset()
        assert masker.mask("anything at all *** ") == "anything at all *** "


def test_secrets_beyond_all_bounds_are_refused() -> None:
    with pytest.raises(RefusedError) as refused:
        Masker(["x" * (MAX_SECRETS + 1)])
    assert refused.value.code == "secrets_too_large"


@pytest.mark.parametrize("line", ["a" * 1_000_000, f"{PEM[30:60]}!" * 32_000])
def test_a_line_without_end_is_masked_in_linear_time(line: str) -> None:
    """A quadratic search would meet the test's own time limit many times over."""
    secrets = [PEM, "a" * 5_000 + "b"]
    assert len(Masker(secrets).mask(line + TOKEN)) <= len(line) + len(TOKEN)
