"""Makes one commit of what an agent left in its workspace; runs in the helper container.

``/usr/bin/python3 -I -S -c <this source>``, no network, the workspace mounted read-only at
/workspace, a tmpfs at /tmp.  Standard input: one JSON line and the listing of the input commit
(``git ls-tree -r -t -z``).  Standard output: one JSON line, then a bundle when there is a result.

The workspace is hostile data.  Its ``.git`` directories, configuration, hooks, attributes and
filters are never read: the comparison with the listing, the trees, the commit and the pack are
made here.  Git itself answers one question only, which untracked paths ``.gitignore`` files
hide, from a scratch repository, and only where there is such a file.  Directories are opened
one component at a time without following links.  Blobs are read twice, hashed and then packed,
and must be the same both times.
"""

import hashlib
import json
import os
import stat
import sys
import zlib

WORKSPACE = b"/workspace"
GIT = "/usr/bin/git"
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 16
MAX_LISTING_BYTES = 256 << 20
MAX_PATHS_SEEN = 1_000_000
MAX_DEPTH = 256
MAX_IGNORE_FILE_BYTES = 1 << 20
MAX_WARNINGS = 20
FILE, EXECUTABLE, SYMLINK, GITLINK, TREE = 0o100644, 0o100755, 0o120000, 0o160000, 0o040000
COMMIT_TYPE, TREE_TYPE, BLOB_TYPE = 1, 2, 3


class Refused(Exception):
    """No output is made of this workspace."""

    def __init__(self, rule, detail):
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class Objects:
    """Object ids in the hash of the input commit: gitformat-pack(5), gitrepository-layout(5)."""

    def __init__(self, input_commit):
        self.sha256 = len(input_commit) == 64
        self.new = hashlib.sha256 if self.sha256 else hashlib.sha1

    def identify(self, kind, content):
        return self.new(b"%s %d\0" % (kind, len(content)) + content).hexdigest()

    def identify_file(self, descriptor, size, take=lambda chunk: None):
        """Hash *size* bytes as a blob, giving each chunk to *take* as well."""
        digest = self.new(b"blob %d\0" % size)
        left = size
        while left > 0:
            chunk = os.read(descriptor, min(left, CHUNK_BYTES))
            if not chunk:
                break
            left -= len(chunk)
            digest.update(chunk)
            take(chunk)
        if left or os.read(descriptor, 1):
            raise Refused("changed", "a file changed while it was read")
        return digest.hexdigest()


class Beneath:
    """Opens paths under one directory, one component at a time, never through a link."""

    def __init__(self, root):
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = b""
        self._directory = self._root

    def directory(self, path):
        """A descriptor of the directory *path*, valid until the next call."""
        if path == self._path:
            return self._directory
        current = self._root
        for component in path.split(b"/") if path else ():
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(component, flags, dir_fd=current)
            if current != self._root:
                os.close(current)
            current = inner
        if self._directory != self._root:
            os.close(self._directory)
        self._path, self._directory = path, current
        return current

    def file(self, path):
        """A descriptor and the status of the regular file *path*."""
        parent, _, name = path.rpartition(b"/")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self.directory(parent))
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise Refused("changed", "a file changed while it was read")
        return descriptor, status

    def target(self, path):
        """Where the symbolic link *path* points."""
        parent, _, name = path.rpartition(b"/")
        return os.readlink(name, dir_fd=self.directory(parent))


