"""Sizes and numbers: which spelling means what, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.units import MAX_BYTES, format_size, parse_size_bytes, parse_whole_number


@pytest.mark.requirement("B-33", "B-34")
@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4g", 4 * 2**30),
        ("4G", 4 * 2**30),
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("100MB", 100_000_000),
        ("100MiB", 104_857_600),
        ("100m", 104_857_600),
        ("1k", 1024),
        ("1kB", 1000),
        ("2TB", 2 * 10**12),
        ("2t", 2 * 2**40),
        ("512B", 512),
        ("0B", 0),
        ("9223372036854775807B", MAX_BYTES),
    ],
)
def test_size_spellings(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.requirement("B-33", "B-34")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("512", "no unit"),
        ("0", "no unit"),
        ("-1g", "not a whole number"),
        ("+1g", "not a whole number"),
        ("1.5g", "not a whole number"),
        ("1e3g", "not a whole number"),
        ("nan", "not a whole number"),
        ("inf", "not a whole number"),
        ("", "not a whole number"),
        ("g", "not a whole number"),
        (" 4g", "not a whole number"),
        ("4g\n", "not a whole number"),
        ("4  g", "not a whole number"),
        ("٤g", "not a whole number"),
        ("4\u017f", "not a whole number"),
        ("4K iB", "not a whole number"),
        ("4gi", "not one of the units"),
        ("4eb", "not one of the units"),
        ("4bits", "not one of the units"),
        ("9223372036854775808B", "more than 2^63-1"),
        ("8388608TiB", "more than 2^63-1"),
        ("9" * 5000 + "B", "not a whole number"),
    ],
)
def test_size_refusals(text: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why.replace("^", r"\^")) as refused:
        parse_size_bytes(text)
    assert len(str(refused.value)) < 300


@given(st.integers(min_value=0, max_value=MAX_BYTES))
def test_shown_sizes_read_back_or_say_that_they_are_rounded(size_bytes: int) -> None:
    shown = format_size(size_bytes)
    if shown.startswith("≈"):
        with pytest.raises(RefusedError):
            parse_size_bytes(shown)
    else:
        assert parse_size_bytes(shown) == size_bytes


def test_shown_sizes() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 2**30, 10**9, 3 * 2**39)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1 GiB",
        "≈953.7 MiB",
        "≈1.5 TiB",
    ]


@given(st.text(max_size=30))
def test_a_whole_number_is_plain_digits_or_refused(text: str) -> None:
    if text and set(text) <= set("0123456789") and len(text) <= 19:
        assert parse_whole_number(text) == int(text)
    else:
        with pytest.raises(RefusedError):
            parse_whole_number(text)
