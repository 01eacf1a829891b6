"""A virtual machine's disk: Debian with systemd, AppArmor and a rootless Docker Engine.

What it holds besides Debian's packages lies in ``lib/machine``, as it lies there, and in
``examples/apparmor``, as operators are told to install it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from lib.aptsources import choose_mirror, machine_sources
from lib.debian import install, own_suite, run
from lib.layout import REPOSITORY, BedError, say

VERSION = 2  # raise it when what is made changes though its files do not
SUITE = "trixie"
TOOLS = ("e2fsprogs", "mmdebstrap")
PACKAGES = (
    *("linux-image-cloud-amd64", "systemd-sysv", "dbus-user-session", "libpam-systemd", "udev"),
    *("docker.io", "rootlesskit", "slirp4netns", "uidmap"),
    *("apparmor", "iproute2", "iptables", "kmod", "socat"),
)
UNREAD = ("doc", "locale", "man")  # below /usr/share
FILES = Path(__file__).parent / "machine"
EXAMPLES = {
    "forge-sandbox": "etc/apparmor.d/forge-sandbox",
    "dockerd-with-apparmor": "usr/local/bin/dockerd-with-apparmor",
}
USER, USER_ID = "engine", 1001  # not that of sandboxes, which is 1000
ROOT_SIZE, DATA_SIZE = "3G", "8G"  # sparse
MAKE_TIMEOUT_S = 900


def machine_image(cache: Path) -> Path:
    """A folder with ``vmlinuz``, ``initrd`` and ``root.img``; made once, in a minute.

    :raises BedError: this machine is none that it could run on, or a package cannot be had.
    """
    if os.uname().machine != "x86_64":
        raise BedError(f"cannot make a virtual machine for {os.uname().machine}: only for x86_64")
    files = _files()
    parts = (VERSION, SUITE, PACKAGES, *((name, files[name].read_bytes()) for name in files))
    folder = cache / "machines" / hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    if folder.is_dir():
        return folder
    install(TOOLS, "make a virtual machine's disk")
    say("Making a virtual machine's disk from Debian's packages; this takes a minute")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    root = partial / "root"
    _install_debian(root)
    _add_files(root, files)
    for link, name in (("vmlinuz", "vmlinuz"), ("initrd.img", "initrd")):
        shutil.copy((root / link).resolve(), partial / name)
    make_disk(partial / "root.img", ROOT_SIZE, root)
    shutil.rmtree(root)
    partial.rename(folder)
    remove_others(folder)
    return folder


def remove_others(kept: Path) -> None:
    """What was made before, half a gigabyte each; a machine that runs holds its disk open."""
    for other in kept.parent.iterdir():
        if other != kept:
            shutil.rmtree(other)


def make_data_disk(path: Path) -> None:
    """A disk for the engine's data alone."""
    top = path.with_suffix(".top")
    (top / "engine").mkdir(parents=True, exist_ok=True)
    os.chown(top / "engine", USER_ID, USER_ID)
    make_disk(path, DATA_SIZE, top)
    shutil.rmtree(top)


def make_disk(path: Path, size: str, content: Path) -> None:
    """An ext4 file system with everything below ``content``."""
    run(["mke2fs", "-q", "-t", "ext4", "-d", str(content), str(path), size])


def copy_file(source: Path, target: Path) -> None:
    """The content, for everybody to read: the modes of a checkout are its owner's affair."""
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _files() -> Mapping[str, Path]:
    """Path in the machine to file, in the order of the paths."""
    ours = {str(path.relative_to(FILES)): path for path in FILES.rglob("*") if path.is_file()}
    ours |= {to: REPOSITORY / "examples/apparmor" / name for name, to in EXAMPLES.items()}
    return dict(sorted(ours.items()))


def _install_debian(root: Path) -> None:
    mirror = choose_mirror(machine_sources(), own_suite())
    run(
        [
            *("mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(PACKAGES)}"),
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNREAD),
            '--aptopt=APT::Install-Recommends "false"',
            *(SUITE, str(root), f"deb {mirror} {SUITE} main"),
        ],
        timeout_s=MAKE_TIMEOUT_S,
    )


def _add_files(root: Path, files: Mapping[str, Path]) -> None:
    for name, source in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        copy_file(source, target)
    inside = ["chroot", str(root)]
    run([*inside, "useradd", "--uid", str(USER_ID), "--create-home", USER])
    # As `loginctl enable-linger` does it: the user's services start with the machine.
    linger = root / "var/lib/systemd/linger"
    linger.mkdir(parents=True, exist_ok=True)
    (linger / USER).touch()
    (root / "data").mkdir()
    for service in ("docker.service", "docker.socket", "containerd.service"):
        run([*inside, "systemctl", "mask", "--quiet", service])
    units = [Path(name).name for name in files if name.startswith("etc/systemd/system/forge-")]
    run([*inside, "systemctl", "enable", "--quiet", *units])
    run([*inside, "systemctl", "enable", "--quiet", "--global", "docker.service"])
