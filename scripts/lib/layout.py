"""Where the test bed keeps its things.

Nothing lies outside these places except what carries :attr:`Layout.tag` in its name: network
namespaces, users and cgroups.  Two checkouts on one machine have different tags and never meet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

REGISTRY_PORT_BASE = 15000
REGISTRY_PORT_COUNT = 10000


class BedError(Exception):
    """What could not be done, to which thing, and what to do about it."""


def say(text: str) -> None:
    """One line of progress, on standard error: standard output is for programs."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Layout:
    """The folders of one test bed.

    :param root: state that outlasts a run: data roots, logs, the registry's store.
    :param cache: unpacked Debian packages and packed images; several beds may share it.
    """

    root: Path
    cache: Path

    @classmethod
    def from_environment(cls) -> Layout:
        """Honour ``FORGE_TESTBED_ROOT`` and ``FORGE_TESTBED_CACHE``."""
        root = Path(os.environ.get("FORGE_TESTBED_ROOT") or REPOSITORY / ".cache" / "testbed")
        root = root.resolve()
        cache = Path(os.environ.get("FORGE_TESTBED_CACHE") or root / "cache").resolve()
        return cls(root, cache)

    @property
    def tag(self) -> str:
        """Eight hexadecimal digits that stand for the root in names."""
        return hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]

    @property
    def run(self) -> Path:
        """Sockets, exec roots and process records; short, for ``sun_path`` ends at 108 bytes."""
        return Path("/run") / f"forge-testbed-{self.tag}"

    @property
    def mounts(self) -> Path:
        """Mount points for rootless engines, where their users can reach their data.

        Not below ``/run``: rootlesskit puts symbolic links there, and runc refuses a root file
        system behind one.
        """
        return Path("/var/lib") / f"forge-testbed-{self.tag}"

    @property
    def registry_port(self) -> int:
        """One loopback port for the registry, the same on the host and beside every daemon."""
        return REGISTRY_PORT_BASE + int(self.tag, 16) % REGISTRY_PORT_COUNT

    def name(self, part: str) -> str:
        """Name of a network namespace, user or cgroup of ``part``."""
        return f"forge-tb-{self.tag}-{part}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process changes these folders, and keep others out."""
        with contextlib.ExitStack() as held:
            for folder in sorted({self.root, self.cache}):
                folder.mkdir(parents=True, exist_ok=True)
                file = held.enter_context((folder / "lock").open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say(f"Waiting for another process that uses {folder}")
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield
