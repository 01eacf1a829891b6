"""Paths and links that may, and may not, enter or leave a workspace."""

from __future__ import annotations

import posixpath

import pytest
from costs import lines_run
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import RefusedError
from forge_core.tree_changes import Change, changes_violation, link_ids, parse_changes
from forge_core.tree_rules import (
    MAX_SYMLINK_BYTES,
    MAX_TREE_ENTRIES,
    MODE_FILE,
    MODE_GITLINK,
    MODE_SYMLINK,
    MODE_TREE,
    TreeEntry,
    escaping_symlinks,
    input_violation,
    is_dotgit,
    parents,
    parse_listing,
    portability_violation,
    printable,
    structure_violation,
)

pytestmark = pytest.mark.requirement("B-61")

DOTGITS = (
    *(b".git", b".GIT", b".gIt", b".git ", b".git.", b".git. . ", b".git:", b".git::$DATA"),
    *(b"git~1", b"GIT~1", b"git~12", b"git~1 ", b"git~1:x", ".g\u200cit".encode()),
    *("\ufeff.git".encode(), ".gi\u202et".encode(), ".GIT\u206f".encode(), b"git\xe2\x81\xaa~1"),
)
INNOCENT = (b".github", b".gitignore", b"git", b"a.git", b".git-x", b"git~x", b".gi", b"..git")


@pytest.mark.parametrize("name", DOTGITS)
@pytest.mark.parametrize("place", [b"%s", b"a/%s", b"%s/config", b"a/%s/b"])
def test_git_is_known_in_every_disguise(name: bytes, place: bytes) -> None:
    assert is_dotgit(name)
    violation = structure_violation(place % name)
    assert violation is not None
    assert violation.rule == "path"


@pytest.mark.parametrize("name", INNOCENT)
def test_names_that_only_look_like_git_are_fine(name: bytes) -> None:
    assert structure_violation(b"a/" + name) is None


@pytest.mark.parametrize(
    "path",
    [
        *(b"", b"/", b"/a", b"a/", b"a//b", b".", b"..", b"a/../b", b"./a", b"a/.", b"a\0b"),
        *(b"x" * 256, b"/".join([b"d" * 200] * 21), b"a\\.git\\b", b".git\\x"),
    ],
)
def test_paths_without_structure(path: bytes) -> None:
    assert structure_violation(path) is not None


@pytest.mark.parametrize("path", [b"a\nb", b"\x1b[2J", b"a\x7f", b"a\\b", b"\xff", b"\xed\xa0\x80"])
def test_paths_that_are_not_portable(path: bytes) -> None:
    assert structure_violation(path) is None
    assert portability_violation(path) is not None


@pytest.mark.parametrize("path", [b"a b", b"-x", b":(top)x", "ä/日本".encode(), b"con", b"*?["])
def test_ordinary_paths(path: bytes) -> None:
    assert structure_violation(path) is None
    assert portability_violation(path) is None


@pytest.mark.parametrize(
    ("links", "escaping"),
    [
        ({b"a": b"/x"}, {b"a"}),
        ({b"a": b".."}, {b"a"}),
        ({b"d/a": b".."}, set()),
        ({b"d/a": b"../.."}, {b"d/a"}),
        ({b"a": b"d/../../x"}, {b"a"}),
        ({b"a": b"x/../.git/hooks"}, {b"a"}),
        ({b"a": b"b", b"b": b"../x"}, {b"a", b"b"}),
        ({b"a": b"d/e/up/..", b"d/e/up": b"../.."}, {b"a"}),
        ({b"a": b"s/../..", b"s": b"d/e/f"}, set()),
        ({b"a": b"s/../../../..", b"s": b"d/e/f"}, {b"a"}),
        ({b"a": b"a"}, {b"a"}),
        ({b"a": b"b", b"b": b"a"}, {b"a", b"b"}),
        ({b"a": b"./b//c/."}, set()),
    ],
)
def test_links_are_followed_as_a_kernel_would(
    links: dict[bytes, bytes], escaping: set[bytes]
) -> None:
    assert set(escaping_symlinks(links)) == escaping