class Ignores:
    """Which paths Git ignores by ``.gitignore`` files: ``git check-ignore`` in a scratch repository."""

    BATCH_BYTES = 1 << 15  # fits a pipe, so that writing a batch never waits for its answers

    def __init__(self, workspace):
        self._workspace = workspace
        self._process = None
        self.needed = False

    def hidden(self, paths):
        """Those of *paths* that are ignored."""
        found = set()
        if not self.needed:
            return found
        batch, size = [], 0
        for path in paths:
            if batch and size + len(path) + 1 > self.BATCH_BYTES:
                found.update(self._ask(batch))
                batch, size = [], 0
            batch.append(path)
            size += len(path) + 1
        if batch:
            found.update(self._ask(batch))
        return found

    def _ask(self, batch):
        process = self._process or self._start()
        process.stdin.write(b"".join(path + b"\0" for path in batch))
        process.stdin.flush()
        for _ in batch:
            _source, _line, pattern, path = (self._field() for _ in range(4))
            if pattern and not pattern.startswith(b"!"):
                yield path

    def _field(self):
        while b"\0" not in self._answers:
            data = os.read(self._process.stdout.fileno(), CHUNK_BYTES)
            if not data:
                raise Refused("ignore", "git check-ignore ended early")
            self._answers += data
        field, _, self._answers = self._answers.partition(b"\0")
        return field

    def _start(self):
        import subprocess
        import tempfile

        scratch = os.path.join(tempfile.mkdtemp(), "scratch.git")
        os.makedirs(os.path.join(scratch, "objects"))
        os.makedirs(os.path.join(scratch, "refs"))
        with open(os.path.join(scratch, "HEAD"), "w") as head:
            head.write("ref: refs/heads/none\n")
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": scratch,
            "XDG_CONFIG_HOME": scratch,
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_DIR": scratch,
            "GIT_WORK_TREE": os.fsdecode(self._workspace),
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_FLUSH": "0",
        }
        safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
        options = ["check-ignore", "--stdin", "-z", "--verbose", "--non-matching", "--no-index"]
        self._answers = b""
        self._process = subprocess.Popen(
            [GIT, *safe, *options],
            env=environment,
            cwd=self._workspace,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self._process


class Snapshot:
    """What the workspace holds, compared with what went into it."""

    def __init__(self, workspace, listing, objects, limits):
        self.beneath = Beneath(workspace)
        self.objects = objects
        self.max_files, self.max_bytes = limits
        self.warnings = []
        self.changed = {}  # path → (mode, id)
        self.sizes = {}  # path → bytes of a new blob
        self.total_bytes = 0
        self._ignores = Ignores(workspace)
        self._before = {path: entry for path, entry in listing.items() if entry[0] != TREE}
        self._known = {identity for _, identity in self._before.values()}
        self._tracked = {parent for path in self._before for parent in parents(path)}
        self._seen_paths = 0
        self._present = set()

    def take(self):
        """Walk the workspace level by level; fill ``changed``, return the removed paths."""
        level = [b""]
        for _ in range(MAX_DEPTH):
            candidates, level = [], self._scan(level)
            level, candidates = level
            hidden = self._ignores.hidden(path for path, _ in candidates)
            for path, status in candidates:
                if path in hidden:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    level.append(path)
                else:
                    self._compare(path, status)
            if not level:
                return sorted(self._before.keys() - self._present)
        raise Refused("path", f"directories are nested deeper than {MAX_DEPTH}")

    def _scan(self, directories):
        """The tracked directories one level down, and the untracked paths there."""
        tracked, candidates = [], []
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

    def _sort(self, path, status, tracked, candidates):
        before = self._before.get(path)
        if stat.S_ISDIR(status.st_mode):
            if before is not None and before[0] == GITLINK:
                self._present.add(path)
            elif path in self._tracked:
                tracked.append(path)
            else:
                candidates.append((path, status))
        elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            self.warn("special file left out", path)
        elif before is not None and before[0] != GITLINK:
            self._compare(path, status)
        else:
            candidates.append((path, status))

    def _names(self, directory):
        names = {}
        with os.scandir(self.beneath.directory(directory)) as found:
            for entry in found:
                self._seen_paths += 1
                if self._seen_paths > MAX_PATHS_SEEN:
                    raise Refused("files", f"more than {MAX_PATHS_SEEN} paths in the workspace")
                name = os.fsencode(entry.name)
                names[name] = entry.stat(follow_symlinks=False)
        ignore = names.get(b".gitignore")
        if ignore is not None and not stat.S_ISLNK(ignore.st_mode):
            if not stat.S_ISREG(ignore.st_mode) and not stat.S_ISDIR(ignore.st_mode):
                raise Refused("ignore", f"a .gitignore in {show(directory)} is no file")
            if ignore.st_size > MAX_IGNORE_FILE_BYTES:
                raise Refused("ignore", f"the .gitignore in {show(directory)} is too large")
            self._ignores.needed = True
        return names

    def _compare(self, path, status):
        if stat.S_ISLNK(status.st_mode):
            target = self.beneath.target(path)
            mode, size = SYMLINK, len(target)
            identity = self.objects.identify(b"blob", target)
        else:
            descriptor, status = self.beneath.file(path)
            try:
                mode = EXECUTABLE if status.st_mode & 0o100 else FILE
                size = status.st_size
                if size > self.max_bytes and path not in self._before:
                    raise Refused("size", f"{show(path)} has {size} bytes")
                identity = self.objects.identify_file(descriptor, size)
            finally:
                os.close(descriptor)
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

    def warn(self, what, path):
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"{what}: {show(path)}")


def parents(path):
    """Every directory above *path*, without the root."""
    found = []
    while (cut := path.rfind(b"/")) > 0:
        path = path[:cut]
        found.append(path)
    return found


def show(path):
    """*path* for people."""
    return ascii(path.decode("utf-8", "backslashreplace"))[:200]


def parse_listing(data):
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


def build_trees(listing, changed, removed, objects):
    """The id of the result's root tree, and the new trees by id; unchanged subtrees are reused."""
    children = {b"": {}}
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
    trees = {}
    root = None
    for path in sorted(dirty, key=lambda path: (-path.count(b"/") - bool(path), path)):
        content = tree_content(children.get(path, {}))
        root = objects.identify(b"tree", content)
        if path and not content:
            detach(children, path)
            continue
        if root not in known:
            trees[root] = content
        if path:
            parent, _, name = path.rpartition(b"/")
            children.setdefault(parent, {})[name] = (TREE, root)
    return root, trees


