"""Container images made offline from the files of Debian packages.

An image is one layer of package files, a configuration and a manifest, written here rather than
imported by a daemon: its id and its digest are known before any engine has seen it, and are the
same in all of them.  Files keep their times, so Python's byte code stays valid; set-user-id bits
are dropped.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lib import buildkit_binaries
from lib.debian import Packages, installed, run
from lib.layout import say
from lib.package_files import closure, database, files

FORMAT = 3  # part of every image's key: raise it when the packing changes
PIECE_BYTES = 1 << 20
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
PASSWD = """\
root:x:0:0:root:/root:/bin/sh
proxy:x:13:13:proxy:/var/spool/squid:/bin/sh
postgres:x:70:70::/var/lib/postgresql:/bin/sh
redis:x:71:71::/var/lib/redis:/bin/sh
agent:x:1000:1000::/home/agent:/bin/sh
nobody:x:65534:65534::/nonexistent:/bin/false
"""
FOLDERS = {  # path: (mode, owner); rootless 20.10 gives a folder that is not listed mode 0600
    "etc": (0o755, 0),
    "home": (0o755, 0),
    "home/agent": (0o755, 1000),
    "root": (0o700, 0),
    "run": (0o755, 0),
    "tmp": (0o1777, 0),
    "usr": (0o755, 0),
    "usr/bin": (0o755, 0),
    "usr/lib64": (0o755, 0),
    "var": (0o755, 0),
    "var/tmp": (0o1777, 0),
}


@dataclass(frozen=True)
class Recipe:
    """What goes into an image.

    :param packages: with all that they depend on, but for :data:`UNWANTED`.
    :param compiled: programs (path to source) that no package has.
    :param links: more symbolic links (path to target), given the files (path to source).
    :param folders: what ``PATH`` has besides the usual.
    :param volumes: what ``VOLUME`` would declare; images that others publish do.
    """

    packages: tuple[str, ...]
    compiled: Callable[[Packages, Path], Mapping[str, Path]] = lambda packages, cache: {}
    links: Callable[[Mapping[str, Path]], Mapping[str, str]] = lambda paths: {}
    user: str = "1000:1000"
    command: tuple[str, ...] = ("/bin/sh",)
    folders: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()


def _busybox_applets(paths: Mapping[str, Path]) -> dict[str, str]:
    listing = run([str(paths["/usr/bin/busybox"]), "--list"]).split()
    return {f"/usr/bin/{applet}": "busybox" for applet in listing if applet != "busybox"}


RECIPES: Mapping[str, Recipe] = {
    "busybox": Recipe(("busybox-static",), links=_busybox_applets),
    "tooling": Recipe(
        (
            *("bash", "coreutils", "dash", "diffutils", "findutils", "git", "grep", "gzip"),
            *("mawk", "python3", "sed", "tar"),
        ),
        links=lambda paths: {"/usr/bin/awk": "mawk"},
    ),
    "buildkit": Recipe(
        ("busybox-static", "ca-certificates", "runc"),
        compiled=buildkit_binaries.programs,
        links=_busybox_applets,
        user="0:0",
        command=("buildkitd",),
    ),
    "squid": Recipe(("dash", "squid"), user="13:13", command=("squid", "-N")),
    "node": Recipe(("coreutils", "dash", "nodejs"), command=("node",)),
    # The services look like the images that their own projects publish.
    "postgres": Recipe(
        ("coreutils", "dash", "postgresql-15"),
        user="",
        command=("postgres",),
        folders=("/usr/lib/postgresql/15/bin",),
        volumes=("/var/lib/postgresql/data",),
    ),
    "redis": Recipe(
        ("coreutils", "dash", "redis-server"),
        user="",
        command=("redis-server",),
        volumes=("/data",),
    ),
    "browser": Recipe(
        ("coreutils", "dash", "chromium", "fonts-dejavu-core", "grep", "sed"),
        user="",
        command=("chromium", "--headless"),
    ),
}


@dataclass(frozen=True)
class Image:
    """A packed image on disk: ``layer.tar``, ``config.json``, ``manifest.json``.

    :param image_id: ``sha256:…`` of the configuration; what engines call the image id.
    :param digest: ``sha256:…`` of the manifest; what registries call the image.
    :param layer_digest: ``sha256:…`` of its one layer.
    """

    name: str
    folder: Path
    image_id: str
    digest: str
    layer_digest: str

    @property
    def tag(self) -> str:
        """Its name in an engine that did not get it from a registry."""
        return f"forge/{self.name}:testbed"

    def archive(self) -> Iterator[bytes]:
        """A ``docker load`` archive of it, in pieces."""
        layers = ["layer.tar"]
        index = [{"Config": "config.json", "RepoTags": [self.tag], "Layers": layers}]
        yield from _tar_member("manifest.json", io.BytesIO(json.dumps(index).encode()))
        for name in ("config.json", "layer.tar"):
            with (self.folder / name).open("rb") as file:
                yield from _tar_member(name, file)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _tar_member(name: str, file: BinaryIO) -> Iterator[bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = file.seek(0, io.SEEK_END), 0o644
    file.seek(0)
    yield entry.tobuf(tarfile.GNU_FORMAT)
    while piece := file.read(PIECE_BYTES):
        yield piece
    yield bytes(-entry.size % tarfile.BLOCKSIZE)


def pack(name: str, packages: Packages, cache: Path) -> Image:
    """Pack the image ``name`` of :data:`RECIPES`, or find it packed.

    Packages that the machine lacks are unpacked beside it, never installed.
    """
    recipe = RECIPES[name]
    sources = [Path("/")]
    missing = set(recipe.packages) - installed(recipe.packages)
    if missing:
        sources.insert(0, packages.unpack_missing(sorted(missing)))
    chosen = closure(recipe.packages, database(sources))
    compiled = recipe.compiled(packages, cache)
    versions = [(package.name, package.version) for package in chosen]
    parts = (FORMAT, versions, *sorted(source.parent.name for source in compiled.values()))
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    folder = cache / "images" / f"{name}-{key[:12]}"
    if not folder.is_dir():
        say(f"Packing image forge/{name} from {len(chosen)} packages")
        _write(recipe, {**files(chosen), **compiled}, folder)
    config = (folder / "config.json").read_bytes()
    manifest = (folder / "manifest.json").read_bytes()
    layer_digest = json.loads(manifest)["layers"][0]["digest"]
    return Image(name, folder, _sha256(config), _sha256(manifest), layer_digest)


def _write(recipe: Recipe, paths: Mapping[str, Path], folder: Path) -> None:
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "layer.tar").open("wb") as file:
        hashing = _HashingWriter(file)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            _fill(tar, paths, recipe.links(paths))
    config = _config(recipe, hashing.digest)
    layer = {"mediaType": LAYER_TYPE, "digest": hashing.digest, "size": hashing.size_bytes}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": _sha256(config), "size": len(config)},
        "layers": [layer],
    }
    (partial / "config.json").write_bytes(config)
    (partial / "manifest.json").write_text(json.dumps(manifest, sort_keys=True))
    partial.rename(folder)


def _config(recipe: Recipe, layer_digest: str) -> bytes:
    return json.dumps(
        {
            "architecture": ARCHITECTURES[os.uname().machine],
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {
                "User": recipe.user,
                "Cmd": list(recipe.command),
                "Env": [f"PATH={':'.join((*PATH, *recipe.folders))}", "LANG=C.UTF-8"],
                **({"Volumes": {path: {} for path in recipe.volumes}} if recipe.volumes else {}),
            },
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "scripts/testbed"}],
        },
        sort_keys=True,
    ).encode()


def _fill(tar: tarfile.TarFile, paths: Mapping[str, Path], links: Mapping[str, str]) -> None:
    for name, (mode, owner) in FOLDERS.items():
        _add_folder(tar, name, mode, owner)
    done = {f"/{name}" for name in FOLDERS}
    for path in sorted(paths):
        if path in done:
            continue
        done.add(path)
        entry = _entry(tar, path, paths[path])
        if entry.isreg():
            with paths[path].open("rb") as file:
                tar.addfile(entry, file)
        else:
            tar.addfile(entry)
    merged = {f"/{name}": f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    for path, target in {**merged, **links}.items():
        if path not in done:
            link = tarfile.TarInfo(path[1:])
            link.type, link.linkname, link.mode = tarfile.SYMTYPE, target, 0o777
            tar.addfile(link)
    _add_file(tar, "etc/passwd", PASSWD.encode())
    _add_file(tar, "etc/group", _groups(PASSWD).encode())


def _entry(tar: tarfile.TarFile, path: str, source: Path) -> tarfile.TarInfo:
    # A second name of a file already added becomes a hard link in the layer too.
    entry = tar.gettarinfo(str(source), arcname=path[1:])
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o1777
    entry.mtime = int(entry.mtime)
    return entry


def _add_folder(tar: tarfile.TarFile, name: str, mode: int, owner: int) -> None:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, mode, owner, owner
    tar.addfile(folder)


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def _groups(passwd: str) -> str:
    users = [line.split(":") for line in passwd.splitlines()]
    return "".join(f"{name}:x:{group}:\n" for name, _, _, group, *_ in users)


class _HashingWriter(io.RawIOBase):
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._hash.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
