"""A corpus of output bundles that a hostile container could send, made with real Git.

Objects that Git would rather not write are made with ``hash-object --literally``; packs and
headers that it never makes are put together here, byte by byte.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from git_parts import REF, git, word

FILE, EXECUTABLE, LINK, GITLINK, TREE = b"100644", b"100755", b"120000", b"160000", b"40000"
COMMIT_TYPE, BLOB_TYPE, REF_DELTA = 1, 3, 7
Row = tuple[bytes, bytes, str]


@dataclass(frozen=True)
class Hostile:
    """A bundle, what its helper claims, and the names under which it may be refused."""

    name: str
    bundle: bytes
    claimed: str
    fields: frozenset[str]


class Forge:
    """Makes objects on top of an input commit, in a clone that nobody needs any more."""

    def __init__(self, clone: Path, base: str) -> None:
        self.clone = clone
        self.base = base
        self.rows = [
            self._row(line) for line in git(clone, "ls-tree", "-z", base).split(b"\0")[:-1]
        ]
        self.known = set(word(clone, "rev-list", "--objects", "--no-object-names", base).split())

    def blob(self, content: bytes) -> str:
        return word(self.clone, "hash-object", "-w", "--stdin", data=content)

    def tree(self, rows: Iterable[Row], *, sort: bool = True) -> str:
        if sort:
            rows = sorted(rows, key=lambda row: row[1] + b"/" * (row[0] == TREE))
        content = b"".join(b"%s %s\0" % row[:2] + bytes.fromhex(row[2]) for row in rows)
        return self._write("tree", content)

    def with_row(self, mode: bytes, name: bytes, identity: str, *more: Row) -> str:
        """The input's root tree with a row more (or another one under that name)."""
        added = [(mode, name, identity), *more]
        names = {row[1] for row in added}
        return self.tree([*(row for row in self.rows if row[1] not in names), *added])

    def commit(self, tree: str, parents: Iterable[str] | None = None, extra: str = "") -> str:
        lines = [f"parent {parent}\n" for parent in ((self.base,) if parents is None else parents)]
        who = "Forge <forge@example.org> 1700000000 +0000"
        text = f"tree {tree}\n{''.join(lines)}author {who}\ncommitter {who}\n{extra}\nm\n"
        return self._write("commit", text.encode())

    def pack(self, *tips: str) -> bytes:
        """Everything that *tips* reach and the input does not, whole or broken."""
        wanted, todo = dict.fromkeys(tips), list(tips)
        while todo:
            for identity in self._links(todo.pop()):
                made = len(set(identity)) > 1  # ids of one digit repeated name nothing
                if made and identity not in wanted and identity not in self.known:
                    wanted[identity] = None
                    todo.append(identity)
        return self.pack_of(*wanted)

    def pack_of(self, *objects: str) -> bytes:
        """Exactly *objects*."""
        names = "".join(f"{identity}\n" for identity in objects).encode()
        return git(self.clone, "pack-objects", "--stdout", "-q", data=names)

    def bundle(self, result: str, pack: bytes | None = None, header: str | None = None) -> bytes:
        if header is None:
            header = f"# v2 git bundle\n-{self.base}\n{result} {REF}\n\n"
        return header.encode("latin-1") + (self.pack(result) if pack is None else pack)

    def _links(self, identity: str) -> Iterator[str]:
        kind = word(self.clone, "cat-file", "-t", identity)
        content = git(self.clone, "cat-file", kind, identity)
        if kind in ("commit", "tag"):
            for line in content.split(b"\n\n")[0].splitlines():
                if line.split()[0] in (b"tree", b"parent", b"object"):
                    yield line.split()[1].decode()
        while kind == "tree" and content:
            head, _, content = content.partition(b"\0")
            if not head.startswith(b"160000"):
                yield content[:20].hex()
            content = content[20:]

    def _write(self, kind: str, content: bytes) -> str:
        options = ("hash-object", "-w", "--literally", "--stdin", "-t", kind)
        return word(self.clone, *options, data=content)

    @staticmethod
    def _row(line: bytes) -> Row:
        head, _, name = line.partition(b"\t")
        mode, _, identity = head.split()
        return mode.lstrip(b"0"), name, identity.decode()


