"""BuildKit compiled from Debian's packages, for a builder of our own where no registry has one.

Debian ships the source of BuildKit with that of Docker, and no program made of it.  What it needs
beyond Debian's packages (two remote caches, a snapshotter, two small helpers) is replaced by the
files of ``lib/buildkit``, which say that they are absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lib.debian import Packages, run
from lib.layout import say

VERSION = 1  # raise it when what is compiled changes
SUITE = "trixie"
GO = "golang-1.24-go"
SOURCES = (
    GO,
    "golang-github-docker-docker-dev",
    *("golang-github-agext-levenshtein-dev", "golang-github-containerd-nydus-snapshotter-dev"),
    *("golang-github-containerd-stargz-snapshotter-dev", "golang-github-gofrs-flock-dev"),
    *("golang-github-google-shlex-dev", "golang-github-pkg-profile-dev"),
    *("golang-github-spdx-tools-golang-dev", "golang-github-tonistiigi-vt100-dev"),
)
PROGRAMS = ("buildkitd", "buildctl")
BUILDKIT = "github.com/moby/buildkit"
ABSENT = Path(__file__).parent / "buildkit"
STAND_INS = {
    "archvariant.go": "github.com/tonistiigi/go-archvariant",
    "fuseoverlayfs.go": "github.com/containerd/fuse-overlayfs-snapshotter",
    "packageurl.go": "github.com/package-url/packageurl-go",
}
MAJOR_VERSIONS = ("github.com/coreos/go-systemd/v22", "github.com/mitchellh/hashstructure/v2")
COMPILE_TIMEOUT_S = 1800


def programs(packages: Packages, cache: Path) -> Mapping[str, Path]:
    """Path in an image to program; compiled once, in one to three minutes."""
    folder = cache / f"buildkit-{VERSION}"
    if not folder.is_dir():
        prefix = packages.unpack_sources(SOURCES, SUITE)
        say("Compiling BuildKit from Debian's packages; this takes a few minutes")
        work = folder.with_name(folder.name + ".partial")
        shutil.rmtree(work, ignore_errors=True)
        _compile(prefix, work)
        (work / "bin").rename(folder)
        for left in (work, prefix):  # 3 GB that nobody needs again
            shutil.rmtree(left)
    return {f"/usr/bin/{name}": folder / name for name in PROGRAMS}


def _compile(prefix: Path, folder: Path) -> None:
    debian = prefix / "usr/share/gocode"
    own = folder / "gopath"
    for file, package in STAND_INS.items():
        target = own / "src" / package
        target.mkdir(parents=True)
        shutil.copy(ABSENT / file, target)
    for package in MAJOR_VERSIONS:
        # Without modules, Go looks for the major version as a folder of that name.
        link = own / "src" / package
        link.parent.mkdir(parents=True)
        link.symlink_to(debian / "src" / Path(package).parent)
    overlay = folder / "overlay.json"
    overlay.write_text(json.dumps({"Replace": _replacements(debian / "src" / BUILDKIT, folder)}))
    go_root = prefix / "usr/lib" / GO.removesuffix("-go").replace("golang", "go")
    environment = {
        "GOROOT": go_root,
        "GOPATH": f"{own}:{debian}",
        "GOCACHE": folder / "cache",
        "GOFLAGS": f"-overlay={overlay}",
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
    }
    settings = [f"{name}={value}" for name, value in environment.items()]
    flags = ("-trimpath", "-ldflags=-s -w", f"-p={os.cpu_count()}")
    targets = [f"{BUILDKIT}/cmd/{name}" for name in PROGRAMS]
    go = str(go_root / "bin/go")
    argv = ["env", *settings, "nice", go, "build", *flags, "-o", f"{folder}/bin/", *targets]
    run(argv, timeout_s=COMPILE_TIMEOUT_S)


def _replacements(source: Path, folder: Path) -> dict[str, str]:
    """File of Debian's to file of ours; an empty name takes it away."""
    found = {}
    text = (ABSENT / "remotecache.go").read_text()
    for package in ("azblob", "gha"):
        ours = folder / f"{package}.go"
        ours.write_text(text.replace("PACKAGE", package))
        first, *others = sorted((source / "cache/remotecache" / package).glob("*.go"))
        found[str(first)] = str(ours)
        found |= {str(other): "" for other in others}
    return found
