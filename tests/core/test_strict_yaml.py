"""YAML without its hazards: the same to every reader, in bounded time, whatever comes."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import yaml
from contract_parts import faults
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge_core.contract import MAX_CONTRACT_BYTES, MAX_DEPTH, MAX_VALUES, Contract, read_contract
from forge_core.errors import RefusedError
from forge_core.strict_yaml import read_yaml
from forge_core.yaml_tree import Unclear

pytestmark = pytest.mark.requirement("B-41", "B-52")

SLOW_S = 3.0
"""Some twenty times what the worst file takes, of processor time."""

WORDS = {
    "nothing (null)": "~ null Null NULL",
    "true or false": "y Y n N yes Yes YES no No NO on On ON off Off OFF True TRUE False FALSE",
    "a number": "+1 -0 1.5 .5 1. 1e3 1E+3 1.5e-3 1_000 0x1F 0o17 017 08 0b1 12:30 1:2:3.4 .inf"
    f" -.Inf .NaN {'9' * 5000}",
    "a date": "2001-01-01 2001-1-1T2:3:4 2001-12-14T21:59:43.10-05:00",
    "a default value": "=",
    "a merge key": "<<",
}  # fmt: skip
TEXTS = [
    *("15.2.1", "v15", "1.2-alpine", "0x", "15-3", "1e", "e3", "nope", "none", "yes!", "1,000"),
    *("0b2", "0o8", ":30", "12:60", "20-01-01", "<<<"),
]


def value_of(text: str) -> Any:
    document = read_yaml(text.encode(), max_bytes=65_536, max_depth=4, max_nodes=100)
    assert document.faults == ()
    assert document.root is not None
    return document.root.plain()


@pytest.mark.parametrize(
    ("kind", "word"), [(kind, word) for kind, words in WORDS.items() for word in words.split()]
)
def test_what_some_reader_takes_for_something_else_is_unclear(kind: str, word: str) -> None:
    assert value_of(f"a: {word}\n") == {"a": Unclear(kind)}
    assert value_of(f'a: "{word}"\n') == value_of(f"a: '{word}'\n") == {"a": word}


@pytest.mark.parametrize("word", TEXTS)
def test_what_only_looks_like_it_is_text(word: str) -> None:
    assert value_of(f"a: {word}\n") == {"a": word} == yaml.safe_load(f"a: {word}\n")


def test_numbers_and_truth_have_one_form() -> None:
    assert value_of("[0, 7, -12, true, false]") == (0, 7, -12, True, False)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("version: 1\n\ttmp: {}", "line 2: there is a tab; indent and separate with spaces"),
        ("version: 1 # \x07", "line 1: there is the control character U+0007"),
        ("version: 1 # \x85", "line 1: there is the control character U+0085"),
        ("version: 1\rtmp: {}", "line 1: there is a carriage return without a line feed"),
        ("version: 1\n\r", "line 2: there is a carriage return without a line feed"),
        *(
            (f"a: 1\nb: x{c}y", f"line 2: there is the character U+{ord(c):04X}, which looks like ")
            for c in "\u00a0\u2028\u202e\u2069\ufeff\uffff"
        ),
        ("\ufeffversion: 1", "line 1: it begins with a byte order mark; save it without one"),
        (b"version: 1\n# \xff", "line 2: it is not UTF-8"),
        ("version: 1\n".encode("utf-16"), "line 1: it is not UTF-8"),
        ('x: "\\UFFFFFFFF"', "line 1: it has a number that is out of range"),
        (f"%YAML {'9' * 5000}.1\n---\n", "line 1: it has a number that is out of range"),
        ('environment: {A: "\\ud800"}', "line 1: environment.A: it holds the character U+D800"),
        ('"\\x07": 1', "line 1: it holds the character U+0007"),
        ("", "line 1: it is empty"),
        ("---\n", "line 2: it has no value; give it one or leave the line out"),
    ],
)
def test_bytes_that_are_not_what_they_look_like_are_refused(data: str | bytes, fault: str) -> None:
    assert faults(data)[0].startswith(fault)


def test_a_file_has_bounds() -> None:
    padding = b"#" * (MAX_CONTRACT_BYTES - len(b"version: 1\n"))
    assert read_contract(b"version: 1\n" + padding).version == 1
    too_large = f"line 1: it has more than {MAX_CONTRACT_BYTES} bytes"
    assert faults(b"version: 1\n" + padding + b"#") == [too_large]
    deep = "version: 1\nx: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert faults(deep) == [f"line 2: it is nested more than {MAX_DEPTH} deep"]
    many = "version: 1\nx: [" + "a," * MAX_VALUES + "]"
    assert faults(many) == [f"line 2: it has more than {MAX_VALUES} values"]


BOMB = "version: 1\na0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}x]\n" for n in range(1, 20)
)
HEAVY = ["[", "{", "{a: ", "- ", "? ", "-\n", "?\n", "&a ", "*a ", "!a ", "a,", "x\n", "'", '"\\n']
HEAVY += ["\n", "a: |\n x\n", "# x\n", "k: v\n", "[a, ", "'a': ", "\t", "0", "1_", "12:", "1" * 60]


@pytest.mark.parametrize("line", [BOMB, *HEAVY], ids=["bomb", *map(repr, HEAVY)])
def test_nothing_takes_long(line: str) -> None:
    data = (line * (MAX_CONTRACT_BYTES // len(line) + 1)).encode()[:MAX_CONTRACT_BYTES]
    began = time.process_time()
    lines = faults(data)
    assert time.process_time() - began < SLOW_S
    assert sum(map(len, lines)) < 10_000


TOKENS = st.sampled_from(
    [
        *("\n  ", ": ", "- ", "? ", "&a ", "*a", "!t ", "!!str ", "<<: ", "---\n", "...\n"),
        *("%YAML 1.1\n", "\r\n", "\\UFFFFFFFF", "9" * 20, "no", "1e3", "version: 1\n", "image"),
        *("network:", "domains", "services:\n", "- name", "environment:\n  "),
        *"[]{},-?:&*!|>'\"\\#%@`=~\t\n \r\0\ufeff\u202e",
    ]
)


def _contract_or_refused(data: bytes) -> None:
    began = time.process_time()
    said = ""
    try:
        assert isinstance(read_contract(data), Contract)
    except RefusedError as error:
        assert error.code == "contract_invalid"  # noqa: PT017 - either is right
        said = str(error)
    assert time.process_time() - began < SLOW_S
    assert all(re.match(r"  line [1-9][0-9]*: \S|  and ", line) for line in said.split("\n")[1:])


@given(st.binary(max_size=400))
@example(b"version: 1\n\xff")
def test_any_bytes_are_a_contract_or_refused(data: bytes) -> None:
    _contract_or_refused(data)


@settings(max_examples=400)
@given(st.lists(TOKENS, max_size=40).map("".join))
@example("'\n  : '")
def test_anything_like_yaml_is_a_contract_or_refused(text: str) -> None:
    _contract_or_refused(text.encode())
    _contract_or_refused(f"version: 1\n{text}".encode())


def _is_clear(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_clear, value.values()))
    return (
        all(map(_is_clear, value)) if isinstance(value, tuple) else not isinstance(value, Unclear)
    )


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, tuple) else value


PLAIN = st.text(st.sampled_from("0123456789.-+:_eExXoObTZtrufalsynofi ~\"'|>#,"), max_size=12)


@settings(max_examples=400)
@given(st.lists(TOKENS, max_size=20).map("".join) | PLAIN.map("a: {}\n".format))
def test_what_is_clear_is_the_same_to_another_reader(text: str) -> None:
    """Another way to the same values: PyYAML's own resolver and constructor, of YAML 1.1."""
    document = read_yaml(text.encode(), max_bytes=65_536, max_depth=8, max_nodes=1000)
    if document.root is None or document.faults or not _is_clear(document.root.plain()):
        return
    assert _with_lists(document.root.plain()) == yaml.safe_load(text)
