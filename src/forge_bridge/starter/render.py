"""The files of a starter, as text."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forge_bridge.starter import Kind
from forge_bridge.starter.project import Project
from forge_core.contract import CONTRACT_PATH, DOCKERFILE_PATH, read_contract
from forge_core.dockerignore import IGNORE_PATHS

_CONTRACT: Final = """\
# What this project asks of the sandbox in which agents work on it. Runners read this file from the
# commit that was approved, never from a working tree. Check it: forge sandbox doctor
version: 1
{image}
# What else can be asked for; take the # away in front of what you need.
#
# tmp:
#   executable: true           # programs in /tmp can be run
# network:
#   policy: public_allowlist   # without it there is no network at all
#   domains:
#     - api.example.org        # this host
#     - .example.net           # this domain and every name below it
# services:
#   - name: postgres           # or redis, browser
#     version: "15"
# ports:
#   - name: web
#     container: 8080
# secrets:
#   - API_KEY                  # the name only; the hub hands over the value
"""
_OF_ITS_OWN: Final = f"""
# The environment of agents is built from this file. Without it they work in the runner's own image.
image:
  dockerfile: {DOCKERFILE_PATH}
"""
_ENVIRONMENT: Final = """
# The image's own variables do not reach agents, so what is needed is said here. Never a secret.
environment:
  PATH: "{path}:/usr/local/bin:/usr/bin:/bin"
"""
_SEARCHED: Final = {Kind.PYTHON: "/opt/venv/bin", Kind.NODE: "/node_modules/.bin"}

_DOCKERFILE: Final = """\
# What agents need to work on this project, but not the project: they find that in /workspace/tree.
# Images are named by digest, so that what was checked is what is used. RUN has a network only on
# runners whose builds are behind egress control.
FROM {base}
{steps}
# Agents run as this user, whatever the image says.
USER 1000:1000
"""
_PYTHON: Final = """\
WORKDIR /opt/project
COPY {lock} ./
RUN python3 -m venv /opt/venv \\
 && /opt/venv/bin/pip install --no-cache-dir --require-hashes --requirement {name}
"""
_NODE: Final = """\
WORKDIR /opt/project
COPY package.json {lock} ./
# Node looks for packages in every directory above a file, and so finds /node_modules.
RUN npm ci --no-audit --no-fund --cache /tmp/npm \\
 && rm -rf /tmp/npm \\
 && ln -s /opt/project/node_modules /node_modules
"""
_PHP: Final = """\
WORKDIR /opt/project
COPY composer.json {lock} ./
# The packages; an agent takes them with: cp -a /opt/project/vendor . && composer dump-autoload
RUN COMPOSER_ALLOW_SUPERUSER=1 COMPOSER_HOME=/tmp/composer composer install \\
      --no-interaction --no-progress --no-scripts --no-autoloader \\
 && rm -rf /tmp/composer
"""
_PLAIN: Final = """\
# What the project needs; an image that has it already is better than commands here.
# RUN apt-get update && apt-get install --yes --no-install-recommends make
"""
_NAMES: Final = {Kind.PYTHON: "Python", Kind.NODE: "Node", Kind.PHP: "PHP"}
_STEPS: Final = {Kind.PYTHON: _PYTHON, Kind.NODE: _NODE, Kind.PHP: _PHP}
_WITHOUT_LOCK: Final = {
    Kind.PYTHON: """\
# No file of requirements with hashes was found. Make one that needs no other file, for example
#   pip-compile --generate-hashes --output-file requirements.lock
#   uv export --format requirements-txt --output-file requirements.lock
# and take the # away:
""",
    Kind.NODE: """\
# No package-lock.json was found, or the project has workspaces, whose every package.json must be
# copied too. Then take the # away:
""",
    Kind.PHP: """\
# No composer.lock was found. Make it (composer update), and take the # away:
""",
}
_IGNORED: Final = """\
# All that the Dockerfile copies. While these files stay the same, so does the image: without this
# file it would be built anew for every commit. It counts instead of .dockerignore.
*
"""
_COPIED: Final = {Kind.NODE: ("package.json",), Kind.PHP: ("composer.json",)}
_USUAL_LOCK: Final = {
    Kind.PYTHON: "requirements.lock",
    Kind.NODE: "package-lock.json",
    Kind.PHP: "composer.lock",
}


@dataclass(frozen=True, slots=True)
class Starter:
    """What is to be written.

    :param files: path below the root → content.
    """

    project: Project
    files: Mapping[str, str]

    @property
    def summary(self) -> str:
        """For whom it is, in a sentence."""
        project = self.project
        if project.kind is Kind.PLAIN:
            return "written for no language in particular"
        found = f" ({project.seen})" if project.seen else ""
        return f"written for {_NAMES[project.kind]}{found}"

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do next, a line each."""
        own = DOCKERFILE_PATH in self.files
        choice = (
            f"look through {DOCKERFILE_PATH}"
            if own
            else "agents will work in the runner's tooling image; --base IMAGE gives them another"
        )
        return (choice, "then: git add .forge && git commit && forge sandbox doctor")


def starter_for(project: Project, base: str | None = None) -> Starter:
    """A contract that suits the project, and with ``base`` a Dockerfile too.

    :param base: the image to build on, pinned; None: agents work in the tooling image.
    """
    image = "" if base is None else _OF_ITS_OWN + _environment(project)
    contract = _CONTRACT.format(image=image)
    read_contract(contract.encode())
    files = {CONTRACT_PATH: contract}
    if base is not None:
        files[DOCKERFILE_PATH] = _DOCKERFILE.format(base=base, steps=_steps(project))
        files[IGNORE_PATHS[0]] = _IGNORED + _not_ignored(project)
    return Starter(project, files)


def _not_ignored(project: Project) -> str:
    if project.kind is Kind.PLAIN:
        return ""
    lock = project.lock or _USUAL_LOCK[project.kind]
    return "".join(f"!{name}\n" for name in (*_COPIED.get(project.kind, ()), lock))


def _environment(project: Project) -> str:
    path = _SEARCHED.get(project.kind)
    return _ENVIRONMENT.format(path=path) if path and project.lock else ""


def _steps(project: Project) -> str:
    template = _STEPS.get(project.kind)
    if template is None:
        return _PLAIN
    lock = project.lock or _USUAL_LOCK[project.kind]
    steps = template.format(lock=lock, name=posixpath.basename(lock))
    if project.lock:
        return steps
    commented = "".join(f"# {line}\n" for line in steps.splitlines())
    return _WITHOUT_LOCK[project.kind] + commented