def raw_pack(*entries: tuple[int, int, bytes, bytes], count: int | None = None) -> bytes:
    """A pack of (type, claimed size, base id, content) entries, whatever they claim."""
    body = struct.pack(">4sII", b"PACK", 2, len(entries) if count is None else count)
    for kind, size, base, content in entries:
        first, size = (kind << 4) | (size & 15), size >> 4
        while size:
            body += bytes([first | 0x80])
            first, size = size & 0x7F, size >> 7
        body += bytes([first]) + base + zlib.compress(content, 9)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def corpus(clone: Path, base: str) -> list[Hostile]:
    """All of it."""
    forge = Forge(clone, base)
    return [
        *_graphs(forge),
        *_paths(forge),
        *_links(forge),
        *_submodules(forge),
        *_trees(forge),
        *_headers(forge),
        *_packs(forge),
    ]


def _case(forge: Forge, name: str, tree: str, *fields: str) -> Hostile:
    result = forge.commit(tree)
    return Hostile(name, forge.bundle(result), result, frozenset(fields))


def _graphs(forge: Forge) -> Iterator[Hostile]:
    tree = forge.with_row(FILE, b"new", forge.blob(b"new\n"))
    good = forge.commit(tree)
    other = word(forge.clone, "rev-parse", f"{forge.base}^")
    alone = forge.commit(tree, [])
    second = forge.commit(forge.with_row(FILE, b"more", forge.blob(b"more\n")), [good])
    for name, result in (
        ("another parent", forge.commit(tree, [other])),
        ("no parent", alone),
        ("merge", forge.commit(tree, [forge.base, other])),
        ("the same parent twice", forge.commit(tree, [forge.base, forge.base])),
    ):
        yield Hostile(name, forge.bundle(result), result, frozenset({"parent"}))
    yield Hostile("two commits", forge.bundle(second), second, frozenset({"objects"}))
    same = word(forge.clone, "rev-parse", f"{forge.base}^{{tree}}")
    yield _case(forge, "nothing changed", same, "empty")
    tag = forge._write(
        "tag", f"object {good}\ntype commit\ntag t\ntagger A <a@b> 1 +0000\n\nt\n".encode()
    )
    yield Hostile("a tag as target", forge.bundle(tag), tag, frozenset({"objects"}))
    for name, target in (("tree", tree), ("blob", forge.blob(b"new\n"))):
        yield Hostile(f"a {name} as target", forge.bundle(target), target, frozenset({"objects"}))
    yield Hostile("another claim", forge.bundle(good), alone, frozenset({"claim"}))
    signed = forge.commit(tree, extra="gpgsig -----BEGIN PGP SIGNATURE-----\n x\n")
    yield Hostile("a signature", forge.bundle(signed), signed, frozenset({"format"}))
    shouting = forge.commit(tree, extra="encoding \x1b[31m\n")
    yield Hostile("an encoding", forge.bundle(shouting), shouting, frozenset({"format"}))


def _paths(forge: Forge) -> Iterator[Hostile]:
    blob = forge.blob(b"payload\n")
    names = (
        *(b".git", b".GIT", b".Git", b".gIt", b"git~1", b"GIT~1", b"git~2"),
        *(b".git ", b".git.", b".git . .", b".git:x", b".git::$INDEX_ALLOCATION"),
        *(b".g\xe2\x80\x8cit", b"\xef\xbb\xbf.git", b".gi\xe2\x80\xaet", b".git\xe2\x81\xaf"),
        *(b".", b"..", b"", b"a/b", b"../up", b"a\\b", b"..\\.git\\config", b".git\\config"),
        *(b"bell\x07", b"line\nfeed", b"\x1b[2J", b"\xff\xfe", b"n" * 256),
    )
    for name in names:
        yield _case(forge, f"file {name[:20]!r}", forge.with_row(FILE, name, blob), "path", "fsck")
    inner = forge.tree([(FILE, b"config", blob)])
    for name in (b".git", b".GIT", b"GIT~1", b".g\xe2\x80\x8dit"):
        deep = forge.tree([(TREE, name, inner)])
        tree = forge.with_row(TREE, b"sub", deep)
        yield _case(forge, f"directory sub/{name!r}", tree, "path", "fsck")
    empty = forge.tree([])
    yield _case(forge, "empty .git", forge.with_row(TREE, b".git", empty), "path", "fsck", "empty")
    deep = inner
    for _ in range(17):
        deep = forge.tree([(TREE, b"d" * 250, deep)])
    yield _case(forge, "a path of 4250 bytes", forge.with_row(TREE, b"long", deep), "path")
    shadow = forge.tree([(FILE, b"inner", blob)])
    yield _case(forge, "LINK/inner beside link", forge.with_row(TREE, b"LINK", shadow), "duplicate")


