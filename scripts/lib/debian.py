"""Debian packages: fetched and verified by apt, then unpacked beside the machine, not into it.

``dpkg -x`` runs no maintainer script: nothing is configured, started, upgraded or removed.  The
few small tools that only work when installed (set-user-id, kernel-facing) are installed by
:func:`install`, which says so first.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from lib.aptsources import DEBIAN_KEYRING, choose_mirror, machine_sources
from lib.layout import BedError, say

SUITES = ("bookworm", "trixie", "forky", "sid")  # oldest first
APT_TIMEOUT_S = 600
SHOWN = 12  # packages named in one line of progress
LIBRARY_FOLDERS = ("lib", "usr/lib")
CONTROL_FOLDER = ".control"  # in an unpacked prefix: each package's control fields and file list


def own_suite() -> str:
    """Codename of the Debian release that this machine runs.

    :raises BedError: it is not Debian 12 or later.
    """
    release = Path("/etc/os-release").read_text()
    fields = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    codename = fields.get("VERSION_CODENAME", "").strip('"')
    if fields.get("ID", "").strip('"') != "debian" or codename not in SUITES:
        raise BedError(
            "cannot use this machine's packages: it is not Debian 12 or later"
            f" (/etc/os-release says {fields.get('ID')} {codename or 'without a codename'})"
        )
    return codename


def older_suite(one: str, other: str) -> str:
    """The older of two suites: what it ships runs on the C library of the other as well."""
    return min(one, other, key=SUITES.index)


def run(argv: Sequence[str], *, cwd: Path | None = None, timeout_s: float = APT_TIMEOUT_S) -> str:
    """Run a command to its end.

    :returns: its standard output.
    :raises BedError: it failed, with the last lines of what it said.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise BedError(f"cannot run {argv[0]}: it is not installed") from None
    except subprocess.TimeoutExpired:
        raise BedError(f"cannot finish {shlex.join(argv)} in {timeout_s:.0f} s") from None
    if done.returncode != 0:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise BedError(f"cannot run {shlex.join(argv)}: exit {done.returncode}. {last}")
    return done.stdout


def installed(packages: Iterable[str]) -> set[str]:
    """Those of ``packages`` that are installed."""
    listing = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}${Package}\n", *packages],
        capture_output=True,
        text=True,
        check=False,  # fails when one is unknown, and still lists the others
    )
    return {line[3:] for line in listing.stdout.splitlines() if line.startswith("ii ")}


def install(packages: Sequence[str], purpose: str) -> None:
    """Install what is missing of ``packages``.

    :raises BedError: not root; the message is the command to type.
    """
    missing = sorted(set(packages) - installed(packages))
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise BedError(f"cannot {purpose}: as root, run: {shlex.join(command)}")
    say(f"Installing {', '.join(missing)} with apt-get, to {purpose}")
    run(["apt-get", "--quiet", "update"])
    run(command)


