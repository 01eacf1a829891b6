"""What is kept of a build's output: masked, bounded, its digest told."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.build_output import BuildOutput
from forge_core.redaction import Masker

SECRET = "a-secret-of-the-attempt"


def kept(pieces: list[bytes], *, kept_bytes: int = 1 << 20, last_words: str = "") -> str:
    output = BuildOutput(Masker([SECRET]), kept_bytes=kept_bytes)
    for piece in pieces:
        output.feed(piece)
    return output.end(last_words).content.decode()


@pytest.mark.requirement("B-90")
@given(st.data())
def test_a_secret_is_masked_however_the_output_is_cut(data: st.DataObject) -> None:
    raw = f"before {SECRET} after \u00e9".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    bounds = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    assert kept(pieces) == "before *** after \u00e9"


@pytest.mark.requirement("B-90")
def test_the_beginning_and_the_end_are_kept_and_the_rest_is_counted() -> None:
    output = BuildOutput(Masker([SECRET]), kept_bytes=200)
    for n in range(10_000):
        output.feed(f"{n} {SECRET}\n".encode())
    log = output.end("cannot build")
    text = log.content.decode()
    assert log.truncated
    assert len(log.content) < 260
    assert text.startswith("0 ***\n1 ***\n")
    assert text.endswith("9999 ***\n\ncannot build\n")
    assert " bytes left out]" in text
    assert SECRET not in text
    assert log.digest == f"sha256:{hashlib.sha256(log.content).hexdigest()}"


@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(0, 400))
def test_memory_and_content_are_bounded_and_always_text(pieces: list[bytes], cap: int) -> None:
    output = BuildOutput(Masker(()), kept_bytes=cap)
    for piece in pieces:
        output.feed(piece)
        assert len(output._head) + len(output._tail) <= 2 * cap + 2
    log = output.end()
    log.content.decode()
    assert len(log.content) <= cap + 60


def test_what_fits_is_kept_whole() -> None:
    log = BuildOutput(Masker(()), kept_bytes=10)
    log.feed(b"0123456789")
    whole = log.end()
    assert (whole.content, whole.truncated) == (b"0123456789", False)


def test_last_words_come_last_and_are_masked() -> None:
    assert kept([b"step 1"], last_words=f"it failed: {SECRET}") == "step 1\nit failed: ***\n"
