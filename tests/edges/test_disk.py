"""The disk that admission watches: blocks and inodes, on a filesystem of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_edges.disk import FileSystemDisks, is_reachable
from needs import tmpfs

MIB = 2**20
pytestmark = pytest.mark.requirement("B-25")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB and 64 inodes."""
    with tmpfs(tmp_path / "small", "size=8m,nr_inodes=64") as path:
        yield path


async def test_blocks_count(small: Path) -> None:
    disk = FileSystemDisks((small,))
    assert (await disk.usage()).used_percent < 5
    (small / "half").write_bytes(bytes(4 * MIB))
    usage = await disk.usage()
    assert usage.used_percent == 50
    assert usage.free_bytes == 4 * MIB


async def test_a_disk_without_inodes_is_full(small: Path) -> None:
    disk = FileSystemDisks((small,))
    for n in range(62):
        (small / str(n)).touch()
    usage = await disk.usage()
    assert usage.used_percent >= 96
    assert usage.free_bytes > 7 * MIB


async def test_the_fullest_of_several_speaks_for_all(small: Path, tmp_path: Path) -> None:
    (small / "most").write_bytes(bytes(7 * MIB))
    both = await FileSystemDisks((tmp_path, small)).usage()
    assert both.used_percent >= 87
    assert both.free_bytes == MIB


async def test_a_path_that_is_gone_is_told(tmp_path: Path) -> None:
    assert not is_reachable(tmp_path / "nowhere")
    with pytest.raises(ForgeError, match="look at"):
        await FileSystemDisks((tmp_path / "nowhere",)).usage()