def _links(forge: Forge) -> Iterator[Hostile]:
    targets = (
        *(b"/etc/passwd", b"//", b"..", b"../outside", b"dir/../../outside", b"dir/../.."),
        *(b".git/hooks", b"./dir/../.GIT/config", b"git~1", b"dir\\..\\..", b"", b"t" * 4096),
        *(b"dir/absolute", b"dir/absolute/x", b"new"),
    )
    for target in targets:
        tree = forge.with_row(LINK, b"new", forge.blob(target))
        yield _case(forge, f"link to {target[:24]!r}", tree, "symlink")
    up = forge.tree([(LINK, b"top", forge.blob(b"../.."))])
    chained = forge.with_row(
        *(TREE, b"a", forge.tree([(TREE, b"b", up)])),
        (LINK, b"through", forge.blob(b"a/b/top/../outside")),
    )
    yield _case(forge, "link through a link to the root", chained, "symlink")
    turned = forge.with_row(
        *(LINK, b"second", forge.blob(b"dir/deep")),
        (LINK, b"third", forge.blob(b"second/../../../x")),
    )
    yield _case(forge, "link through a directory link", turned, "symlink")
    changed = forge.with_row(LINK, b"link", forge.blob(b"../../etc"))
    yield _case(forge, "an old link, now escaping", changed, "symlink")
    for name in (b".gitmodules", b".gitattributes", b".mailmap", b".gitignore"):
        tree = forge.with_row(LINK, name, forge.blob(b"README"))
        yield _case(forge, f"{name.decode()} as a link", tree, "symlink", "fsck")


def _submodules(forge: Forge) -> Iterator[Hostile]:
    yield _case(forge, "new submodule", forge.with_row(GITLINK, b"sub", "1" * 40), "submodule")
    moved = forge.with_row(GITLINK, b"module", "2" * 40)
    yield _case(forge, "changed submodule", moved, "submodule")
    for name, text in (
        ("option url", b'[submodule "m"]\n\tpath = module\n\turl = -u./payload\n'),
        ("option path", b'[submodule "m"]\n\tpath = --x\n\turl = https://example.org/\n'),
        ("climbing name", b'[submodule "../../x"]\n\tpath = m\n\turl = https://example.org/\n'),
        ("command", b'[submodule "m"]\n\tpath = m\n\turl = ./x\n\tupdate = !touch /tmp/x\n'),
        ("newline url", b'[submodule "m"]\n\tpath = m\n\turl = "https://a\\n/x"\n'),
        ("unreadable", b"[submodule"),
    ):
        tree = forge.with_row(FILE, b".gitmodules", forge.blob(text))
        yield _case(forge, f".gitmodules with {name}", tree, "fsck")


