"""Whether a directory may hold the state of a runner, and how its parts are made.

What is refused names the command that mends it (storage.md).
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Final

from forge_core.errors import RefusedError
from forge_edges.durable_file import disk_errors, sync_directory

DIRECTORY_MODE: Final = 0o700
_LOCAL_ELSEWHERE: Final = "set FORGE_SANDBOX_STATE_ROOT to a directory on a local disk"
_MOUNT_ESCAPE: Final = re.compile(r"\\([0-7]{3})")

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
        "vboxsf",
        "vmhgfs",
    }
)
"""Where a lock or a sync of one machine says nothing to, or of, the other (flock(2), NOTES)."""

_LOCAL_FUSE: Final = frozenset({"fuseblk", "fuse.fuse-overlayfs"})


def prepare_root(path: Path) -> None:
    """Make the state root when it is missing, and make sure that it is fit.

    :raises RefusedError: code ``state_root_unfit``; the message holds the remedy.
    :raises DiskUnusable: it could not be made.
    """
    try:
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise _unfit(
            path, "its parent does not exist", f"mkdir -p {_quoted(path.parent)}"
        ) from None
    except OSError as error:
        with disk_errors("make the state root", path):
            raise error from None
    else:
        with disk_errors("make the state root", path):
            sync_directory(path.parent)
    _check(path)


def prepare_part(path: Path) -> None:
    """Make a directory below the root when it is missing; raises like :func:`prepare_root`."""
    with disk_errors("make", path):
        try:
            path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError:
            if not stat.S_ISDIR(path.lstat().st_mode):
                remedy = f"mv {_quoted(path)} {_quoted(path)}.away"
                raise _unfit(path, "it is not a directory", remedy) from None
        else:
            sync_directory(path.parent)


def _check(path: Path) -> None:
    if path.is_symlink():
        raise _unfit(
            path,
            "it is a symbolic link",
            f"set FORGE_SANDBOX_STATE_ROOT to {_quoted(path.resolve())}",
        )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise _unfit(path, "it is not a directory", _LOCAL_ELSEWHERE) from None
        if error.errno == errno.EACCES:
            raise _not_owned(path) from None
        with disk_errors("open the state root", path):
            raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _not_owned(path)
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise _unfit(
                path,
                f"others may enter it (mode {stat.S_IMODE(status.st_mode):04o})",
                f"chmod 700 {_quoted(path)}",
            )
        kind = file_system_type(descriptor)
    finally:
        os.close(descriptor)
    if kind is not None and not is_local(kind):
        raise _unfit(path, f"file system {kind} cannot be relied on for locks", _LOCAL_ELSEWHERE)


def is_local(file_system: str) -> bool:
    """Whether flock, rename and fsync mean on it what they mean on a local disk.

    A file system in user space is what its program makes of it, so only known ones count.
    """
    if file_system.startswith("fuse"):
        return file_system in _LOCAL_FUSE
    return file_system not in NETWORK_FILE_SYSTEMS


def file_system_type(descriptor: int) -> str | None:
    """The name of the file system that holds an open file; None when /proc does not say.

    By mount id, which names exactly one mount however they are stacked (proc_pid_fdinfo(5),
    proc_pid_mountinfo(5)); statfs(2) would not tell sshfs from a local FUSE file system.
    """
    try:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text("utf-8")
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    found = re.search(r"^mnt_id:\s*(\d+)$", facts, re.MULTILINE)
    if found is None:
        return None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ", 1)[0] == found[1] and after:
            kind = after.split(" ", 1)[0]
            return _MOUNT_ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), kind)
    return None


def _not_owned(path: Path) -> RefusedError:
    user = os.geteuid()
    return _unfit(path, f"it is not owned by user {user}", f"chown -R {user} {_quoted(path)}")


def _unfit(path: Path, reason: str, remedy: str) -> RefusedError:
    return RefusedError(
        f"cannot use {path} as state root: {reason}; {remedy}", code="state_root_unfit"
    )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
