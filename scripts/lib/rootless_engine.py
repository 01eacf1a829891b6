"""A rootless Docker Engine, run by an ordinary user that exists for it alone."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from lib import processes
from lib.debian import binaries_path, library_path, run
from lib.engine_api import EngineApi
from lib.layout import BedError, say
from lib.private_engine import READY_TIMEOUT_S, STOP_GRACE_S
from lib.remains import clear, remove_tree

TUN = Path("/dev/net/tun")


@dataclass(frozen=True)
class RootlessEngine:
    """``dockerd-rootless.sh`` as the user ``user``.

    The user may not be able to enter the folders above ``data`` and ``prefix`` (a clone in
    root's home), so both are bind-mounted under ``mounts``.
    """

    name: str
    data: Path
    run: Path
    prefix: Path
    mounts: Path
    user: str
    options: tuple[str, ...] = ()

    @property
    def socket_path(self) -> Path:
        return self._runtime / "docker.sock"

    @property
    def record(self) -> Path:
        return self.run / "rootlesskit.json"

    @property
    def api(self) -> EngineApi:
        return EngineApi(self.socket_path)

    @property
    def _runtime(self) -> Path:
        return self.run / "user"

    @property
    def _home(self) -> Path:
        return self.mounts / "home"

    @property
    def _binaries(self) -> Path:
        return self.mounts / "engine"

    def is_up(self) -> bool:
        """Our own daemon lives and answers."""
        return processes.recorded(self.record) is not None and self.api.answers()

    def daemon_pid(self) -> int:
        """dockerd itself, inside the namespaces.

        :raises BedError: it does not run.
        """
        try:
            return int((self._runtime / "docker.pid").read_text())
        except (FileNotFoundError, ValueError):
            raise BedError(f"cannot find dockerd of engine {self.name}: it does not run") from None

    def start(self) -> None:
        """Start it unless it runs.

        :raises BedError: with the last lines of the log.
        """
        if self.is_up():
            return
        self.stop()  # half an engine: rootlesskit without dockerd, or shims without both
        self._open_tun()
        self._make_user()
        self._make_folders()
        argv = ["dockerd-rootless.sh", "--log-level", "warn"]
        argv += ["--host", f"unix://{self.socket_path}"]
        argv += ["--data-root", str(self._home / "docker"), *self.options]
        prepare = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}", "--init-groups"]
        log = self.data.parent / f"{self.name}.log"
        process = processes.start(
            argv, record=self.record, log=log, environment=self._environment(), prepare=prepare
        )
        processes.wait_ready(f"engine {self.name}", self.api.answers, process, log, READY_TIMEOUT_S)

    def _environment(self) -> dict[str, str]:
        # HOME is where dockerd would look for a daemon.json: there is none.
        script_folder = self._binaries / "usr/share/docker.io/contrib"
        return {
            "HOME": str(self._home),
            "USER": self.user,
            "XDG_RUNTIME_DIR": str(self._runtime),
            "PATH": f"{script_folder}:{binaries_path(self._binaries)}",
            "LD_LIBRARY_PATH": library_path(self._binaries),
        }

    def _open_tun(self) -> None:
        if not TUN.exists():
            raise BedError(f"cannot start engine {self.name}: the kernel has no {TUN}")
        if TUN.stat().st_mode & 0o006 != 0o006:
            say(f"Opening {TUN} to ordinary users, as udev does by default")
            TUN.chmod(0o666)

    def _make_user(self) -> None:
        if not user_exists(self.user):
            say(f"Adding user {self.user} for engine {self.name}")
            home = ["--no-create-home", "--home-dir", "/nonexistent"]
            run(["useradd", *home, "--shell", "/usr/sbin/nologin", self.user])

    def _make_folders(self) -> None:
        user = pwd.getpwnam(self.user)
        for folder in (self.run, self._home, self._binaries):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.data, self._runtime):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chown(folder, user.pw_uid, user.pw_gid)
            folder.chmod(0o700)
        run(["mount", "--bind", str(self.data), str(self._home)])
        run(["mount", "--bind", str(self.prefix), str(self._binaries)])

    def stop(self) -> None:
        """End the engine and every container in it; keep its data."""
        process = processes.recorded(self.record)
        if process is not None:
            process.end(STOP_GRACE_S)
        clear([self.run, self.mounts])
        remove_tree(self.run)
        remove_tree(self.mounts)


def user_exists(name: str) -> bool:
    """Whether the machine has a user of this name."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