def test_links_that_take_too_long_to_follow_are_refused_as_a_whole() -> None:
    detour = b"d/" * 800 + b"../" * 800
    links = {b"%04d" % n: detour + b"%04d" % (n + 1) for n in range(100)}
    with pytest.raises(RefusedError, match="over 4000000 steps") as refused:
        escaping_symlinks(links)
    assert refused.value.code == "too_many_steps"
    assert set(escaping_symlinks({b"a": b"d/" * 2_000, b"b": b"a/" + b"d/" * 2_000})) == {b"b"}


def test_a_deep_tree_costs_no_more_than_its_names() -> None:
    def steps(depth: int) -> int:
        above = [b"/".join([b"d"] * n) for n in range(1, depth + 1)]
        files = [above[-1] + b"/%d" % n for n in range(1_000)]
        entries = [TreeEntry(MODE_TREE, OLD, path) for path in above]
        entries += [TreeEntry(MODE_FILE, OLD, path, 1) for path in files]
        changes = [Change(e.path, 0, "", e.mode, e.object_id) for e in entries]
        link = TreeEntry(MODE_SYMLINK, NEW, b"link", 1)

        def judge() -> None:
            assert input_violation(entries) is None
            assert changes_violation(changes, [link], {NEW: b"x"}) is None

        return lines_run(judge)

    assert steps(100) < 2 * steps(1)


NAMES = st.sampled_from([b"a", b"b", b"c"])
TARGETS = st.lists(st.sampled_from([b"a", b"b", b"c", b"..", b".", b""]), min_size=1, max_size=5)


@given(
    st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=3).map(b"/".join), TARGETS.map(b"/".join), max_size=6
    )
)
def test_links_agree_with_a_naive_resolver(links: dict[bytes, bytes]) -> None:
    links = {p: t for p, t in links.items() if t and not t.startswith(b"/")}
    links = {p: t for p, t in links.items() if not any(up in links for up in parents(p))}
    reported = escaping_symlinks(links)
    for path in links:
        assert (path in reported) == _leaves(path, links), path


def _leaves(path: bytes, links: dict[bytes, bytes]) -> bool:
    """By substitution: replace the first link on the way, again and again."""
    walk = posixpath.join(posixpath.dirname(path), links[path]).split(b"/")
    for _ in range(40):
        done: list[bytes] = []
        for at, part in enumerate(walk):
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not done:
                    return True
                done.pop()
                continue
            here = b"/".join([*done, part])
            if here in links:
                rest = walk[at + 1 :]
                walk = [*done, *links[here].split(b"/"), *rest]
                break
            done.append(part)
        else:
            return False
    return True


def test_an_input_tree_is_refused_for_its_structure_only() -> None:
    def entry(path: bytes, mode: int = MODE_FILE, size_bytes: int = 1) -> TreeEntry:
        return TreeEntry(mode, "1" * 40, path, size_bytes)

    odd = [entry(b"a\\b"), entry(b"\xff"), entry(b"l", MODE_SYMLINK), entry(b"m", MODE_GITLINK)]
    assert input_violation(odd) is None
    for entries in (
        [entry(b"a"), entry(b"a")],
        [entry(b"a", MODE_SYMLINK), entry(b"a/b")],
        [entry(b"d", MODE_TREE), entry(b"d/.git", MODE_TREE)],
        [entry(b"l", MODE_SYMLINK, MAX_SYMLINK_BYTES + 1)],
        [entry(b"l", MODE_SYMLINK, 0)],
    ):
        assert input_violation(entries) is not None


OLD, NEW = "1" * 40, "2" * 40


def judge(*changes: Change, links: dict[bytes, str] | None = None, **targets: bytes) -> str | None:
    """The rule broken; *targets* maps ``o`` + digit to the target of that digit's id."""
    contents = {name[1:] * 40: target for name, target in targets.items()}
    result = [TreeEntry(MODE_SYMLINK, name, path) for path, name in (links or {}).items()]
    assert link_ids(changes, result) <= contents.keys()
    violation = changes_violation(changes, result, contents)
    return violation.rule if violation else None


def test_a_change_is_judged_by_what_it_adds() -> None:
    assert judge(Change(b"a\\b", MODE_FILE, OLD, MODE_FILE, NEW)) is None
    assert judge(Change(b"a\\b", 0, "", MODE_FILE, NEW)) == "path"
    assert judge(Change(b".git/x", MODE_FILE, OLD, 0, "")) is None
    assert judge(Change(b".git/x", MODE_FILE, OLD, MODE_FILE, NEW)) == "path"
    assert judge(Change(b"m", MODE_GITLINK, OLD, 0, "")) is None
    assert judge(Change(b"m", MODE_GITLINK, OLD, MODE_GITLINK, NEW)) == "submodule"
    assert judge(Change(b"m", 0, "", MODE_GITLINK, NEW)) == "submodule"
    assert judge(Change(b"m", 0, "", 0o100600, NEW)) == "path"


def test_a_link_that_escaped_before_may_stay_but_not_another() -> None:
    touched = Change(b"other", 0, "", MODE_SYMLINK, "3" * 40)
    links = {b"old": OLD, b"other": "3" * 40}
    assert judge(touched, links=links, o1=b"/abs", o3=b"fine") is None
    assert judge(touched, links=links, o1=b"/abs", o3=b"old/x") == "symlink"
    retargeted = Change(b"old", MODE_SYMLINK, NEW, MODE_SYMLINK, OLD)
    assert judge(retargeted, links={b"old": OLD}, o1=b"/b", o2=b"/a") == "symlink"


def test_removing_a_link_can_let_another_one_escape() -> None:
    """``x → d/../../y`` stays inside while ``d`` is a link to ``p/q/r``."""
    removed = Change(b"d", MODE_SYMLINK, NEW, MODE_TREE, OLD)
    assert judge(removed, links={b"x": "3" * 40}, o2=b"p/q/r", o3=b"d/../../y") == "symlink"


def test_a_path_must_not_run_through_a_link_where_case_folds() -> None:
    added = Change(b"LINK/x", 0, "", MODE_FILE, NEW)
    assert judge(added, links={b"link": OLD}, o1=b"dir") == "duplicate"
    assert judge(added, links={b"lin": OLD}, o1=b"dir") is None
    link = Change(b"Dir", 0, "", MODE_SYMLINK, OLD)
    assert judge(link, links={b"Dir": OLD}, o1=b"x") is None


def test_listings_and_comparisons_are_read_exactly() -> None:
    listing = f"100644 blob {OLD}      12\ta b\n\x00120000 blob {NEW}\tl\0".encode()
    assert parse_listing(listing) == [
        TreeEntry(MODE_FILE, OLD, b"a b\n", 12),
        TreeEntry(MODE_SYMLINK, NEW, b"l"),
    ]
    raw = f":100644 000000 {OLD} {'0' * 40} D\0gone\0:000000 120000 {'0' * 40} {NEW} A\0n\0"
    assert parse_changes(raw.encode()) == [
        Change(b"gone", MODE_FILE, OLD, 0, "0" * 40),
        Change(b"n", 0, "0" * 40, MODE_SYMLINK, NEW),
    ]
    with pytest.raises(RefusedError):
        parse_listing(b"100644 blob xyz\tname\0")
    with pytest.raises(RefusedError):
        parse_changes(b":100644 100644 x y M\0name\0")


def test_too_many_entries_are_refused_before_one_is_looked_at() -> None:
    for parse, each in (parse_listing, 1), (parse_changes, 2):
        with pytest.raises(RefusedError, match=r"entries, \d+ are allowed") as refused:
            parse(b"\0" * (each * MAX_TREE_ENTRIES + 1))
        assert refused.value.code == "too_many_entries"
    with pytest.raises(RefusedError, match="2 entries, 1 are allowed"):
        parse_listing(b"\0\0", max_entries=1)


@given(st.binary(max_size=300))
def test_nothing_that_a_path_holds_reaches_a_terminal(path: bytes) -> None:
    shown = printable(path)
    assert shown.isprintable()
    assert len(shown) <= 202


@given(st.binary(max_size=60))
def test_rules_answer_for_any_bytes(path: bytes) -> None:
    structure_violation(path)
    portability_violation(path)
    is_dotgit(path)
