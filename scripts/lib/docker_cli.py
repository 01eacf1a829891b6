"""The Docker CLI with buildx, as an operator would have it: an executable and its configuration."""

from __future__ import annotations

import json
from pathlib import Path

from lib.debian import Packages

PACKAGES = (("docker-cli", "trixie"), ("docker-buildx", "trixie"))


class DockerCli:
    """Under the bed's root, so that tests find it without knowing the packages."""

    def __init__(self, folder: Path) -> None:
        self.executable = folder / "docker"
        self.config = folder / "config"

    def make(self, packages: Packages) -> None:
        """Unpack it, unless it is there."""
        prefix = packages.unpack(PACKAGES)
        self.config.mkdir(parents=True, exist_ok=True)
        self.executable.unlink(missing_ok=True)
        self.executable.symlink_to(prefix / "usr/bin/docker")
        plugins = {"cliPluginsExtraDirs": [str(prefix / "usr/libexec/docker/cli-plugins")]}
        (self.config / "config.json").write_text(json.dumps(plugins))
