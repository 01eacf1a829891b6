"""Makes one commit of what an agent left in its workspace; runs in the helper container.

``/usr/bin/python3 -I -S -c <this source>``, no network, the workspace mounted read-only at
/workspace (or the one argument), a tmpfs at /tmp.  Standard input: one JSON line and the listing
of the input commit (``git ls-tree -r -t -z``).  Standard output: one JSON line, then a bundle
when there is a result.

The workspace is hostile data.  Its ``.git`` directories, configuration, hooks, attributes and
filters are never read: the comparison with the listing, the trees, the commit and the pack are
made here.  Git itself answers one question only, which untracked paths ``.gitignore`` files
hide, from a scratch repository, and only where there is one.  Directories are opened
one component at a time without following links.  Blobs are read twice, hashed and then packed,
and must be the same both times.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import zlib

TYPE_CHECKING = False  # importing typing costs milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

    Entry = tuple[int, str]
    Listing = dict[bytes, Entry]
    Hash = Callable[[bytes], "hashlib._Hash"]
    Status = tuple[int, int]  # st_mode, st_size: a whole os.stat_result is thrice the size
    Candidate = tuple[bytes, Status]

WORKSPACE = b"/workspace"
GIT = "/usr/bin/git"
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 16
MAX_LISTING_BYTES = 256 << 20
MAX_PATHS_SEEN = 500_000  # about 300 MB of the helper's memory
MAX_BYTES_READ = 32 << 30  # to compare: a hole in a file costs its owner nothing, its hash does
MAX_DEPTH = 256
MAX_IGNORE_FILE_BYTES = 1 << 20
MAX_WARNINGS = 20
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE, EXECUTABLE, SYMLINK, GITLINK, TREE = 0o100644, 0o100755, 0o120000, 0o160000, 0o040000
COMMIT_TYPE, TREE_TYPE, BLOB_TYPE = 1, 2, 3


class Refused(Exception):  # noqa: N818 - says what is the case
    """No output is made of this workspace."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(detail)
        self.rule = rule


def object_id(new: Hash, kind: bytes, content: bytes) -> str:
    """The id of a whole object of *kind* in the hash *new*: gitformat-pack(5)."""
    return new(b"%s %d\0" % (kind, len(content)) + content).hexdigest()


class Beneath:
    """Opens paths under one directory, one component at a time, never through a link."""

    def __init__(self, root: bytes) -> None:
        self._root = os.open(root, DIRECTORY_FLAGS)
        self._path = b""
        self._directory = self._root

    def directory(self, path: bytes) -> int:
        """A descriptor of the directory *path*, valid until the next call."""
        if path == self._path:
            return self._directory
        current = self._root
        for component in path.split(b"/") if path else ():
            inner = os.open(component, DIRECTORY_FLAGS, dir_fd=current)
            if current != self._root:
                os.close(current)
            current = inner
        if self._directory != self._root:
            os.close(self._directory)
        self._path, self._directory = path, current
        return current

    def content(self, path: bytes, mode: int) -> Iterator[bytes]:
        """The chunks of the regular file *path*, or the target of the symbolic link."""
        parent, _, name = path.rpartition(b"/")
        directory = self.directory(parent)
        if mode == SYMLINK:
            yield os.readlink(name, dir_fd=directory)
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refused("changed", f"{show(path)} changed while it was read")
            while chunk := os.read(descriptor, CHUNK_BYTES):
                yield chunk
        finally:
            os.close(descriptor)


class Ignores:
    """Which paths ``.gitignore`` files hide: ``git check-ignore`` from a scratch repository."""

    def __init__(self, workspace: bytes) -> None:
        self._workspace = workspace
        self._scratch = ""
        self.needed = False

    def hidden(self, paths: list[bytes]) -> set[bytes]:
        """Those of *paths* that are ignored; the directories above them are not."""
        if not self.needed or not paths:
            return set()
        import subprocess  # costs milliseconds that most workspaces can save

        safe = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
        answer = subprocess.run(
            [GIT, *safe, "check-ignore", "--stdin", "-z", "--no-index"],
            env=self._environment(),
            cwd=self._workspace,
            input=b"".join(b"./%s\0" % path for path in paths),  # "./" disarms pathspec magic
            capture_output=True,
        )
        if answer.returncode not in (0, 1):
            raise Refused("ignore", answer.stderr.decode("utf-8", "replace").strip())
        return {path[2:] for path in answer.stdout.split(b"\0")[:-1]}

    def _environment(self) -> dict[str, str]:
        if not self._scratch:
            import tempfile

            self._scratch = tempfile.mkdtemp()
            for name in ("objects", "refs"):
                os.mkdir(os.path.join(self._scratch, name))
            with open(os.path.join(self._scratch, "HEAD"), "w") as head:
                head.write("ref: refs/heads/none\n")
        fixed = (
            "PATH=/usr/bin:/bin LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null "
            "GIT_CONFIG_SYSTEM=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_OPTIONAL_LOCKS=0"
        )
        return {
            **dict(pair.split("=", 1) for pair in fixed.split()),
            **dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "GIT_DIR"), self._scratch),
            "GIT_WORK_TREE": os.fsdecode(self._workspace),
        }

    def close(self) -> None:
        """Remove the scratch repository."""
        if self._scratch:
            import shutil

            shutil.rmtree(self._scratch)


