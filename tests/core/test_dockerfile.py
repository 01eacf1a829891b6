"""What a Dockerfile fetches is pinned and named, or the file is refused with line and reason."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dockerfile_corpus import BASE, DIGESTS, Case, cases
from forge_core.dockerfile import analyse_dockerfile
from forge_core.dockerfile.analysis import MAX_FINDINGS, MAX_STAGES, MAX_VARIABLES
from forge_core.dockerfile.lines import MAX_BYTES, MAX_FLAGS, MAX_INSTRUCTIONS, MAX_LINE_BYTES
from forge_core.errors import RefusedError

pytestmark = pytest.mark.requirement("B-31", "B-52")

IMAGE = f"{BASE}@sha256:{DIGESTS[BASE]}"


def refusal(text: str) -> str:
    with pytest.raises(RefusedError) as refused:
        analyse_dockerfile(text.encode())
    assert refused.value.code == "image_policy_denied"
    assert refused.value.field == ".forge/Dockerfile"
    return str(refused.value)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_corpus(case: Case) -> None:
    if case.external:
        assert analyse_dockerfile(case.content).external == case.external
        return
    message = refusal(case.content.decode())
    assert message.startswith("cannot build .forge/Dockerfile: line ")
    assert [part for part in case.refused if part not in message] == []


def test_a_frontend_is_refused_however_well_it_is_pinned() -> None:
    frontend = f"registry.invalid/frontend:1@sha256:{'c' * 64}"
    message = refusal(f"#syntax={frontend}\n# escape=`\nFROM {IMAGE}\n")
    assert f"line 1, # syntax: {frontend} would read the file in its own way" in message.replace(
        '"', ""
    )


def test_every_finding_is_told_and_their_number_is_bounded() -> None:
    message = refusal("FROM a:1\nVOLUME /x\nADD https://b.invalid/ /b\n")
    assert [int(n) for n in re.findall(r"line (\d+)", message)] == [1, 2, 3]
    many = refusal("FROM a:1\n" + "VOLUME /x\n" * 1000)
    assert many.count("line ") == MAX_FINDINGS
    assert many.endswith(f"; and {1001 - MAX_FINDINGS} more")


def test_what_the_file_says_cannot_swell_or_colour_the_message() -> None:
    message = refusal(f"FROM {'x' * 60_000}\nADD $" + "Y" * 60_000 + " /y\nRUN --" + "z" * 60_000)
    assert len(message) < 3_000
    assert message.isprintable()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"FROM {IMAGE}\n#" + "x" * MAX_BYTES, "bytes; 1048576 are allowed"),
        (f"FROM {IMAGE}\n#" + "x" * MAX_LINE_BYTES, "line 2: the line has over"),
        (f"FROM {IMAGE}\n" * (MAX_STAGES + 1), "over 100 stages"),
        (f"FROM {IMAGE}\n" + "RUN x\n" * MAX_INSTRUCTIONS, "over 10000 instructions"),
        (f"FROM {IMAGE}\nENV" + " a=1" * (MAX_VARIABLES + 1), "over 1000 variables"),
        (f"FROM {IMAGE}\nRUN" + " --mount=target=/x" * (MAX_FLAGS + 1) + " x", "over 64 flags"),
        (f"FROM {'${a:-' * 17}x{'}' * 17}\n", "too many substitutions within one another"),
        (f"ARG A={'x' * 4000}\nFROM $A$A$A\n", "too many characters when expanded"),
        (f"ARG A={'x' * 4097}\nFROM ${{A#x}}\n", "too long"),
        (
            f"FROM {IMAGE}\nENV A={'x' * 8000}\nADD{' $A' * 600} x",
            "too many variables with long values",
        ),
    ],
    ids=lambda value: value[-30:],
)
def test_everything_has_a_bound(text: str, why: str) -> None:
    assert why in refusal(text)


def test_values_that_double_are_not_followed() -> None:
    lines = ["ARG A0=0123456789", *(f"ARG A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 60))]
    assert 'gives no value to "A59"' in refusal("\n".join([*lines, "FROM $A59"]))


def test_it_must_be_utf_8() -> None:
    with pytest.raises(RefusedError, match="line 2: the line is not UTF-8"):
        analyse_dockerfile(f"FROM {IMAGE}\nRUN ".encode() + b"\xff\n")


HOSTILE: dict[str, Callable[[int], str]] = {
    "open substitutions": lambda n: "RUN <<x " + "${a:-" * n,
    "open quotes": lambda n: "RUN <<x " + "'\" " * n,
    "quotes": lambda n: "RUN <<x " + "'a'" * n + "\nx",
    "dollars": lambda n: "RUN <<x " + "$a" * n + "\nx",
    "stars in a pattern": lambda n: "FROM ${A#" + "*a" * min(n, 120) + "b}",
    "here-documents": lambda n: "RUN " + "<<x " * n + "\n" + "x\n" * n,
    "continuations": lambda n: "RUN \\\n" + "a\\\n" * n,
    "comments": lambda n: "RUN \\\n" + " # \\\n" * n,
    "blanks": lambda n: "RUN x" + (" " * 60_000 + "\\\n") * (n // 60_000) + " x",
    "blanks in a directive": lambda n: "# syntax=" + " x" * n,
    "brackets": lambda n: "RUN " + "[" * n,
    "digits": lambda n: "RUN [" + "1" * n + "]",
    "flags": lambda n: "RUN " + "-" * n,
    "escapes": lambda n: "RUN <<x " + "\\a" * n + "\nx",
    "labels": lambda n: "LABEL " + "a=b " * n,
    "label quotes": lambda n: "LABEL " + "\"'" * n,
    "arguments": lambda n: "ADD " + "$x " * n,
}


def _steps(text: str) -> int:
    """How many lines of Python a file costs; counted, since time depends on the machine."""
    counted = 0

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal counted
        counted += event in ("call", "line")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        with pytest.raises(RefusedError):
            analyse_dockerfile(text.encode())
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("shape", HOSTILE)
def test_the_work_grows_with_the_file_and_no_faster(shape: str) -> None:
    head = f"ARG A={'a' * 4_000}\nFROM {IMAGE}\nVOLUME /\n"

    def steps(size: int) -> int:
        return _steps(head + HOSTILE[shape](size))

    small, large = steps(1_000), steps(4_000)
    assert large < 5 * small + 10_000


PIECES = [
    *("FROM ", "RUN ", "COPY ", "ADD ", "ARG ", "ENV ", "LABEL ", "ONBUILD ", IMAGE, " AS a"),
    *("\n", "\n", "\\\n", " `\n", "# escape=`\n", "# syntax=x\n", "#", "--from=", "--mount=", "a"),
    *("$a", "${", "}", ":-", "#", "%", "/", "'", '"', "<<", "<<-", "E", "[", "]", ",", "=", " "),
    *("\\", "`", "https://", ".git", "@", "é", "\u200b", "\r\n", "0", "\t"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@example(f"FROM {IMAGE}\n")
def test_a_file_is_understood_or_refused(text: str) -> None:
    assert set(_external_or_refused(text.encode())) <= {IMAGE}


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert _external_or_refused(data) == ()


def _external_or_refused(data: bytes) -> tuple[str, ...]:
    try:
        return analyse_dockerfile(data).external
    except RefusedError as error:
        refused = error
    assert refused.code == "image_policy_denied"
    assert str(refused).isprintable()
    return ()
