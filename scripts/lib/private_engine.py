"""A Docker Engine of our own: private socket, data root, exec root and containerd.

A machine's own engine is never used, configured or signalled: ``--config-file`` and
``--containerd`` are always given, since dockerd would otherwise read ``/etc/docker/daemon.json``
and adopt a containerd that it finds running.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import processes
from lib.debian import binaries_path, library_path
from lib.engine_api import EngineApi
from lib.layout import BedError
from lib.remains import clear, remove_cgroup, remove_tree

READY_TIMEOUT_S = 30.0
STOP_GRACE_S = 20.0
CONTAINERD_PROTOCOL_PLUGINS_OFF = ("io.containerd.grpc.v1.cri",)


@dataclass(frozen=True)
class RootfulEngine:
    """containerd and dockerd as root.

    :param name: for messages and log names.
    :param data: what outlasts the engine: images, logs.
    :param run: sockets and exec roots, removed by :meth:`stop`.
    :param prefix: unpacked packages that hold the binaries; ``/`` for the machine's own.
    :param cgroup: parent cgroup of its containers.
    :param options: further dockerd options.
    :param prepare: a command that enters another network namespace first.
    :param group_id: the group that may use the socket.
    """

    name: str
    data: Path
    run: Path
    prefix: Path
    cgroup: str
    options: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()
    group_id: int = 0

    @property
    def socket_path(self) -> Path:
        return self.run / "docker.sock"

    @property
    def record(self) -> Path:
        return self.run / "dockerd.json"

    @property
    def api(self) -> EngineApi:
        return EngineApi(self.socket_path)

    def is_up(self) -> bool:
        """Our own daemon lives and answers."""
        return processes.recorded(self.record) is not None and self.api.answers()

    def daemon_pid(self) -> int:
        """Process id of dockerd.

        :raises BedError: it does not run.
        """
        process = processes.recorded(self.record)
        if process is None:
            raise BedError(f"cannot find dockerd of engine {self.name}: it does not run")
        return process.pid

    def start(self) -> None:
        """Start what does not run.

        :raises BedError: with the last lines of the log.
        """
        if self.is_up():
            return
        if os.geteuid() != 0:
            raise BedError(f"cannot start engine {self.name}: dockerd needs root")
        self.run.mkdir(parents=True, exist_ok=True)
        self._start_containerd()
        self._start_dockerd()

    def _start_containerd(self) -> None:
        record, log = self.run / "containerd.json", self.data / "containerd.log"
        if processes.recorded(record) is not None:
            return
        configuration = self.run / "containerd.toml"
        disabled = json.dumps(CONTAINERD_PROTOCOL_PLUGINS_OFF)
        configuration.write_text(f"version = 2\ndisabled_plugins = {disabled}\n")
        argv = ["containerd", "--config", str(configuration), "--log-level", "warn"]
        argv += ["--address", str(self._containerd_socket)]
        argv += ["--root", str(self.data / "containerd"), "--state", str(self.run / "containerd")]
        process = self._spawn(argv, record, log)
        ready = self._containerd_answers
        processes.wait_ready(f"containerd of {self.name}", ready, process, log, READY_TIMEOUT_S)

    @property
    def _containerd_socket(self) -> Path:
        return self.run / "containerd.sock"

    def _containerd_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self._containerd_socket)) == 0

    def _start_dockerd(self) -> None:
        leftover = processes.recorded(self.record)
        if leftover is not None:  # it lives and does not answer
            leftover.end(STOP_GRACE_S)
        configuration = self.run / "daemon.json"
        configuration.write_text("{}\n")
        pid_file = self.run / "dockerd.pid"
        pid_file.unlink(missing_ok=True)  # after a kill it names a process that is not ours
        argv = ["dockerd", "--config-file", str(configuration), "--log-level", "warn"]
        argv += ["--host", f"unix://{self.socket_path}", "--pidfile", str(pid_file)]
        argv += ["--group", str(self.group_id)]
        argv += ["--data-root", str(self.data / "docker"), "--exec-root", str(self.run / "exec")]
        argv += ["--containerd", str(self._containerd_socket)]
        # cgroupfs, with or without systemd: limits behave the same on every machine.
        argv += ["--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{self.cgroup}"]
        argv += self.options
        log = self.data / "dockerd.log"
        process = self._spawn(argv, self.record, log)
        processes.wait_ready(f"engine {self.name}", self.api.answers, process, log, READY_TIMEOUT_S)

    def _spawn(self, argv: Sequence[str], record: Path, log: Path) -> processes.Process:
        environment = {"PATH": binaries_path(self.prefix), "HOME": str(self.data)}
        if self.prefix != Path("/"):
            environment["LD_LIBRARY_PATH"] = library_path(self.prefix)
        return processes.start(
            argv, record=record, log=log, environment=environment, prepare=self.prepare
        )

    def stop(self) -> None:
        """End the engine, every container in it and every mount of it; keep its data."""
        for record in (self.record, self.run / "containerd.json"):
            process = processes.recorded(record)
            if process is not None:
                process.end(STOP_GRACE_S)
        clear([self.run, self.data])
        remove_cgroup(self.cgroup)
        remove_tree(self.run)
