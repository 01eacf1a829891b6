"""A Docker daemon that a test may freeze and kill: a test bed of its own, nobody else's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engines import Engine, describe, run_testbed


class OwnDaemon:
    """One dockerd of our own: to freeze, to kill, to start again.

    :param name: which engine of the test bed it is like.
    """

    def __init__(self, root: Path, name: str = "d26") -> None:
        self._name = name
        self.environment = {
            "FORGE_TESTBED_ROOT": str(root),
            "FORGE_TESTBED_CACHE": describe()["cache"],
        }
        self.start()

    def start(self) -> None:
        done = run_testbed("up", "--json", "--parts", self._name, environment=self.environment)
        assert done.returncode == 0, done.stderr
        self._status: dict[str, Any] = json.loads(done.stdout)
        facts = self._status["engines"][self._name]
        self.pid: int = facts["daemon_pid"]
        self.host = f"unix://{facts['socket']}"
        self.image: str = self._status["images"]["busybox"]["reference"]

    def engine(self) -> Engine:
        """It, as tests know engines."""
        facts, images = self._status["engines"][self._name], self._status["images"]
        return Engine(
            name=self._name,
            socket_path=Path(facts["socket"]),
            version=facts["version"],
            api_version=facts["api_version"],
            rootless=facts["rootless"],
            limits_enforced=facts["limits_enforced"],
            tooling_image=images["tooling"]["reference"],
            busybox_image=images["busybox"]["reference"],
            daemon_pid=facts["daemon_pid"],
            network_namespace=facts["network_namespace"],
            docker_executable=self._status["docker_cli"]["executable"],
            docker_config=self._status["docker_cli"]["config"],
        )

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def remove(self) -> None:
        done = run_testbed("down", "--purge", environment=self.environment)
        assert done.returncode == 0, done.stderr