class Packages:
    """Unpacked packages under one cache folder, with an apt state of its own."""

    def __init__(self, cache: Path) -> None:
        self._unpacked = cache / "packages"
        self._apt = cache / "apt"

    def unpack(self, wanted: Sequence[tuple[str, str]]) -> Path:
        """Unpack exactly these packages into one folder; nothing is done when they are there.

        :param wanted: (package, suite) pairs.
        :returns: the folder, which mirrors ``/``.
        """
        key = hashlib.sha256(repr(sorted(wanted)).encode()).hexdigest()[:12]
        prefix = self._unpacked / f"{wanted[0][0]}-{wanted[0][1]}-{key}"
        if prefix.is_dir():
            return prefix
        names = ["/".join(pair) for pair in wanted]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        say(f"Unpacking {', '.join(names[:SHOWN])}{more}")
        partial = prefix.with_name(prefix.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        archives = partial / "archives"
        archives.mkdir(parents=True)
        self._download([f"{package}/{suite}" for package, suite in wanted], archives)
        for archive in sorted(archives.glob("*.deb")):
            _unpack_one(archive, partial)
        shutil.rmtree(archives)
        partial.rename(prefix)
        return prefix

    def unpack_missing(self, packages: Sequence[str]) -> Path:
        """Unpack what apt would add to this machine to have ``packages``, dependencies included.

        :returns: the folder, which mirrors ``/`` and lacks what the machine has.
        """
        known = self._unpacked / f"for-{'+'.join(packages)}"
        if known.exists():
            return known.resolve()
        suite = own_suite()
        prefix = self.unpack([(package, suite) for package in self._missing(packages, suite)])
        known.unlink(missing_ok=True)
        known.symlink_to(prefix.name)
        return prefix

    def unpack_sources(self, packages: Sequence[str], suite: str) -> Path:
        """Unpack Go packages of a suite with all Go packages that they depend on.

        :returns: the folder, which mirrors ``/``.
        """
        self._update()
        plan = run(
            [
                *self._apt_get(),
                # As if nothing were installed: the answer is the same on every machine.
                *("-o", "Dir::State::status=/dev/null", "-o", f"APT::Default-Release={suite}"),
                *("install", "--simulate", "--no-install-recommends", *packages),
            ]
        )
        added = {line.split()[1] for line in plan.splitlines() if line.startswith("Inst golang-")}
        first = packages[0]
        return self.unpack([(name, suite) for name in (first, *sorted(added - {first}))])

    def _missing(self, packages: Sequence[str], suite: str) -> list[str]:
        self._update()
        plan = run(
            [
                *self._apt_get(),
                *("-o", f"APT::Default-Release={suite}"),
                *("install", "--simulate", "--no-install-recommends", *packages),
            ]
        )
        # "Inst name [installed version] (new version …)": an upgrade is no addition.
        words = [line.split() for line in plan.splitlines() if line.startswith("Inst ")]
        added = {line[1] for line in words if not line[2].startswith("[")}
        # Those asked for are wanted in any case: of a package that is installed, a private copy.
        return [*packages, *sorted(added - set(packages))]

    def _download(self, names: Sequence[str], folder: Path) -> None:
        self._update()
        try:
            run([*self._apt_get(), "download", *names], cwd=folder)
        except BedError:
            # The lists may be older than the mirror: a superseded package is gone from it.
            self._update(refresh=True)
            run([*self._apt_get(), "download", *names], cwd=folder)

    def _update(self, *, refresh: bool = False) -> None:
        lists = self._apt / "lists"
        if any(lists.glob("*_Packages*")) and not refresh:
            return
        for folder in (lists / "partial", self._apt / "archives" / "partial", self._apt / "parts"):
            folder.mkdir(parents=True, exist_ok=True)
        codename = own_suite()
        suites = sorted({codename, "bookworm", "trixie"})
        (self._apt / "parts" / "debian.sources").write_text(
            f"Types: deb\nURIs: {choose_mirror(machine_sources(), codename)}\n"
            f"Suites: {' '.join(suites)}\nComponents: main\nSigned-By: {DEBIAN_KEYRING}\n"
        )
        say(f"Reading Debian's package lists ({', '.join(suites)})")
        run([*self._apt_get(), "update"])

    def _apt_get(self) -> list[str]:
        options = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": self._apt / "parts",
            "Dir::State::Lists": self._apt / "lists",
            "Dir::Cache": self._apt,
            "APT::Sandbox::User": "root",  # the folder need not be readable for _apt
            "Acquire::Languages": "none",
            "Acquire::Retries": 5,
        }
        return [
            *("apt-get", "--quiet=2"),
            *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
        ]


def _unpack_one(archive: Path, prefix: Path) -> None:
    controls = prefix / CONTROL_FOLDER
    controls.mkdir(exist_ok=True)
    name = archive.name.partition("_")[0]
    (controls / f"{name}.files").write_text(run(["dpkg", "--vextract", str(archive), str(prefix)]))
    (controls / f"{name}.control").write_text(run(["dpkg-deb", "--field", str(archive)]))


def binaries_path(prefix: Path) -> str:
    """``PATH`` with an unpacked prefix in front of the machine's own."""
    folders = (prefix / "usr/bin", prefix / "usr/sbin", prefix / "bin", prefix / "sbin")
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return ":".join([*map(str, folders), system])


def library_path(prefix: Path) -> str:
    """``LD_LIBRARY_PATH`` for libraries that came along with an unpacked prefix; may be empty."""
    triple = f"{os.uname().machine}-linux-gnu"
    folders = (prefix / folder / triple for folder in LIBRARY_FOLDERS)
    return ":".join(str(folder) for folder in folders if folder.is_dir())
