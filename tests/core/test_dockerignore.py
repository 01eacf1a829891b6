"""``.dockerignore`` means what it means to BuildKit, at a cost that no pattern can raise."""

from __future__ import annotations

import re

import pytest
from costs import lines_run
from hypothesis import given
from hypothesis import strategies as st

from forge_core.dockerignore import (
    IGNORE_PATHS,
    MAX_BYTES,
    MAX_PATTERNS,
    MAX_STATES,
    Ignore,
    first_ignore,
)
from forge_core.errors import RefusedError
from forge_core.ignore_patterns import clean

pytestmark = pytest.mark.requirement("B-52")

# rules, what is left out, what is not
CASES = [
    ("", [], ["a", "a/b"]),
    ("a", ["a", "a/b", "a/b/c"], ["b", "ab", "b/a", "b/a/c"]),
    ("/a/b/", ["a/b", "a/b/c"], ["a", "b", "c/a/b"]),
    ("./a//b/../c/", ["a/c", "a/c/d"], ["a", "a/b"]),
    ("../a\n..", [], ["a", "..a"]),
    (".\n/", [], ["a", ".a"]),
    ("  a \t\n\t\n\n", ["a"], [" a ", "b"]),
    ("a\r\nb\r\n", ["a", "b"], ["c"]),
    ("\ufeffa", ["a"], ["\ufeffa"]),
    ("#a\n #b\n\\#c", ["#b", "#c"], ["a", "b", "#a", "c"]),
    ("a # b", ["a # b"], ["a"]),
    ("*", ["a", "a/b", ".a"], []),
    ("*.o", ["a.o", ".o", "a.o/b"], ["b/a.o", "a.oo", "o"]),
    ("a*", ["a", "abc", "ab/c"], ["b", "b/a"]),
    ("*a*b*", ["ab", "xaybz", "aab"], ["a", "b", "ba", "a/b"]),
    ("a/*", ["a/b", "a/b/c"], ["a", "ab"]),
    ("*/b", ["a/b", "a/b/c"], ["b", "a/a/b"]),
    ("a?c", ["abc", "aéc"], ["ac", "a/c", "abbc"]),
    ("**", ["a", "a/b"], []),
    ("**/a", ["a", "b/a", "b/c/a", "b/a/c"], ["ab", "b/ca"]),
    ("**/a.o", ["a.o", "b/a.o"], ["ba.o", "b/xa.o"]),
    ("**a.o", ["a.o", "b/a.o", "ba.o", "b/xa.o"], ["a.oo"]),
    ("**/*.o", ["a.o", "b/a.o", "b/c/.o"], ["a.b", "o"]),
    ("a/**", ["a/b", "a/b/c"], ["a", "ab"]),
    ("a**", ["a", "ab", "a/b"], ["b", "b/a"]),
    ("a/**/b", ["a/b", "a/c/b", "a/c/d/b", "a/c/b/e"], ["a", "ab", "a/cb", "x/a/b"]),
    ("a**b", ["ab", "ac/b", "a/c/b"], ["acb", "a/c"]),
    ("a/**/b", ["a/c/b"], ["a/\n/b"]),
    ("**/b\na/**", ["\n/b", "a/\n"], []),
    ("**/a/**/b", ["a/b", "x/a/b", "x/a/y/z/b"], ["a", "x/a/yb"]),
    ("[a-c]x[^0-9]", ["axa", "cx/"], ["dxa", "ax0", "[a-c]x1"]),
    ("[!a]", ["!", "a"], ["b"]),
    ("a]", ["a]"], ["a"]),
    ("\\*\\?\\[", ["*?["], ["a?["]),
    ("a.b+(c)|{d}$", ["a.b+(c)|{d}$"], ["axb+(c)|{d}$", "a.bb(c)|{d}$"]),
    ("^a", ["^a"], ["a"]),
    ("a\n!a", [], ["a", "a/b"]),
    ("!a\na", ["a", "a/b"], []),
    ("a\n!a/b", ["a", "a/c"], ["a/b", "a/b/c"]),
    ("*\n!a/b\n! c ", ["a", "a/c", "d"], ["a/b", "a/b/x", "c"]),
    ("a\n!/a/b/\na/b/c", ["a/b/c", "a/x"], ["a/b", "a/b/d"]),
    ("**/*.md\n!README*.md\nREADME-secret.md", ["a/b.md", "README-secret.md"], ["README.md"]),
    ("a/b\n!a", ["a/b", "a/b/c"], ["a", "a/c"]),
    ("/!a", [], ["a", "!a"]),
    ("a /", ["a"], ["a "]),
    ("a\n.git", ["a"], [".gitignore", "b"]),
]


@pytest.mark.parametrize(("rules", "excluded", "included"), CASES)
def test_what_the_rules_leave_out(rules: str, excluded: list[str], included: list[str]) -> None:
    ignore = Ignore.parse(rules.encode())
    assert [path for path in excluded if not ignore.excludes(path)] == []
    assert [path for path in included if ignore.excludes(path)] == []


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (b"a\n!", "line 2 .* is empty"),
        (b"a\n\n![", "line 3 .* brackets"),
        (b"[]", "brackets"),
        (b"[b-a]", "runs backwards"),
        (b"[[:alpha:]]", "brackets"),
        (b"[*]", "brackets"),
        (b"a\\", "backslash"),
        (b"\\d", "backslash"),
        (b"*^", "caret"),
        (b"a\0", "character that no path has"),
        (b"\xff", "is not UTF-8"),
        (b"a" * (MAX_BYTES + 1), "65536 are allowed"),
        (b"a\n" * (MAX_PATTERNS + 1), "over 1000 patterns"),
        (b"a" * (MAX_STATES + 1), "or 16384 characters"),
        (
            "".join(f"[{chr(n)}z]" for n in range(0x4E00, 0x5001)).encode(),
            "over 1024 characters in",
        ),
    ],
)
def test_what_is_no_rule_is_refused_with_its_line(rules: bytes, why: str) -> None:
    with pytest.raises(RefusedError, match=f"cannot use x: it .*{why}") as refused:
        Ignore.parse(rules, name="x")
    assert (refused.value.code, refused.value.field) == ("contract_invalid", "x")
    assert str(refused.value).isprintable()