def _trees(forge: Forge) -> Iterator[Hostile]:
    blob = forge.blob(b"x\n")
    doubled = [*forge.rows, (FILE, b"zz", blob), (EXECUTABLE, b"zz", blob)]
    yield _case(forge, "an entry twice", forge.tree(doubled, sort=False), "fsck", "duplicate")
    backwards = [(FILE, b"zz", blob), *forge.rows]
    yield _case(forge, "entries out of order", forge.tree(backwards, sort=False), "fsck")
    both = forge.with_row(FILE, b"zz", blob, (TREE, b"zz", forge.tree([(FILE, b"y", blob)])))
    yield _case(forge, "file and directory zz", both, "fsck", "duplicate")
    for mode in (b"0100644", b"100777", b"100600", b"060000", b"10644", b"140000", b"0"):
        tree = forge.with_row(mode, b"zz", blob)
        yield _case(forge, f"mode {mode.decode()}", tree, "fsck", "objects", "path", "submodule")
    yield _case(forge, "a null object", forge.with_row(FILE, b"zz", "0" * 40), "fsck", "objects")
    missing = forge.commit(forge.with_row(FILE, b"zz", "3" * 40))
    pack = forge.pack_of(missing, word(forge.clone, "rev-parse", f"{missing}^{{tree}}"))
    yield Hostile("a missing blob", forge.bundle(missing, pack), missing, frozenset({"objects"}))
    whole = forge.commit(forge.with_row(FILE, b"zz", blob))
    pack = forge.pack_of(whole)
    yield Hostile("a missing tree", forge.bundle(whole, pack), whole, frozenset({"objects"}))
    tree = forge.tree([(FILE, b"y", blob)])
    confused = forge.with_row(FILE, b"zz", tree, (FILE, b"zy", blob))
    yield _case(forge, "a tree used as a file", confused, "objects", "fsck")
    confused = forge.with_row(TREE, b"zz", blob)
    yield _case(forge, "a file used as a tree", confused, "objects", "fsck")


def _headers(forge: Forge) -> Iterator[Hostile]:
    base = forge.base
    good = forge.commit(forge.with_row(FILE, b"new", forge.blob(b"new\n")))
    pack = forge.pack(good)
    need, offer = f"-{base}\n", f"{good} {REF}\n"
    v2, v3 = "# v2 git bundle\n", "# v3 git bundle\n"
    headers = {
        "two refs": ("refs", f"{v2}{need}{offer}{good} refs/heads/main\n\n"),
        "the ref twice": ("refs", f"{v2}{need}{offer}{offer}\n"),
        "no ref": ("refs", f"{v2}{need}\n"),
        "another ref": ("refs", f"{v2}{need}{good} refs/heads/main\n\n"),
        "a ref that climbs": ("refs", f"{v2}{need}{good} {REF}/../../../heads/x\n\n"),
        "a ref with a tail": ("refs", f"{v2}{need}{good} {REF} \n\n"),
        "HEAD": ("refs", f"{v2}{need}{good} HEAD\n\n"),
        "a short id": ("refs", f"{v2}{need}{good[:39]} {REF}\n\n"),
        "an upper-case id": ("refs", f"{v2}{need}{good.upper()} {REF}\n\n"),
        "a sha256 id": ("refs", f"{v2}{need}{good}{'0' * 24} {REF}\n\n"),
        "no prerequisite": ("parent", f"{v2}{offer}\n"),
        "two prerequisites": ("parent", f"{v2}{need}-{good}\n{offer}\n"),
        "the prerequisite twice": ("parent", f"{v2}{need}{need}{offer}\n"),
        "a bogus prerequisite": ("parent", f"{v2}-{'4' * 40}\n{offer}\n"),
        "a prerequisite with a tail": ("parent", f"{v2}-{base}x\n{offer}\n"),
        "a prerequisite after the ref": ("format refs parent", f"{v2}{offer}{need}\n"),
        "version 1": ("format", f"# v1 git bundle\n{need}{offer}\n"),
        "version 4": ("format", f"# v4 git bundle\n{need}{offer}\n"),
        "a capability in version 2": ("format", f"{v2}@filter=blob:none\n{need}{offer}\n"),
        "version 3 without its hash": ("format", f"{v3}{need}{offer}\n"),
        "another hash": ("format", f"{v3}@object-format=sha256\n{need}{offer}\n"),
        "a filter": ("format", f"{v3}@filter=blob:none\n@object-format=sha1\n{need}{offer}\n"),
        "two capabilities": ("format", f"{v3}@object-format=sha1\n@filter=x\n{need}{offer}\n"),
        "no empty line": ("format refs", f"{v2}{need}{offer}"),
        "no newline at all": ("format", f"# v2 git bundle {good} {REF}"),
        "carriage returns": ("format", f"# v2 git bundle\r\n{need}\r\n{offer}\r\n\r\n"),
        "a line of a megabyte": ("format", f"{v2}-{base} {'x' * (1 << 20)}\n{offer}\n"),
        "a thousand refs": ("format refs", v2 + need + offer * 1000 + "\n"),
        "a NUL": ("refs", f"{v2}{need}{good} {REF}\0\n\n"),
        "nothing": ("format", ""),
        "an empty line": ("format", "\n\n"),
        "a web page": ("format", "<html>\n\n"),
    }  # fmt: skip
    for name, (words, header) in headers.items():
        bundle = forge.bundle(good, pack, header)
        yield Hostile(f"header: {name}", bundle, good, frozenset(words.split()))
    for name, bundle in (("empty", b""), ("zeros", bytes(5000)), ("only a pack", pack)):
        yield Hostile(f"not a bundle: {name}", bundle, good, frozenset({"format"}))