def detach(children, path):
    """Forget the directory *path*, now empty, unless a file has taken its name."""
    parent, _, name = path.rpartition(b"/")
    entry = children.get(parent, {}).get(name)
    if entry is not None and entry[0] == TREE:
        del children[parent][name]


def tree_content(entries):
    """A tree object: entries in the order of their names, directories as if they ended in a slash."""
    ordered = sorted(entries.items(), key=lambda item: item[0] + b"/" * (item[1][0] == TREE))
    return b"".join(
        b"%o %s\0" % (mode, name) + bytes.fromhex(identity) for name, (mode, identity) in ordered
    )


def commit_content(header, tree):
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

    def __init__(self, out, objects, count):
        self._out = out
        self._digest = objects.new()
        self._write(b"PACK" + (2).to_bytes(4, "big") + count.to_bytes(4, "big"))

    def add(self, kind, content):
        self.begin(kind, len(content))
        self.take(content)
        self.end()

    def begin(self, kind, size):
        first, size = (kind << 4) | (size & 15), size >> 4
        head = bytearray()
        while size:
            head.append(first | 0x80)
            first, size = size & 0x7F, size >> 7
        head.append(first)
        self._write(bytes(head))
        self._deflate = zlib.compressobj(1)

    def take(self, chunk):
        self._write(self._deflate.compress(chunk))

    def end(self):
        self._write(self._deflate.flush())

    def finish(self):
        self._out.write(self._digest.digest())
        self._out.flush()

    def _write(self, data):
        self._digest.update(data)
        self._out.write(data)


def write_bundle(out, header, snapshot, commit, trees):
    """A bundle with one prerequisite and one ref: gitformat-bundle(5)."""
    objects = snapshot.objects
    result = objects.identify(b"commit", commit)
    first = "# v3 git bundle\n@object-format=sha256\n" if objects.sha256 else "# v2 git bundle\n"
    out.write(f"{first}-{header['inputCommit']}\n{result} {header['ref']}\n\n".encode())
    pack = PackWriter(out, objects, 1 + len(trees) + len(snapshot.sizes))
    pack.add(COMMIT_TYPE, commit)
    for content in trees.values():
        pack.add(TREE_TYPE, content)
    for path, size in snapshot.sizes.items():
        mode, identity = snapshot.changed[path]
        pack.begin(BLOB_TYPE, size)
        if mode == SYMLINK:
            target = snapshot.beneath.target(path)
            pack.take(target)
            again = objects.identify(b"blob", target)
        else:
            descriptor, _ = snapshot.beneath.file(path)
            try:
                again = objects.identify_file(descriptor, size, pack.take)
            finally:
                os.close(descriptor)
        if again != identity:
            raise Refused("changed", f"{show(path)} changed while it was read")
        pack.end()
    pack.finish()


def read_request(source):
    """The header and the listing of the input commit."""
    line = source.readline(MAX_HEADER_BYTES)
    header = json.loads(line)
    size = header["listingBytes"]
    if not 0 <= size <= MAX_LISTING_BYTES:
        raise ValueError("listingBytes is out of range")
    data = source.read(size)
    if len(data) != size:
        raise ValueError("the listing is cut short")
    return header, parse_listing(data)


def answer(out, **reply):
    out.write(json.dumps(reply, separators=(",", ":")).encode() + b"\n")
    out.flush()


def main(workspace=WORKSPACE):
    """Exit status 0: answered, also when refused; 1: a bundle was begun and broken off."""
    out = sys.stdout.buffer
    header, listing = read_request(sys.stdin.buffer)
    objects = Objects(header["inputCommit"])
    limits = (header["maxFiles"], header["maxBytes"])
    try:
        snapshot = Snapshot(workspace, listing, objects, limits)
        removed = snapshot.take()
        files = len(removed) + len(snapshot.changed)
        if files > header["maxFiles"]:
            raise Refused("files", f"more than {header['maxFiles']} files changed")
        root, trees = build_trees(listing, snapshot.changed, removed, objects)
    except (Refused, OSError) as error:
        refused = {"rule": getattr(error, "rule", "read"), "detail": str(error)[:500]}
        answer(out, resultCommit=None, files=0, bytes=0, refused=refused)
        return 0
    commit = commit_content(header, root)
    result = objects.identify(b"commit", commit) if files else None
    answer(
        out,
        resultCommit=result,
        files=files,
        bytes=snapshot.total_bytes,
        warnings=snapshot.warnings,
    )
    if result is None:
        return 0
    try:
        write_bundle(out, header, snapshot, commit, trees)
    except (Refused, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