def test_the_first_file_that_is_there_counts_alone() -> None:
    first, second = IGNORE_PATHS
    assert first_ignore({}) is first_ignore({first: None, second: None}) is None
    both = first_ignore({first: b"", second: b"a"})
    assert both is not None
    assert not both.excludes("a")
    alone = first_ignore({first: None, second: b"a"})
    assert alone is not None
    assert alone.excludes("a")
    with pytest.raises(RefusedError, match=f"cannot use {re.escape(second)}: "):
        first_ignore({second: b"["})


def test_bytes_that_are_no_text_are_characters_too() -> None:
    ignore = Ignore.parse(b"a?b\nc*")
    assert ignore.excludes(b"a\xffb".decode("utf-8", "surrogateescape"))
    assert ignore.excludes(b"c\xff".decode("utf-8", "surrogateescape"))


NAMES = st.sampled_from(["a", "b", "ab", ".x", "a.b", "!a", "\n"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
RULES = st.lists(
    st.lists(
        st.sampled_from(["a", "b", "/", "/", "*", "**", "**/", "?", "!", ".", "..", "[a-b]"]),
        min_size=1,
        max_size=6,
    ).map("".join),
    min_size=1,
    max_size=5,
)


@given(RULES, st.lists(PATHS, min_size=1, max_size=8))
def test_the_automaton_agrees_with_regular_expressions(rules: list[str], paths: list[str]) -> None:
    try:
        ignore = Ignore.parse("\n".join(rules).encode())
    except RefusedError:
        return
    assert {p: ignore.excludes(p) for p in paths} == {p: _twin(rules, p) for p in paths}


def _twin(rules: list[str], path: str) -> bool:
    """The slow way: a regular expression for each rule, and every directory on the way."""
    patterns = []
    for rule in rules:
        exception = "!" * rule.startswith("!")
        cleaned = clean(rule.removeprefix("!")) if rule != exception else ""
        full = clean(exception + (cleaned.removeprefix("/") or cleaned))
        patterns.append((full.startswith("!"), re.compile(_expression(full.removeprefix("!")))))
    parts = path.split("/")
    above = [False] * len(patterns)
    excluded = False
    for depth in range(1, len(parts) + 1):
        here = "/".join(parts[:depth])
        excluded, counted = False, []
        for known, (is_exception, pattern) in zip(above, patterns, strict=True):
            counts = known or (is_exception == excluded and pattern.fullmatch(here) is not None)
            excluded = not is_exception if counts else excluded
            counted.append(counts)
        above = counted
    return excluded


def _expression(pattern: str) -> str:
    literal = re.compile(r"[^*?\[\]]*")
    if pattern.startswith("**/") and literal.fullmatch(pattern[3:]):
        return rf"(?s:(?:.*/)?{re.escape(pattern[3:])})"
    if pattern.startswith("**") and literal.fullmatch(pattern[2:]):
        return rf"(?s:.*{re.escape(pattern[2:])})"
    if pattern.endswith("**") and literal.fullmatch(pattern[:-2]):
        return rf"(?s:{re.escape(pattern[:-2])}.*)"
    expression = re.sub(r"\*\*/?$", "\0", pattern)
    parts = re.split(r"(\*\*/?|\*|\?|\[a-b\]|\0)", expression)
    known = {"*": "[^/]*", "?": "[^/]", "[a-b]": "[a-b]", "\0": ".*", "**": "(?:.*/)?"}
    return "".join(known.get(p.removesuffix("/") if "**" in p else p, re.escape(p)) for p in parts)


@pytest.mark.parametrize(
    "rules", ["*a" * 100 + "b", "**/a" * 100, "[^b]*" * 100, "!*a*a*a*b\n*" * 100, "a**" * 100]
)
def test_no_pattern_makes_a_long_path_dear(rules: str) -> None:
    def steps(length: int) -> int:
        return _steps(rules, "a" * length + "/" + "a/" * length + "a")

    assert steps(400) < 5 * steps(100)


def test_gaps_in_a_row_are_passed_at_once() -> None:
    assert _steps("*a" + "**/" * 5_000 + "b", "a" * 100) < 2 * _steps("*a**/b", "a" * 100)
    ignore = Ignore.parse(b"*a**/**/**b\n**/**/**c")
    judged = {path: ignore.excludes(path) for path in ("xab", "xa/y/b", "y/z/c", "ac", "xb", "b")}
    assert [path for path, excluded in judged.items() if excluded] == ["xab", "xa/y/b", "y/z/c"]


def test_a_set_that_comes_again_is_asked_once() -> None:
    def ask(rules: str) -> int:
        return _steps(rules, "".join(map(chr, range(0x4E00, 0x4E40))))

    assert ask("[ab]?" * 500) < 2 * ask("[ab]?")


def _steps(rules: str, path: str) -> int:
    """How many lines of Python it takes to judge the path."""
    ignore = Ignore.parse(rules.encode())
    return lines_run(lambda: ignore.excludes(path))
