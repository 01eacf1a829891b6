"""What goes into the disk of a virtual machine, and what stays of those before."""

from __future__ import annotations

from pathlib import Path

import pytest
from lib.machine_image import FILES, copy_file, remove_others

UNITS = FILES / "etc" / "systemd" / "system"


@pytest.mark.parametrize(("theirs", "ours"), [(0o600, 0o644), (0o664, 0o644), (0o700, 0o755)])
def test_files_have_modes_of_their_own(tmp_path: Path, theirs: int, ours: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("content")
    source.chmod(theirs)
    copy_file(source, target)
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("content", ours)


def test_only_the_newest_disk_stays(tmp_path: Path) -> None:
    for name in ("old", "broken.partial", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "root.img").touch()
    remove_others(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "root.img").exists()


def test_only_the_host_side_gets_to_the_engine() -> None:
    """QEMU's user network: its forwarded connections come from the gateway of the machine."""
    api = (UNITS / "forge-api.service").read_text()
    network = (UNITS / "forge-network.service").read_text()
    (gateway,) = (
        line.rpartition(" ")[2] for line in network.splitlines() if "route add default" in line
    )
    assert f",range={gateway}/32 " in api