class Snapshot:
    """What the workspace holds, compared with what went into it."""

    def __init__(
        self, workspace: bytes, listing: Listing, new: Hash, limits: tuple[int, int]
    ) -> None:
        self._beneath = Beneath(workspace)
        self.new = new
        self.max_files, self.max_bytes = limits
        self.warnings: list[str] = []
        self.changed: Listing = {}
        self.sizes: dict[bytes, int] = {}  # of the new blobs, by a path that has it
        self.total_bytes = 0
        self.ignores = Ignores(workspace)
        self._before = {path: entry for path, entry in listing.items() if entry[0] != TREE}
        self._known = {name for mode, name in self._before.values() if mode != GITLINK}
        self._tracked = {parent for path in self._before for parent in parents(path)}
        self._seen_paths = self._read_bytes = 0
        self._present: set[bytes] = set()

    def take(self) -> list[bytes]:
        """Walk the workspace level by level; fill ``changed``, return the removed paths."""
        level = [b""]
        for _ in range(MAX_DEPTH):
            level, candidates = self._scan(level)
            hidden = self.ignores.hidden([path for path, _ in candidates])
            for path, status in candidates:
                if path in hidden:
                    continue
                if stat.S_ISDIR(status[0]):
                    level.append(path)
                else:
                    self._compare(path, status)
            if not level:
                return sorted(self._before.keys() - self._present)
        raise Refused("path", f"directories are nested deeper than {MAX_DEPTH}")

    def _scan(self, directories: list[bytes]) -> tuple[list[bytes], list[Candidate]]:
        """The tracked directories one level down, and the untracked paths there."""
        tracked: list[bytes] = []
        candidates: list[Candidate] = []
        for directory in directories:
            names = self._names(directory)
            if directory and directory not in self._tracked and b".git" in names:
                self.warn("nested repository left out", directory)
                continue
            for name, status in sorted(names.items()):
                if name == b".git":
                    continue
                path = directory + b"/" + name if directory else name
                self._sort(path, status, tracked, candidates)
        return tracked, candidates

    def _sort(
        self,
        path: bytes,
        status: Status,
        tracked: list[bytes],
        candidates: list[Candidate],
    ) -> None:
        before = self._before.get(path)
        if stat.S_ISDIR(status[0]):
            if before is not None and before[0] == GITLINK:
                self._present.add(path)
            elif path in self._tracked:
                tracked.append(path)
            else:
                candidates.append((path, status))
        elif stat.S_IFMT(status[0]) not in (stat.S_IFREG, stat.S_IFLNK):
            self.warn("special file left out", path)
        elif before is not None and before[0] != GITLINK:
            self._compare(path, status)
        else:
            candidates.append((path, status))

    def _names(self, directory: bytes) -> dict[bytes, Status]:
        names: dict[bytes, Status] = {}
        with os.scandir(self._beneath.directory(directory)) as found:
            for entry in found:
                self._seen_paths += 1
                if self._seen_paths > MAX_PATHS_SEEN:
                    raise Refused("files", f"more than {MAX_PATHS_SEEN} paths in the workspace")
                status = entry.stat(follow_symlinks=False)
                names[os.fsencode(entry.name)] = status.st_mode, status.st_size
        ignore = names.get(b".gitignore")
        if ignore is not None and not stat.S_ISLNK(ignore[0]):
            if not stat.S_ISREG(ignore[0]) and not stat.S_ISDIR(ignore[0]):
                raise Refused("ignore", f"a .gitignore in {show(directory)} is no file")
            if ignore[1] > MAX_IGNORE_FILE_BYTES:
                raise Refused("ignore", f"the .gitignore in {show(directory)} is too large")
            self.ignores.needed = True
        return names

    def blob_id(
        self, path: bytes, mode: int, size: int, take: Callable[[bytes], None] | None = None
    ) -> str:
        """The id of the file or link *path* of *size* bytes; *take* gets each chunk as well."""
        digest = self.new(b"blob %d\0" % size)
        left = size
        for chunk in self._beneath.content(path, mode):
            left -= len(chunk)
            digest.update(chunk)
            if take is not None and left >= 0:
                take(chunk)
        if left:
            raise Refused("changed", f"{show(path)} changed while it was read")
        return digest.hexdigest()

    def _compare(self, path: bytes, status: Status) -> None:
        st_mode, size = status
        mode = EXECUTABLE if st_mode & 0o100 else FILE
        if stat.S_ISLNK(st_mode):
            mode = SYMLINK
        self._read_bytes += size
        too_big = size > self.max_bytes and path not in self._before
        if too_big or self._read_bytes > MAX_BYTES_READ:
            raise Refused("size", f"{show(path)} has {size} bytes, {self._read_bytes} in all")
        identity = self.blob_id(path, mode, size)
        self._present.add(path)
        if self._before.get(path) == (mode, identity):
            return
        self.changed[path] = (mode, identity)
        if len(self.changed) > self.max_files:
            raise Refused("files", f"more than {self.max_files} files changed")
        if identity not in self._known:
            self._known.add(identity)
            self.sizes[path] = size
            self.total_bytes += size
            if self.total_bytes > self.max_bytes:
                raise Refused("size", f"more than {self.max_bytes} bytes are new")

    def warn(self, what: str, path: bytes) -> None:
        """Note what is left out; the first few are enough."""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"{what}: {show(path)}")