def _packs(forge: Forge) -> Iterator[Hostile]:
    blob = forge.blob(b"new\n")
    good = forge.commit(forge.with_row(FILE, b"new", blob))
    pack = forge.pack(good)
    zeros = forge.blob(bytes(8 << 20))
    bomb = forge.commit(forge.with_row(FILE, b"zeros", zeros))
    yield Hostile("a blob of zeros", forge.bundle(bomb), bomb, frozenset({"size"}))
    base = bytes(1 << 16)
    identity = bytes.fromhex(forge.blob(base))
    copies = 1 << 14
    delta = varint(len(base)) + varint(len(base) * copies) + b"\x80" * copies
    small = varint(len(base)) + varint(10) + b"\x80" * copies
    entry = (BLOB_TYPE, len(base), b"", base)
    packs = {
        "a delta bomb": ("size", raw_pack(entry, (REF_DELTA, len(delta), identity, delta))),
        "a delta that lies": (
            "format objects",
            raw_pack(entry, (REF_DELTA, len(small), identity, small)),
        ),
        "a delta without sizes": ("format", raw_pack((REF_DELTA, 3, identity, b"\x80\x80\x80"))),
        "a delta on nothing": (
            "format objects",
            raw_pack((REF_DELTA, 4, bytes(20), b"\x01\x01\x01x")),
        ),
        "an object that claims 2^50": ("size", raw_pack((BLOB_TYPE, 1 << 50, b"", b"x"))),
        "an object that claims 2^80": ("format", raw_pack((BLOB_TYPE, 1 << 80, b"", b"x"))),
        "an object longer than it claims": ("format", raw_pack((BLOB_TYPE, 1, b"", bytes(9999)))),
        "an object shorter than it claims": ("format", raw_pack((BLOB_TYPE, 9, b"", b"x"))),
        "an unknown type": ("format", raw_pack((5, 1, b"", b"x"))),
        "type zero": ("format", raw_pack((0, 1, b"", b"x"))),
        "four billion objects": ("objects", raw_pack(count=0xFFFFFFFF)),
        "an object less than counted": ("format", raw_pack(entry, count=2)),
        "an object more than counted": ("format", raw_pack(entry, entry, count=1)),
        "no objects": ("objects format", raw_pack()),
        "two commits": ("objects", raw_pack(*[(COMMIT_TYPE, 1, b"", b"x")] * 2)),
        "a commit of garbage": ("fsck format objects", raw_pack((COMMIT_TYPE, 1, b"", b"x"))),
        "a wrong checksum": ("format", pack[:-20] + bytes(20)),
        "something after it": ("format", pack + b"x"),
        "itself twice": ("format", pack + pack),
        "garbage": ("format", b"PACK" + bytes(4000)),
        "version 9": ("format", pack[:4] + b"\0\0\0\x09" + pack[8:]),
        "text": ("format", b"hello"),
    }
    for name, (words, hostile) in packs.items():
        bundle = forge.bundle(good, hostile)
        yield Hostile(f"pack: {name}", bundle, good, frozenset(words.split()))
    whole = forge.bundle(good)
    for length in range(0, len(whole), 97):
        cut = whole[:length]
        yield Hostile(f"cut at {length}", cut, good, frozenset({"format", "refs", "parent"}))
    for at in range(len(whole) - len(pack) + 12, len(whole), 53):
        broken = whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
        fields = frozenset({"format", "objects", "size", "fsck"})
        yield Hostile(f"a bit turned at {at}", broken, good, fields)
