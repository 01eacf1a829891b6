"""A rootless Docker Engine in a virtual machine of its own, with what this machine may lack.

There systemd delegates the controllers of cgroup v2 to the engine's user, so that its limits hold,
and the kernel has AppArmor.  QEMU runs in a network namespace without an uplink and emulates the
network card there; the engine's API and the registry cross it on loopback addresses.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import processes
from lib.debian import install
from lib.engine_api import EngineApi
from lib.layout import BedError
from lib.machine_image import make_data_disk
from lib.remains import clear, remove_tree

TOOLS = ("qemu-system-x86", "socat")
ACCELERATOR = os.environ.get("FORGE_TESTBED_ACCELERATOR") or "tcg"
MEMORY_MIB, CPUS = 2560, 2
API_PORT = 2376
BOOT_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 60.0  # emulated, and busy
POWER_OFF_TIMEOUT_S = 90.0
STOP_GRACE_S = 10.0
QMP_TIMEOUT_S = 5.0
KERNEL_OPTIONS = (
    *("root=/dev/vda", "rw", "console=ttyS0", "quiet", "net.ifnames=0", "mitigations=off"),
    *("apparmor=1", "security=apparmor"),
)


@dataclass(frozen=True)
class VirtualEngine:
    """QEMU, and a relay from a unix socket to the engine in it.

    :param name: for messages and log names.
    :param data: what outlasts the machine: the engine's disk, logs.
    :param run: sockets and process records, removed by :meth:`stop`.
    :param image: of :func:`lib.machine_image.machine_image`.
    :param registry_port: on the loopback address beside QEMU, and beside the engine.
    :param prepare: a command that enters another network namespace first.
    """

    name: str
    data: Path
    run: Path
    image: Path
    registry_port: int
    prepare: tuple[str, ...]

    @property
    def socket_path(self) -> Path:
        return self.run / "docker.sock"

    @property
    def record(self) -> Path:
        return self.run / "qemu.json"

    @property
    def api(self) -> EngineApi:
        return EngineApi(self.socket_path)

    def is_up(self) -> bool:
        """Our own machine runs, and the engine in it answers."""
        running = processes.recorded(self.record) is not None
        return running and self.api.answers(ANSWER_TIMEOUT_S)

    def daemon_pid(self) -> int:
        """QEMU, the one process that stands for everything in the machine.

        :raises BedError: it does not run.
        """
        process = processes.recorded(self.record)
        if process is None:
            raise BedError(f"cannot find the machine of engine {self.name}: it does not run")
        return process.pid

    def start(self) -> None:
        """Start what does not run.

        :raises BedError: with the last lines of the log.
        """
        install(TOOLS, "run a virtual machine")
        self.run.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(parents=True, exist_ok=True)
        machine = processes.recorded(self.record) or self._start_machine()
        self._start_relay()
        what, log = f"engine {self.name}", self._console
        processes.wait_ready(what, self.api.answers, machine, log, BOOT_TIMEOUT_S)

    @property
    def _console(self) -> Path:
        return self.data / "console.log"

    @property
    def _control(self) -> Path:
        return self.run / "qmp.sock"

    def _start_machine(self) -> processes.Process:
        disk = self.data / "data.img"
        if not disk.exists():
            partial = disk.with_suffix(".partial")
            make_data_disk(partial)
            partial.rename(disk)
        options = (*KERNEL_OPTIONS, f"systemd.setenv=FORGE_REGISTRY_PORT={self.registry_port}")
        argv = [
            *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
            *("-name", self.name, "-accel", ACCELERATOR, "-cpu", "max"),
            *("-m", str(MEMORY_MIB), "-smp", str(CPUS)),
            *("-kernel", str(self.image / "vmlinuz"), "-initrd", str(self.image / "initrd")),
            *("-append", " ".join(options), "-serial", f"file:{self._console}"),
            # What is written to the first disk is forgotten: each start is the first one.
            *("-drive", _disk(self.image / "root.img", "snapshot=on,cache=unsafe")),
            *("-drive", _disk(disk, "cache=writeback")),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{API_PORT}-:{API_PORT}"),
            *("-device", "virtio-net-pci,netdev=net", "-device", "virtio-rng-pci"),
            *("-qmp", f"unix:{self._control},server=on,wait=off"),
        ]
        return self._spawn(argv, self.record, self.data / "qemu.log")

    def _start_relay(self) -> None:
        record = self.run / "relay.json"
        if processes.recorded(record) is not None:
            return
        listen = f"UNIX-LISTEN:{self.socket_path},fork,unlink-early,mode=660,backlog=128"
        # -t: a client that has sent all may still wait for a long time for what is answered.
        argv = ["socat", "-t", "86400", listen, f"TCP:127.0.0.1:{API_PORT}"]
        self._spawn(argv, record, self.data / "relay.log")

    def _spawn(self, argv: Sequence[str], record: Path, log: Path) -> processes.Process:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": str(self.data)}
        return processes.start(
            argv, record=record, log=log, environment=environment, prepare=self.prepare
        )

    def stop(self) -> None:
        """Turn the machine off as its power button does, and end what is left; keep its disk."""
        machine = processes.recorded(self.record)
        if machine is not None:
            if self._press_power_button():
                machine.wait_gone(POWER_OFF_TIMEOUT_S)
            machine.end(STOP_GRACE_S)
        relay = processes.recorded(self.run / "relay.json")
        if relay is not None:
            relay.end(STOP_GRACE_S)
        clear([self.run])
        remove_tree(self.run)

    def _press_power_button(self) -> bool:
        """Whether QEMU took it (QEMU Machine Protocol, ``system_powerdown``)."""
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(QMP_TIMEOUT_S)
                client.connect(str(self._control))
                with client.makefile("rw", encoding="utf-8") as lines:
                    lines.readline()  # its greeting
                    for command in ("qmp_capabilities", "system_powerdown"):
                        lines.write(json.dumps({"execute": command}) + "\n")
                        lines.flush()
                        lines.readline()
        except OSError:
            return False
        return True


def _disk(path: Path, options: str) -> str:
    return f"file={path},format=raw,if=virtio,{options}"
