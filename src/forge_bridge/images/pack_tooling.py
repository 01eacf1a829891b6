"""This interpreter and all that it needs, as a tar that runs from anywhere.

Not imported by anything: the bridge runs this file's text in a container of the tooling image
(``python3 -I -S -c``), with a word and the source of the supervisor as arguments.

``pack``: one line of JSON (:func:`layout`), then a tar of the interpreter, its standard library,
its dynamic loader and every shared library that the supervisor has loaded, on stdout.
``look``: one line of JSON: which files this process has really loaded, where it looks for
modules, and its environment.

What is needed is read from the running process (proc(5): maps, auxv), so that nothing is guessed
about distributions, C libraries or processors.  Standard library of Python 3.9 and later.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tarfile
from pathlib import Path
from types import ModuleType

SHARED = "so"
"""Where loader and libraries are in the tree, all side by side."""

AT_BASE = 7
LEFT_OUT = frozenset(
    {
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)


def load(source: str) -> None:
    """Import what the supervisor imports, without running it.

    OpenSSL loads more when it is first used, which is when the first MAC is verified.
    """
    module = ModuleType("supervisor")
    # It is the source that will run as PID 1 anyway.
    exec(compile(source, "supervisor", "exec"), module.__dict__)  # noqa: S102
    module.__dict__["hmac"].digest(b"key", b"message", "sha256")


def mapped_files() -> dict[Path, tuple[int, int]]:
    """Every file in this process's memory, and from where to where its first mapping reaches."""
    found: dict[Path, tuple[int, int]] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, _, end = fields[0].partition("-")
            found.setdefault(Path(fields[5]), (int(start, 16), int(end, 16)))
    return found


def loader_of(mapped: dict[Path, tuple[int, int]]) -> Path | None:
    """The dynamic loader: the file at AT_BASE (getauxval(3)); None in a static program."""
    pairs = struct.iter_unpack("@LL", Path("/proc/self/auxv").read_bytes())
    base = dict(pairs).get(AT_BASE, 0)
    return next((path for path, (start, end) in mapped.items() if start <= base < end), None)


def is_code(path: Path) -> bool:
    """Whether it is a program or a library, not data that was mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def module_folders() -> list[Path]:
    """Where modules come from, each once and none inside another."""
    folders = {Path(path).resolve() for path in sys.path if Path(path).is_dir()}
    return sorted(folder for folder in folders if folders.isdisjoint(folder.parents))


def below_prefix(path: Path) -> Path:
    """Its place in the tree: the interpreter finds its library by where it is itself."""
    try:
        return path.relative_to(Path(sys.prefix).resolve())
    except ValueError:
        sys.exit(f"{path} is not below {sys.prefix}, where this interpreter looks for its own")


class Tree:
    """Writes the tar; everything belongs to root and nobody may write to it."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._folders = {Path()}

    def add(self, source: Path, name: Path) -> None:
        """A regular file, its time kept: byte code is valid for one time only."""
        self._make_folder(name.parent)
        status = source.stat()
        entry = tarfile.TarInfo(str(name))
        entry.size, entry.mtime = status.st_size, int(status.st_mtime)
        entry.mode = 0o555 if status.st_mode & 0o100 else 0o444
        with source.open("rb") as file:
            self._tar.addfile(entry, file)

    def add_modules(self, folder: Path) -> None:
        """A folder of modules, without what no program imports."""
        for path, folders, files in os.walk(folder):
            folders[:] = sorted(set(folders) - LEFT_OUT)
            for source in (Path(path) / name for name in sorted(files)):
                # A link would lead out of the tree, into the image of a project.
                if source.is_file() and not source.is_symlink():
                    self.add(source, below_prefix(source))

    def add_library(self, library: Path) -> None:
        """A shared library under every name that the loader may look for: links beside it."""
        self.add(library, Path(SHARED, library.name))
        for link in library.parent.iterdir():
            if link != library and link.resolve() == library:
                entry = tarfile.TarInfo(f"{SHARED}/{link.name}")
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, library.name, 0o777
                self._tar.addfile(entry)

    def _make_folder(self, name: Path) -> None:
        if name not in self._folders:
            self._make_folder(name.parent)
            self._folders.add(name)
            entry = tarfile.TarInfo(str(name))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o555
            self._tar.addfile(entry)


def pack() -> None:
    """See the module."""
    program, mapped = Path("/proc/self/exe").resolve(), mapped_files()
    loader, folders = loader_of(mapped), module_folders()
    own = {program, *folders}
    head = {"program": str(below_prefix(program)), "loader": loader and loader.name}
    sys.stdout.write(json.dumps(head) + "\n")
    sys.stdout.flush()
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        tree = Tree(tar)
        tree.add(program, below_prefix(program))
        for folder in folders:
            tree.add_modules(folder)
        for path in mapped:
            if own.isdisjoint((path, *path.parents)) and path.is_file() and is_code(path):
                tree.add_library(path)


def look() -> None:
    """See the module."""
    files = sorted(str(path) for path in mapped_files())
    seen = {"files": files, "modules": sys.path, "environment": dict(os.environ)}
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    load(sys.argv[2])
    look() if sys.argv[1] == "look" else pack()