def parents(path: bytes) -> list[bytes]:
    """Every directory above *path*, without the root."""
    found = []
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        found.append(path)
    return found


def show(path: bytes) -> str:
    """*path* for people."""
    return ascii(path.decode("utf-8", "backslashreplace"))[:200]


def parse_listing(data: bytes) -> Listing:
    """Path → (mode, id) of ``git ls-tree -r -t -z``; a mode is one that Git still writes."""
    listing = {}
    for line in data.split(b"\0")[:-1]:
        head, _, path = line.partition(b"\t")
        mode, _kind, identity = head.decode("ascii").split(" ")
        value = int(mode, 8)
        if stat.S_ISREG(value):
            value = EXECUTABLE if value & 0o100 else FILE
        listing[path] = (value, identity)
    return listing


def build_trees(
    listing: Listing, changed: Listing, removed: list[bytes], new: Hash
) -> tuple[str, dict[str, bytes]]:
    """The id of the result's root tree, and the new trees by id; unchanged subtrees are reused."""
    children: dict[bytes, Listing] = {b"": {}}
    for path, entry in listing.items():
        parent, _, name = path.rpartition(b"/")
        children.setdefault(parent, {})[name] = entry
    dirty = {b""}
    for path in removed:
        parent, _, name = path.rpartition(b"/")
        del children[parent][name]
        dirty.update(parents(path))
    for path, entry in changed.items():
        parent, _, name = path.rpartition(b"/")
        children.setdefault(parent, {})[name] = entry
        dirty.update(parents(path))
    known = {identity for mode, identity in listing.values() if mode == TREE}
    trees: dict[str, bytes] = {}
    root = ""
    for path in sorted(dirty, key=lambda path: (-path.count(b"/") - bool(path), path)):
        content = tree_content(children.get(path, {}))
        root = object_id(new, b"tree", content)
        if path and not content:
            detach(children, path)
            continue
        if root not in known:
            trees[root] = content
        if path:
            parent, _, name = path.rpartition(b"/")
            children.setdefault(parent, {})[name] = (TREE, root)
    return root, trees


def detach(children: dict[bytes, Listing], path: bytes) -> None:
    """Forget the directory *path*, now empty, unless a file has taken its name."""
    parent, _, name = path.rpartition(b"/")
    entry = children.get(parent, {}).get(name)
    if entry is not None and entry[0] == TREE:
        del children[parent][name]


def tree_content(entries: Listing) -> bytes:
    """A tree object: entries in order of their names, a directory's as if it ended in a slash."""
    ordered = sorted(entries.items(), key=lambda item: item[0] + b"/" * (item[1][0] == TREE))
    return b"".join(
        b"%o %s\0" % (mode, name) + bytes.fromhex(identity) for name, (mode, identity) in ordered
    )


