"""Real repositories for the tests of the Git edges, and what is on disk before and after."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.output_exchange import (
    HelperReply,
    attempt_ref,
    helper_request,
    parse_helper_reply,
)
from forge_core.ports import ImportedOutput
from forge_edges.git import tree_listing
from forge_edges.git_import import ImportLimits, import_bundle
from forge_edges.git_input import ensure_commit
from forge_edges.workspace_archive import workspace_archive

REF = attempt_ref("att-1", 7)
HELPER = (Path(__file__).parents[2] / "src" / "forge_supervisor" / "bundle.py").read_text()
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "1700000000 +0000",
    "GIT_COMMITTER_DATE": "1700000000 +0000",
}


def git(directory: Path, *arguments: str, data: bytes = b"") -> bytes:
    """Standard output of an ordinary Git, as a user would run it."""
    ran = subprocess.run(
        ["git", *arguments], cwd=directory, env=ENVIRONMENT, input=data, capture_output=True
    )
    assert ran.returncode == 0, (arguments, ran.stderr)
    return ran.stdout


def word(directory: Path, *arguments: str, data: bytes = b"") -> str:
    return git(directory, *arguments, data=data).decode().strip()


def on_disk(directory: Path) -> dict[str, tuple[int, int, str]]:
    """Every path below *directory*: mode, time of change, digest of the content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        plain = path.is_file() and not path.is_symlink()
        content = path.read_bytes() if plain else b""
        found[str(path.relative_to(directory))] = (
            status.st_mode,
            status.st_mtime_ns,
            hashlib.sha256(content).hexdigest(),
        )
    return found


async def stream(data: bytes, size: int = 4096) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@dataclass(frozen=True)
class Project:
    """An operator's clone, the store that it feeds, and the input commit."""

    clone: Path
    store: Path
    commit: str

    async def archive(self, *, max_bytes: int = 1 << 30, max_entries: int = 10_000) -> bytes:
        chunks = workspace_archive(
            self.store,
            self.commit,
            uid=os.getuid(),
            gid=os.getgid(),
            max_bytes=max_bytes,
            max_entries=max_entries,
        )
        return b"".join([chunk async for chunk in chunks])

    async def unpack(self, directory: Path) -> Path:
        """The workspace as a container gets it."""
        archive = await self.archive()
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            # Python 3.11.2 (Debian 12) has no filters yet.
            has_filters = hasattr(tarfile, "data_filter")
            trusted: dict[str, Any] = {"filter": "fully_trusted"} if has_filters else {}
            tar.extractall(directory, **trusted)  # noqa: S202 - ours, into tmp
        return directory

    async def bundle(
        self, workspace: Path, *, max_bytes: int = 1 << 28, max_files: int = 10_000
    ) -> tuple[HelperReply, bytes]:
        """What the helper makes of *workspace*, run as it is in its container."""
        request = helper_request(
            await tree_listing(self.store, self.commit),
            input_commit=self.commit,
            ref=REF,
            author_name="Forge",
            author_email="forge@example.org",
            date_seconds=1_700_000_000,
            message="Result of attempt att-1",
            max_bytes=max_bytes,
            max_files=max_files,
        )
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", HELPER, str(workspace)],
            input=request,
            env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
            capture_output=True,
        )
        assert ran.returncode == 0, ran.stderr
        line, _, bundle = ran.stdout.partition(b"\n")
        return parse_helper_reply(line), bundle

    async def take(
        self, bundle: bytes, claimed: str, limits: ImportLimits | None = None
    ) -> ImportedOutput:
        return await import_bundle(
            self.store,
            stream(bundle),
            input_commit=self.commit,
            bundle_ref=REF,
            claimed_commit=claimed,
            target_ref=REF,
            limits=limits,
        )


def make_clone(directory: Path, object_format: str = "sha1") -> Path:
    """A clone with two commits, every kind of tree entry, and attributes that want to act."""
    directory.mkdir(parents=True)
    git(directory, "init", "-q", "-b", "main", f"--object-format={object_format}")
    (directory / "README").write_bytes(b"$Id$ $Format:%H$\n")
    (directory / "dir/deep").mkdir(parents=True)
    (directory / "objects").mkdir()
    (directory / "objects/file").write_text("not Git's\n")
    (directory / "dir/inner").write_text("inner\n")
    (directory / "dir/deep/file").write_text("deep\n")
    (directory / "dir/run").write_text("#!/bin/sh\n")
    (directory / "dir/run").chmod(0o755)
    (directory / "link").symlink_to("dir/inner")
    (directory / "dir/absolute").symlink_to("/dev/null")
    (directory / ".gitattributes").write_text(
        "* ident text eol=crlf export-subst\ndir export-ignore\n"
    )
    (directory / ".gitignore").write_text("*.o\nbuild/\n")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "one")
    submodule = word(directory, "rev-parse", "HEAD")
    (directory / "module").mkdir()
    git(directory, "update-index", "--add", "--cacheinfo", f"160000,{submodule},module")
    (directory / "second").write_text("2\n")
    git(directory, "add", "second")
    git(directory, "commit", "-qm", "two")
    return directory


async def make_project(directory: Path, object_format: str = "sha1") -> Project:
    clone = make_clone(directory / "clone", object_format)
    store = directory / "state" / "repositories" / "project.git"
    commit = word(clone, "rev-parse", "HEAD")
    await ensure_commit(clone, store, commit)
    return Project(clone, store, commit)
