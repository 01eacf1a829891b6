"""One private engine for the demo, and the tooling image in any engine.

The demo's containers have no network, so this engine has no bridge and leaves the machine's
firewall and its forwarding switch alone.  It uses the machine's Docker binaries or, where there
are none, those of Debian's packages, unpacked beside the machine.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.debian import Packages, run
from lib.engine_api import EngineApi
from lib.images import Image, pack
from lib.layout import BedError, Layout, say
from lib.private_engine import RootfulEngine
from lib.remains import remove_tree

NO_NETWORK_OPTIONS = (
    *("--bridge=none", "--iptables=false", "--ip-masq=false", "--ip-forward=false"),
)
BINARIES = ("containerd", "containerd-shim-runc-v2", "dockerd", "runc")
SETTINGS = ("FORGE_TESTBED_ROOT", "FORGE_TESTBED_CACHE")


def up(layout: Layout) -> dict[str, str]:
    """Start the demo's engine with the tooling image in it.

    :returns: ``socket`` and ``tooling_image`` (an image id), with ``version`` and ``api_version``.
    :raises BedError: not root, or with the last lines of the log.
    """
    with layout.locked():
        packages = Packages(layout.cache)
        engine = _engine(layout, Path("/"))
        if not engine.is_up():
            engine = _engine(layout, _binaries(packages))
            say("Starting a private Docker engine")
            try:
                engine.start()
            except BaseException:  # an interrupt too
                engine.stop()
                raise
        image = pack("tooling", packages, layout.cache)
        image_id = ensure_image(engine.api, image)
        version = engine.api.get("/version")
    return {
        "socket": str(engine.socket_path),
        "tooling_image": image_id,
        "version": version["Version"],
        "api_version": version["ApiVersion"],
    }


def down(layout: Layout, *, purge: bool) -> None:
    """Stop the demo's engine.

    :param purge: remove its data as well, so that the next start is a cold one.
    """
    with layout.locked():
        engine = _engine(layout, Path("/"))
        if engine.is_up():  # what a killed demo left must not come up with the next engine
            engine.api.remove_containers_and_volumes()
        engine.stop()
        if purge:
            remove_tree(engine.data)
    with contextlib.suppress(OSError):  # the test bed is up
        layout.run.rmdir()


def is_gone(layout: Layout, *, purge: bool) -> bool:
    """Whether :func:`down` has nothing to do, and so needs no root."""
    engine = _engine(layout, Path("/"))
    return not engine.run.exists() and not (purge and engine.data.exists())


def tooling_image(layout: Layout, socket_path: Path) -> str:
    """Make sure that a reachable engine has the tooling image.

    :returns: its image id there, which pins it.
    :raises BedError: the engine cannot be reached or refuses the image.
    """
    api = EngineApi(socket_path)
    if not api.answers():
        raise BedError(f"cannot reach a Docker engine at {socket_path}: nothing answers there")
    with layout.locked():
        return ensure_image(api, pack("tooling", Packages(layout.cache), layout.cache))


def ensure_image(api: EngineApi, image: Image) -> str:
    """Load ``image`` unless the engine has it.

    :returns: the id under which the engine knows it: of its configuration or, in an engine with
        containerd's image store, of its manifest.
    """
    if (image_id := _id_of(api, image)) is None:
        say(f"Loading image {image.tag} into {api.socket_path}")
        api.load(image.archive(), image.tag)
        image_id = _id_of(api, image)
    if image_id is None:
        raise BedError(f"cannot find {image.tag} in {api.socket_path} after it was loaded")
    return image_id


def _id_of(api: EngineApi, image: Image) -> str | None:
    if not api.has_image(image.tag):
        return None
    found: dict[str, Any] = api.get(f"/images/{image.tag}/json")
    same = found["RootFS"]["Layers"] == [image.layer_digest]
    return str(found["Id"]) if same else None


def _engine(layout: Layout, prefix: Path) -> RootfulEngine:
    return RootfulEngine(
        "demo",
        layout.root / "demo",
        layout.run / "demo",
        prefix,
        cgroup=layout.name("demo"),
        options=NO_NETWORK_OPTIONS,
        group_id=int(os.environ.get("SUDO_GID", "0")),
    )


def _binaries(packages: Packages) -> Path:
    if all(shutil.which(binary) for binary in BINARIES):
        return Path("/")
    say("No Docker daemon is here: using Debian's docker.io, unpacked in a folder of its own")
    return packages.unpack_missing(["docker.io"])


def become_root(arguments: Sequence[str]) -> None:
    """Return as root; otherwise start this command again with sudo and never return.

    :raises BedError: not root, and sudo cannot be had; the message says what to type.
    """
    if os.geteuid() == 0:
        return
    kept = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    command = ["sudo", "env", *kept, sys.executable, *arguments]
    if shutil.which("sudo") and (sys.stdin.isatty() or _sudo_without_password()):
        say("Starting a Docker engine needs root: using sudo")
        os.execvp(command[0], command)
    raise BedError(
        "cannot start a Docker engine: that needs root. Either do the same as root, or let root run"
        f" `apt-get install docker.io && usermod -aG docker {_user()}`, and log in again"
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _sudo_without_password() -> bool:
    try:
        run(["sudo", "--non-interactive", "true"], timeout_s=10)
    except BedError:
        return False
    return True