def commit_content(header: dict[str, Any], tree: str) -> bytes:
    """The one commit; deterministic, since author, date and message are given."""
    author = "".join(c for c in header["author"]["name"] if c not in "<>\n\0")
    email = "".join(c for c in header["author"]["email"] if c not in "<>\n\0")
    who = f"{author} <{email}> {int(header['date'])} +0000"
    return (
        f"tree {tree}\nparent {header['inputCommit']}\nauthor {who}\ncommitter {who}\n\n"
        f"{header['message'].rstrip()}\n"
    ).encode()


class PackWriter:
    """A pack of whole objects, written as it comes: gitformat-pack(5)."""

    def __init__(self, out: IO[bytes], new: Hash, count: int) -> None:
        self._out = out
        self._digest = new(b"")
        self._write(b"PACK" + (2).to_bytes(4, "big") + count.to_bytes(4, "big"))

    def add(self, kind: int, content: bytes) -> None:
        """A whole object."""
        self.begin(kind, len(content))
        self.take(content)
        self.end()

    def begin(self, kind: int, size: int) -> None:
        """An object of *size* bytes: ``take`` them, then ``end``."""
        first, size = (kind << 4) | (size & 15), size >> 4
        head = bytearray()
        while size:
            head.append(first | 0x80)
            first, size = size & 0x7F, size >> 7
        head.append(first)
        self._write(bytes(head))
        self._deflate = zlib.compressobj(1)

    def take(self, chunk: bytes) -> None:
        """The next bytes of the object."""
        self._write(self._deflate.compress(chunk))

    def end(self) -> None:
        """The object is complete."""
        self._write(self._deflate.flush())

    def finish(self) -> None:
        """All objects are there: write the checksum."""
        self._out.write(self._digest.digest())
        self._out.flush()

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._out.write(data)


def write_bundle(
    out: IO[bytes],
    header: dict[str, Any],
    snapshot: Snapshot,
    commit: bytes,
    trees: dict[str, bytes],
) -> None:
    """A bundle with one prerequisite and one ref: gitformat-bundle(5)."""
    new = snapshot.new
    result = object_id(new, b"commit", commit)
    first = "# v3 git bundle\n@object-format=sha256\n" if len(result) == 64 else "# v2 git bundle\n"
    out.write(f"{first}-{header['inputCommit']}\n{result} {header['ref']}\n\n".encode())
    pack = PackWriter(out, new, 1 + len(trees) + len(snapshot.sizes))
    pack.add(COMMIT_TYPE, commit)
    for content in trees.values():
        pack.add(TREE_TYPE, content)
    for path, size in snapshot.sizes.items():
        mode, identity = snapshot.changed[path]
        pack.begin(BLOB_TYPE, size)
        if snapshot.blob_id(path, mode, size, pack.take) != identity:
            raise Refused("changed", f"{show(path)} changed while it was read")
        pack.end()
    pack.finish()


def read_request(source: IO[bytes]) -> tuple[dict[str, Any], Listing]:
    """The header and the listing of the input commit."""
    header = json.loads(source.readline(MAX_HEADER_BYTES))
    data = source.read(min(header["listingBytes"], MAX_LISTING_BYTES))
    if len(data) != header["listingBytes"]:
        raise ValueError("the listing is cut short or too long")
    return header, parse_listing(data)


def answer(out: IO[bytes], **reply: object) -> None:
    """The one line that comes before any bundle."""
    out.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
    out.flush()


def main(workspace: bytes = WORKSPACE) -> int:
    """Exit status 0: answered, also when refused; 1: a bundle was begun and broken off."""
    out = sys.stdout.buffer
    header, listing = read_request(sys.stdin.buffer)
    new: Hash = hashlib.sha256 if len(header["inputCommit"]) == 64 else hashlib.sha1
    limits = (header["maxFiles"], header["maxBytes"])
    try:
        snapshot = Snapshot(workspace, listing, new, limits)
        try:
            removed = snapshot.take()
        finally:
            snapshot.ignores.close()
        files = len(removed) + len(snapshot.changed)
        if files > header["maxFiles"]:
            raise Refused("files", f"more than {header['maxFiles']} files changed")
        root, trees = build_trees(listing, snapshot.changed, removed, new)
    except (Refused, OSError) as error:
        refused = {"rule": getattr(error, "rule", "read"), "detail": str(error)[:500]}
        answer(out, resultCommit=None, files=0, bytes=0, refused=refused)
        return 0
    commit = commit_content(header, root)
    result = object_id(new, b"commit", commit) if files else None
    new_bytes = snapshot.total_bytes
    answer(out, resultCommit=result, files=files, bytes=new_bytes, warnings=snapshot.warnings)
    try:
        if result is not None:
            write_bundle(out, header, snapshot, commit, trees)
    except (Refused, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(os.fsencode, sys.argv[1:])))
