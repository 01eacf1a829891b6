"""Whatever a program leaves in its directory goes, and nothing outside of it is touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_edges.tree_removal import remove_tree
from needs import tmpfs

pytestmark = pytest.mark.requirement("B-53")

ORDINARY = 61_235
DEEP = 2_100
"""Far more levels than a path may have characters for, or Python frames."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    return tree


def test_files_and_directories_go(tree: Path) -> None:
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").write_text("x")
    (tree / "1").mkdir()
    (tree / "2").write_text("a name that the removal might have wanted")
    os.mkfifo(tree / "a" / "pipe")
    assert remove_tree(tree) is True
    assert not tree.exists()
    assert remove_tree(tree) is False


def test_links_are_not_followed(tree: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (tree / "link").symlink_to(outside)
    (tree / "inner").mkdir()
    (tree / "inner" / "up").symlink_to("../..")
    (tree / "inner" / "file").symlink_to(outside / "kept")
    assert remove_tree(tree)
    assert (outside / "kept").read_text() == "kept"


def test_a_link_in_its_place_is_no_tree(tree: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)
    with pytest.raises(OSError):
        remove_tree(link)
    assert tree.exists()


def test_depth_is_no_obstacle(tree: Path) -> None:
    directory = os.open(tree, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("d", dir_fd=directory)
        inner = os.open("d", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = inner
    os.close(directory)
    assert remove_tree(tree)


@pytest.mark.parametrize("mode", [0o000, 0o500, 0o300])
def test_modes_are_no_obstacle_to_their_owner(mode: int) -> None:
    with tempfile.TemporaryDirectory() as found:
        Path(found).chmod(0o777)
        tree = Path(found) / "tree"

        def make_and_remove() -> bool:
            inner = tree / "a" / "b" / "c"
            inner.mkdir(parents=True)
            (inner / "file").write_text("x")
            for directory in (inner, inner.parent, inner.parent.parent, tree):
                directory.chmod(mode)
            return remove_tree(tree)

        assert as_ordinary_user(make_and_remove)
        assert not tree.exists()


def as_ordinary_user(function: Callable[[], bool]) -> bool:
    """In a child without root's privileges, whom modes stop."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(ORDINARY)
                os.setuid(ORDINARY)
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def test_what_cannot_be_removed_is_said_and_goes_once_it_can(tree: Path) -> None:
    with tmpfs(tree / "a"), pytest.raises(OSError):
        remove_tree(tree)
    assert remove_tree(tree)
