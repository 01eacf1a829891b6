#!/usr/bin/env python3
"""Stands in for Trivy where it is not to be had: called like it, and it really looks.

Any command line that the real program would not accept ends with status 1: the flags are those of
its reference, ``trivy image``.  Packages come from the Debian package database of the image, as the
engine exports it; advisories from ``db/advisories.json`` in its cache directory, without which it
fails, as the real one does without its database.  The report is that of ``pkg/types/report.go``.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

FLAGS = """\
debug dependency-tree disable-telemetry download-db-only download-java-db-only help ignore-unfixed
include-deprecated-checks include-non-failures insecure license-full list-all-pkgs no-color
no-progress offline-scan password-stdin quiet redis-tls removed-pkgs show-suppressed
skip-check-update skip-db-update skip-java-db-update skip-version-check skip-vex-repo-update
tf-exclude-downloaded-modules trace-rego version"""
OPTIONS = """\
cacert cache-backend cache-dir cache-ttl compliance config custom-headers db-repository
detection-priority distro docker-host exit-code exit-on-eol file-patterns format ignore-policy
ignore-status ignored-licenses ignorefile image-config-scanners image-src input java-db-repository
max-image-size misconfig-scanners module-dir output parallel pkg-relationships pkg-types platform
podman-host registry-token rekor-url report sbom-sources scanners secret-config server severity
skip-dirs skip-files template timeout token token-header username vex vuln-severity-source"""
WITHOUT_VALUE, WITH_VALUE = frozenset(FLAGS.split()), frozenset(OPTIONS.split())
SHORT = {"f": "format", "o": "output", "q": "quiet", "s": "severity", "c": "config", "d": "debug"}
ALLOWED = {
    "format": r"table|json|template|sarif|cyclonedx|spdx|spdx-json|github|cosign-vuln",
    "scanners": r"(?:vuln|misconfig|secret|license)(?:,(?:vuln|misconfig|secret|license))*",
    "image-src": r"(?:docker|containerd|podman|remote)(?:,(?:docker|containerd|podman|remote))*",
    "exit-code": r"-?[0-9]+",
    "timeout": r"(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|ms|s|m|h))+",
}
WANTED = {"format": "json", "scanners": "vuln", "image-src": "docker", "quiet": "true"}
"""What this stand-in can do; anything else would be accepted and not be done."""


def fail(message: str) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    sys.exit(1)


def parse(arguments: list[str]) -> tuple[dict[str, str], str]:
    """Flags and the image, as pflag would read them."""
    if arguments[:1] != ["image"]:
        fail(f"unknown command {' '.join(arguments[:1])!r} for trivy")
    flags: dict[str, str] = {}
    images = []
    rest = iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-"):
            images.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        name = name if argument.startswith("--") else SHORT.get(name, name)
        if name in WITHOUT_VALUE:
            flags[name] = value if equals else "true"
        elif name in WITH_VALUE:
            flags[name] = value if equals else next(rest, "") or fail(f"--{name} needs a value")
        else:
            fail(f"unknown flag: {argument}")
        if name in ALLOWED and not re.fullmatch(ALLOWED[name], flags[name]):
            fail(f'invalid argument "{flags[name]}" for --{name}')
    if len(images) != 1:
        fail("multiple targets cannot be specified" if images else "no image name")
    return flags, images[0]


def engine(path: str) -> bytes:
    """The answer of the engine that DOCKER_HOST names."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(host.removeprefix("unix://"))
    connection.request("GET", path)
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        fail(f"unable to find the specified image: {answer.decode(errors='replace')}")
    return answer


def files_of(image: str, wanted: frozenset[str]) -> dict[str, bytes]:
    """The wanted files as the layers leave them, deletions included."""
    with tarfile.open(fileobj=io.BytesIO(engine(f"/images/{quote(image)}/get"))) as archive:

        def member(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        found: dict[str, bytes] = {}
        for layer in json.loads(member("manifest.json"))[0]["Layers"]:
            with tarfile.open(fileobj=io.BytesIO(member(layer))) as tar:
                for entry in tar:
                    name = entry.name.removeprefix("./")
                    folder, _, base = name.rpartition("/")
                    found.pop(f"{folder}/{base.removeprefix('.wh.')}", None)
                    if name in wanted and entry.isreg() and (file := tar.extractfile(entry)):
                        found[name] = file.read()
    return found


def packages_in(status: str) -> list[dict[str, str]]:
    """Name and version of what dpkg has installed (dpkg-query(1))."""
    found = []
    for block in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields.get("Status", "").endswith(" installed"):
            found.append({"Name": fields["Package"], "Version": fields["Version"]})
    return found


def main() -> None:
    flags, image = parse(sys.argv[1:])
    for name, value in WANTED.items():
        if flags.get(name) != value:
            fail(f"this stand-in does nothing without --{name} {value}")
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    try:
        database: dict[str, Any] = json.loads(
            (Path(cache) / "trivy/db/advisories.json").read_text("utf-8")
        )
    except OSError:
        fail("failed to download vulnerability DB")
    image_id = json.loads(engine(f"/images/{quote(image)}/json"))["Id"]
    found = files_of(image, frozenset({"etc/os-release", "var/lib/dpkg/status"}))
    release = dict(
        line.split("=", 1) for line in found.get("etc/os-release", b"").decode().splitlines()
    )
    system: dict[str, str | bool] = {
        "Family": release.get("ID", "none"),
        "Name": release.get("VERSION_ID", ""),
    }
    if f"{system['Family']} {system['Name']}" in database["endOfLife"]:
        system["EOSL"] = True
    packages = packages_in(found.get("var/lib/dpkg/status", b"").decode())
    report: dict[str, Any] = {
        "SchemaVersion": 2,
        "ArtifactName": image,
        "ArtifactType": "container_image",
        "Metadata": {"OS": system, "ImageID": image_id},
    }
    if packages:
        report["Results"] = [
            {
                "Target": f"{image} ({system['Family']} {system['Name']})",
                "Class": "os-pkgs",
                "Type": system["Family"],
                "Packages": packages if flags.get("list-all-pkgs") == "true" else [],
                "Vulnerabilities": [
                    {
                        "VulnerabilityID": advisory["id"],
                        "PkgName": package["Name"],
                        "InstalledVersion": package["Version"],
                        "FixedVersion": advisory.get("fixed", ""),
                        "Severity": advisory["severity"],
                    }
                    for package in packages
                    for advisory in database["advisories"]
                    if advisory["package"] == package["Name"]
                    and package["Version"] in advisory["affected"]
                ],
            }
        ]
    json.dump(report, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
