"""The test bed: which parts there are, and how they come up and go down."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import processes, registry
from lib.debian import Packages, install, older_suite, own_suite, run
from lib.docker_cli import DockerCli
from lib.images import pack
from lib.layout import BedError, Layout, say
from lib.machine_image import machine_image
from lib.private_engine import RootfulEngine
from lib.remains import cgroups_named, mounts_below, remove_tree
from lib.rootless_engine import RootlessEngine, user_exists
from lib.virtual_engine import VirtualEngine

REGISTRY = "registry"
REGISTRY_GRACE_S = 10.0
Engine = RootfulEngine | RootlessEngine | VirtualEngine


@dataclass(frozen=True)
class EngineSpec:
    """An engine of the bed, by the Debian release whose ``docker.io`` it is.

    :param virtual: in a virtual machine of its own.
    """

    suite: str
    rootless: bool
    virtual: bool = False

    @property
    def own_user(self) -> bool:
        """Whether a user of this machine runs it, in namespaces that RootlessKit makes."""
        return self.rootless and not self.virtual


ENGINES: Mapping[str, EngineSpec] = {
    "d26": EngineSpec("trixie", rootless=False),
    "d20": EngineSpec("bookworm", rootless=False),
    "r26": EngineSpec("trixie", rootless=True),
    "r20": EngineSpec("bookworm", rootless=True),
    "v26": EngineSpec("trixie", rootless=True, virtual=True),
}
SUITE_PACKAGE = {  # what docker.io needs besides, where a newer machine may lack it
    "bookworm": "libdevmapper1.02.1",
    "trixie": "docker-cli",
}
EXTRA_IMAGES = ("buildkit", "squid", "node", "postgres", "redis", "browser")
"""Parts that are no processes but one more image each, for tests that ask for it."""

PARTS = (REGISTRY, *EXTRA_IMAGES, *ENGINES)
DEFAULT_PARTS = (REGISTRY, "d26", "r26", "d20")
IMAGES = ("busybox", "tooling")

LIMIT_FLAGS = ("MemoryLimit", "PidsLimit", "CpuCfsQuota")

# Each engine's networks live in a network namespace without an uplink: these pools meet nobody.
NETWORK_OPTIONS = (
    *("--bip", "10.209.0.1/24"),
    *("--default-address-pool", "base=10.208.0.0/20,size=26"),
)
ROOTFUL_TOOLS = ("iproute2", "iptables", "util-linux")
ROOTLESS_TOOLS = (*ROOTFUL_TOOLS, "slirp4netns", "uidmap")


class Bed:
    """One test bed: the parts at one :class:`Layout`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._packages = Packages(layout.cache)
        self._docker_cli = DockerCli(layout.root / "docker-cli")

    def up(self, parts: Iterable[str]) -> dict[str, str]:
        """Bring ``parts`` up, and the registry with them; what is up stays as it is.

        A part of :data:`EXTRA_IMAGES` goes into the registry and the engines that are named.

        :returns: why a part could not start, by part; empty when all are up.
        """
        names = set(parts)
        wanted = [part for part in (REGISTRY, *ENGINES) if part == REGISTRY or part in names]
        images = (*IMAGES, *(part for part in EXTRA_IMAGES if part in names))
        if self._has(wanted, images):  # nobody waits who wants nothing that is not there
            return {}
        with self.layout.locked():
            if self._has(wanted, images):
                return {}
            if os.geteuid() != 0:
                raise BedError("cannot start the test bed: it needs root (private Docker daemons)")
            self._install_tools(wanted)
            engines = [part for part in wanted if part in ENGINES]
            prefixes = {part: self._prefix(part) for part in engines}
            self._docker_cli.make(self._packages)
            self._start_registry(REGISTRY)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                pushing = pool.submit(self._push_images, images)
                starting = {
                    part: pool.submit(self._start_engine, part, prefixes[part]) for part in engines
                }
                references = pushing.result()
                filling = {
                    part: pool.submit(self._fill, part, started, references)
                    for part, started in starting.items()
                }
                return {part: str(error) for part, error in _errors(filling)}

    def down(self, parts: Iterable[str]) -> None:
        """Take ``parts`` down; images and data stay for the next start.

        :raises BedError: something is left.
        """
        wanted = set(parts)
        with self.layout.locked():
            with concurrent.futures.ThreadPoolExecutor() as pool:
                stopping = {part: pool.submit(self._stop, part) for part in PARTS if part in wanted}
            problems = [f"{part}: {error}" for part, error in _errors(stopping)]
            problems += self.remains(wanted)
            if problems:
                raise BedError(f"cannot take the test bed down: {'; '.join(problems)}")
            for folder in (self.layout.run, self.layout.mounts):
                with contextlib.suppress(OSError):  # absent, or another part is still up
                    folder.rmdir()

    def purge(self) -> None:
        """Take everything down and remove users, data and, where it is our own, the cache."""
        self.down(PARTS)
        with self.layout.locked():
            for part, spec in ENGINES.items():
                if spec.own_user and user_exists(self.layout.name(part)):
                    run(["userdel", self.layout.name(part)])
            remove_tree(self.layout.root)

    def remains(self, parts: Iterable[str]) -> list[str]:
        """Processes, mounts, namespaces and cgroups of ``parts``, for people to read."""
        places = [top / part for top in (self.layout.run, self.layout.mounts) for part in parts]
        found = [processes.describe(one) for one in processes.belonging_to(places)]
        found += [f"mount {point}" for point in mounts_below(places)]
        names = [self.layout.name(part) for part in parts]
        found += [f"network namespace {name}" for name in names if _netns(name).exists()]
        found += [f"cgroup {path}" for name in names for path in cgroups_named(name)]
        return found

    def status(self) -> dict[str, Any]:
        """The machine-readable description; see docs/how-to/test-bed.md."""
        return {
            "root": str(self.layout.root),
            "cache": str(self.layout.cache),
            "registry": {
                "up": self._registry_runs(REGISTRY),
                "address": f"127.0.0.1:{self.layout.registry_port}",
            },
            "docker_cli": {
                "executable": str(self._docker_cli.executable),
                "config": str(self._docker_cli.config),
            },
            "images": self._references(),
            "engines": {part: self._engine_status(part) for part in ENGINES},
        }

    # engines

    def _engine(self, part: str, prefix: Path = Path("/")) -> Engine:
        name, folder = self.layout.name(part), self.layout.run / part
        data = self.layout.root / part
        if ENGINES[part].own_user:
            mounts = self.layout.mounts / part
            return RootlessEngine(part, data, folder, prefix, mounts, name, NETWORK_OPTIONS)
        enter = ("nsenter", f"--net={_netns(name)}")
        if ENGINES[part].virtual:
            port = self.layout.registry_port
            return VirtualEngine(part, data, folder, prefix, port, enter)
        return RootfulEngine(part, data, folder, prefix, name, NETWORK_OPTIONS, enter)

    def _prefix(self, part: str) -> Path:
        if ENGINES[part].virtual:
            return machine_image(self.layout.cache)
        suite = ENGINES[part].suite
        # runc and tini link against the C library: never newer than this machine's.
        runtime_suite = older_suite(suite, own_suite())
        engine = ("docker.io", "containerd", "rootlesskit", SUITE_PACKAGE[suite])
        return self._packages.unpack(
            [(package, suite) for package in engine]
            + [(package, runtime_suite) for package in ("runc", "tini")]
        )

    def _install_tools(self, parts: Sequence[str]) -> None:
        rootless = any(part in ENGINES and ENGINES[part].own_user for part in parts)
        install(ROOTLESS_TOOLS if rootless else ROOTFUL_TOOLS, "run private Docker daemons")

    def _fill(
        self,
        part: str,
        started: concurrent.futures.Future[None],
        references: Mapping[str, Mapping[str, str]],
    ) -> None:
        started.result()
        self._start_registry(part)
        api = self._engine(part).api
        for image in references.values():
            if not api.has_image(image["reference"]):
                say(f"Pulling {image['reference']} into {part}")
                api.pull(image["reference"])

    def _start_engine(self, part: str, prefix: Path) -> None:
        name = self.layout.name(part)
        if not ENGINES[part].own_user and not _netns(name).exists():
            run(["ip", "netns", "add", name])
            run(["ip", "-netns", name, "link", "set", "lo", "up"])
        try:
            self._engine(part, prefix).start()
        except (BedError, OSError):
            self._stop(part)
            raise

    def _stop(self, part: str) -> None:
        if (process := processes.recorded(self._registry_record(part))) is not None:
            process.end(REGISTRY_GRACE_S)
        if part in {REGISTRY, *EXTRA_IMAGES}:
            remove_tree(self.layout.run / part)
            return
        self._engine(part).stop()
        if _netns(self.layout.name(part)).exists():
            run(["ip", "netns", "delete", self.layout.name(part)])

    def _has(self, parts: Sequence[str], images: Sequence[str]) -> bool:
        has_cli = self._docker_cli.executable.exists()
        return has_cli and all(self._is_complete(part, images) for part in parts)

    def _is_complete(self, part: str, images: Sequence[str]) -> bool:
        references = self._references()
        if not self._registry_runs(part) or not set(images) <= set(references):
            return False
        if part == REGISTRY:
            return True
        engine = self._engine(part)
        return engine.is_up() and all(
            engine.api.has_image(references[image]["reference"]) for image in images
        )

    def _engine_status(self, part: str) -> dict[str, Any]:
        engine = self._engine(part)
        status: dict[str, Any] = {
            "up": engine.is_up(),
            "rootless": ENGINES[part].rootless,
            "socket": str(engine.socket_path),
        }
        if status["up"]:
            version, info = engine.api.get("/version"), engine.api.get("/info")
            process_id = engine.daemon_pid()
            status |= {
                "version": version["Version"],
                "api_version": version["ApiVersion"],
                "limits_enforced": all(info[flag] for flag in LIMIT_FLAGS),
                "daemon_pid": process_id,
                "network_namespace": f"/proc/{process_id}/ns/net",
            }
        return status

    # the registry and its images

    def _registry_record(self, part: str) -> Path:
        return self.layout.run / part / "registry.json"

    def _registry_runs(self, part: str) -> bool:
        return processes.recorded(self._registry_record(part)) is not None

    def _start_registry(self, part: str) -> None:
        if self._registry_runs(part):
            return
        prefix = self._packages.unpack([("docker-registry", "trixie")])
        enter: tuple[str, ...] = ()
        if part != REGISTRY:
            enter = ("nsenter", f"--net=/proc/{self._engine(part).daemon_pid()}/ns/net")
        registry.start(
            prefix / "usr/bin/docker-registry",
            self.layout.root / REGISTRY,
            self.layout.registry_port,
            run=self.layout.run / part,
            prepare=enter,
        )

    def _push_images(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        pusher = registry.Pusher(self.layout.registry_port)
        references = {}
        for name in names:
            image = pack(name, self._packages, self.layout.cache)
            references[name] = {"reference": pusher.push(image), "image_id": image.image_id}
        partial = self._references_file.with_suffix(".partial")
        partial.write_text(json.dumps({**self._references(), **references}))
        partial.replace(self._references_file)
        return references

    @property
    def _references_file(self) -> Path:
        return self.layout.root / "images.json"

    def _references(self) -> dict[str, dict[str, str]]:
        try:
            references: dict[str, dict[str, str]] = json.loads(self._references_file.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return references


def _netns(name: str) -> Path:
    return Path("/run/netns") / name


def _errors(
    futures: Mapping[str, concurrent.futures.Future[None]],
) -> Iterator[tuple[str, BaseException]]:
    for part, future in futures.items():
        if (error := future.exception()) is not None:
            if not isinstance(error, BedError | OSError):
                raise error
            yield part, error
