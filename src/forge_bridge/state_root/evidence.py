"""``build-logs/`` and ``attestations/``: what is kept of an image key, for the operator.

One directory a key, files of mode 0600 in it.  A log is replaced alone, attestations as a set: a
reader sees all of them or none.  What stands in the place of such a directory and is none was put
there by somebody else: it is never followed, and gives way.
"""

from __future__ import annotations

import re
import secrets
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from forge_bridge.state_root.directory import DIRECTORY_MODE, prepare_part
from forge_bridge.state_root.images import IMAGE_KEY
from forge_core.errors import ForgeError, RefusedError
from forge_core.image_ports import Evidence
from forge_core.image_retention import KeptEvidence
from forge_edges.durable_file import (
    TEMPORARY_PREFIX,
    create_file,
    disk_errors,
    on_disk,
    read_file,
    replace_file,
    sweep_temporary_files,
    sync_directory,
)

MAX_FILE_BYTES: Final = 64 << 20

_NAME: Final = re.compile(r"[a-z][a-z0-9.-]{0,63}")

logger = structlog.get_logger(__name__)


class EvidenceStore:
    """The files of each image key.

    Every method may raise DiskUnusable.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(self, image_key: str, document: Evidence) -> None:
        """Write or replace one file of the key."""
        await on_disk(self._put, self._path(image_key), document)

    async def put_set(self, image_key: str, documents: Sequence[Evidence]) -> None:
        """Replace everything of the key by these, in one step.

        A crash in the middle of a replacement can leave none of them, never a mixture.
        """
        await on_disk(self._put_set, self._path(image_key), documents)

    async def read(self, image_key: str) -> tuple[Evidence, ...]:
        """Everything of a key; nothing where nothing is kept.

        :raises RefusedError: code ``file_too_large``, or ``path_refused``.
        """
        return await on_disk(self._read, self._path(image_key))

    async def kept(self) -> tuple[KeptEvidence, ...]:
        """Every key that something is kept of, since when, and its size as it is on disk."""
        return await on_disk(self._kept)

    async def remove(self, image_key: str) -> None:
        """Remove everything of a key; that it is gone already is success."""
        await on_disk(self._remove, self._path(image_key))

    def tidy(self) -> None:
        """Sweep away what a crash left unfinished; blocks."""
        with disk_errors("list", self._directory):
            paths = sorted(self._directory.iterdir())
        for path in paths:
            if path.name.startswith(TEMPORARY_PREFIX):
                _discard(path)
            elif IMAGE_KEY.fullmatch(path.name) and _is_directory(path):
                with suppress(ForgeError):  # it is in nobody's way
                    sweep_temporary_files(path)

    def _path(self, image_key: str) -> Path:
        assert IMAGE_KEY.fullmatch(image_key), image_key
        return self._directory / image_key

    def _put(self, directory: Path, document: Evidence) -> None:
        if not _is_directory(directory):
            _discard(directory)
        prepare_part(directory)
        replace_file(_file(directory, document), document.content)

    def _put_set(self, directory: Path, documents: Sequence[Evidence]) -> None:
        fresh, old = self._unfinished(), self._unfinished()
        try:
            with disk_errors("write", directory):
                fresh.mkdir(mode=DIRECTORY_MODE)
                for document in documents:
                    create_file(_file(fresh, document), document.content)
                if _kind(directory) is not None:
                    directory.rename(old)
                fresh.rename(directory)
                sync_directory(self._directory)
        finally:
            for left in (fresh, old):
                _discard(left)

    def _read(self, directory: Path) -> tuple[Evidence, ...]:
        with disk_errors("list", directory):
            if _kind(directory) is None:
                return ()
            if not _is_directory(directory):
                raise RefusedError(
                    f"cannot read {directory}: it is not a directory", code="path_refused"
                )
            paths = sorted(directory.iterdir())
        names = [path for path in paths if _NAME.fullmatch(path.name)]
        return tuple(Evidence(path.name, read_file(path, MAX_FILE_BYTES)) for path in names)

    def _kept(self) -> tuple[KeptEvidence, ...]:
        with disk_errors("list", self._directory):
            paths = [p for p in self._directory.iterdir() if IMAGE_KEY.fullmatch(p.name)]
            return tuple(filter(None, map(_look_at, paths)))

    def _remove(self, directory: Path) -> None:
        away = self._unfinished()
        with disk_errors("remove", directory):
            try:
                directory.rename(away)
            except FileNotFoundError:
                return
            sync_directory(self._directory)
        _discard(away)

    def _unfinished(self) -> Path:
        return self._directory / f"{TEMPORARY_PREFIX}{secrets.token_hex(16)}"


def _file(directory: Path, document: Evidence) -> Path:
    assert _NAME.fullmatch(document.name), document.name
    return directory / document.name


def _look_at(path: Path) -> KeptEvidence | None:
    """None: it is gone, or another set takes its place at this moment."""
    try:
        found = path.lstat()
        size_bytes = found.st_size
        if stat.S_ISDIR(found.st_mode):
            size_bytes = sum(file.lstat().st_size for file in path.iterdir())
    except FileNotFoundError:
        return None
    return KeptEvidence(path.name, found.st_mtime_ns // 1_000_000, size_bytes)


def _kind(path: Path) -> int | None:
    """The type bits of the mode of what is there, links not followed; None: nothing."""
    with disk_errors("look at", path):
        try:
            return stat.S_IFMT(path.lstat().st_mode)
        except FileNotFoundError:
            return None


def _is_directory(path: Path) -> bool:
    return _kind(path) == stat.S_IFDIR


def _discard(path: Path) -> None:
    """Remove whatever it is; what resists stays for the next sweep."""
    try:
        with disk_errors("remove", path):
            if _is_directory(path):
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except ForgeError as error:
        logger.error("cannot discard what is not needed", error=str(error))
