"""Which files make up a set of Debian packages and all that they depend on.

Read from dpkg's database for what is installed, and from what :mod:`lib.debian` unpacked beside
the machine for what is not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.aptsources import stanza_fields
from lib.debian import CONTROL_FOLDER, run
from lib.layout import BedError

# Dependencies that serve package installation or other people's mail, not the programs.
UNWANTED = frozenset(
    {"adduser", "debconf", "dpkg", "init-system-helpers", "install-info", "krb5-locales"}
    | {"liberror-perl", "logrotate", "lsb-base", "mailcap", "media-types", "passwd", "perl"}
    | {"perl-base", "sensible-utils", "systemd", "sysvinit-utils", "ucf", "udev"}
)
_UNWANTED_FILES = re.compile(
    r"/usr/share/(bash-completion|bug|doc|doc-base|gitweb|icons|info|lintian|locale|man)(/|$)"
)
_TOP = frozenset({"", "/.", "/bin", "/sbin", "/lib", "/lib64"})  # written by the packer itself
_MERGED_USR = re.compile(r"^/(?=(bin|sbin|lib|lib64)/)")
_SHOWN = ("Version", "Provides", "Pre-Depends", "Depends")


@dataclass(frozen=True)
class Package:
    """An installed or unpacked package.

    :param query_name: dpkg's own name for it, with an architecture where there are several.
    :param depends: all of these, each satisfied by any of its alternatives.
    :param source: the tree that holds its files.
    """

    name: str
    query_name: str
    version: str
    provides: tuple[str, ...]
    depends: tuple[tuple[str, ...], ...]
    source: Path


Database = Mapping[str, Package]


def database(sources: Sequence[Path]) -> Database:
    """Every package in ``sources``; the earlier source wins."""
    found: dict[str, Package] = {}
    for source in sources:
        packages = _installed() if source == Path("/") else _unpacked(source)
        for package in packages:
            found.setdefault(package.name, package)
    return found


def _installed() -> Iterator[Package]:
    native = run(["dpkg", "--print-architecture"]).strip()
    shown = "".join(f"\\t${{{name}}}" for name in ("Package", "Architecture", *_SHOWN))
    form = "${db:Status-Abbrev}\\t${binary:Package}" + shown + "\\n"
    for line in run(["dpkg-query", "--show", "--showformat", form]).splitlines():
        status, query_name, name, architecture, *values = line.split("\t")
        if status.startswith("ii") and architecture in {native, "all"}:
            fields = dict(zip(map(str.lower, _SHOWN), values, strict=True))
            yield _package(name, query_name, fields, Path("/"))


def _unpacked(source: Path) -> Iterator[Package]:
    for control in (source / CONTROL_FOLDER).glob("*.control"):
        fields = stanza_fields(control.read_text())
        yield _package(fields["package"], control.stem, fields, source)


def _package(name: str, query_name: str, fields: Mapping[str, str], source: Path) -> Package:
    relations = [*_list(fields, "pre-depends"), *_list(fields, "depends")]
    depends = tuple(
        tuple(_bare(alternative) for alternative in relation.split("|")) for relation in relations
    )
    provides = tuple(map(_bare, _list(fields, "provides")))
    return Package(name, query_name, fields["version"], provides, depends, source)


def _list(fields: Mapping[str, str], name: str) -> list[str]:
    return [item.strip() for item in fields.get(name, "").split(",") if item.strip()]


def _bare(relation: str) -> str:
    # "name:any (>= 1.2) [amd64]": only the name counts, for what is installed fits already.
    return re.split(r"[\s:(\[]", relation.strip(), maxsplit=1)[0]


def closure(names: Iterable[str], packages: Database) -> list[Package]:
    """``names`` and what they need, without :data:`UNWANTED`, in the order of their names.

    :raises BedError: one of ``names`` is neither installed nor unpacked.
    """
    providers = {virtual: one for one in packages.values() for virtual in one.provides}
    chosen: dict[str, Package] = {}
    todo = list(names)
    for name in todo:
        if name not in packages:
            raise BedError(f"cannot pack package {name}: it is neither installed nor unpacked")
    while todo:
        name = todo.pop()
        package = packages.get(name) or providers.get(name)
        if package is None or package.name in chosen:
            continue
        chosen[package.name] = package
        for alternatives in package.depends:
            present = [one for one in alternatives if one in packages or one in providers]
            if present and present[0] not in UNWANTED:
                todo.append(present[0])
    return [chosen[name] for name in sorted(chosen)]


def files(packages: Iterable[Package]) -> dict[str, Path]:
    """Path in the image to path on this machine, with ``/bin`` and the like merged into ``/usr``.

    Python's byte code, which packages compile when they are installed, comes along.
    """
    found: dict[str, Path] = {}
    for source, paths in _listings(packages):
        for path in paths:
            merged = _MERGED_USR.sub("/usr/", path)
            there = source / path.lstrip("/")
            if path in _TOP or _UNWANTED_FILES.match(merged) or not os.path.lexists(there):
                continue
            found[merged] = there
    found.update(_byte_code(found))
    return found


def _listings(packages: Iterable[Package]) -> Iterator[tuple[Path, list[str]]]:
    installed = []
    for package in packages:
        if package.source == Path("/"):
            installed.append(package.query_name)
            continue
        listing = package.source / CONTROL_FOLDER / f"{package.query_name}.files"
        yield package.source, [line[1:].rstrip("/") for line in listing.read_text().splitlines()]
    if installed:
        listing_text = run(["dpkg-query", "--listfiles", *installed])
        # Lines that do not begin with a slash tell of diversions.
        yield Path("/"), [line for line in listing_text.splitlines() if line.startswith("/")]


def _byte_code(found: Mapping[str, Path]) -> dict[str, Path]:
    modules: dict[Path, dict[str, str]] = {}
    for path, there in found.items():
        if path.endswith(".py"):
            modules.setdefault(there.parent, {})[there.stem] = os.path.dirname(path)
    extra: dict[str, Path] = {}
    for folder, names in modules.items():
        for compiled in (folder / "__pycache__").glob("*.pyc"):
            image_folder = names.get(compiled.name.partition(".")[0])
            if image_folder is not None:
                extra[f"{image_folder}/__pycache__/{compiled.name}"] = compiled
    return extra
