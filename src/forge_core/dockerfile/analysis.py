"""Every image that a Dockerfile would fetch, pinned by digest, or a refusal that says why not.

Nothing but pinned images may come from outside: no tag, no URL, no repository, and nothing whose
name only the builder would know.  Stages that the build does not need are judged like all others.

Where versions of BuildKit differ, both readings must be harmless, or the file is refused.
Source: B-31, B-52; sandbox.md, Images; docs/reference/dockerfile.md; BuildKit 0.13 and later,
frontend/dockerfile (instructions, dockerfile2llb/convert.go and convert_runmount.go).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from forge_core.contract import DOCKERFILE_PATH
from forge_core.dockerfile.crashes import may_crash
from forge_core.dockerfile.lexer import Lookup, Unset, WordError, WordTooComplex
from forge_core.dockerfile.lines import (
    Fault,
    Instruction,
    json_array,
    read_directives,
    read_instructions,
    read_lines,
)
from forge_core.dockerfile.sources import is_pinned, is_remote
from forge_core.dockerfile.variables import GlobalVariables, StageVariables
from forge_core.dockerfile.words import expand, split_words
from forge_core.errors import RefusedError
from forge_core.labels import PREFIX
from forge_core.tree_rules import printable

MAX_STAGES: Final = 100
MAX_VARIABLES: Final = 1_000
MAX_FINDINGS: Final = 20
MAX_PUT_IN_CHARACTERS: Final = 1 << 22
"""Of values that are put in for variables, in the whole file: a word of two may stand for 8192."""

_BLANKS: Final = re.compile(r"[ \t]+")
_STAGE_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]*")
_STAGE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,9}")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_NO_STAGE: Final = frozenset({"scratch", "context"})
_FLAGS: Final[Mapping[str, frozenset[str]]] = {
    "FROM": frozenset({"platform"}),
    "RUN": frozenset({"mount", "network"}),
    "COPY": frozenset({"from", "chown", "chmod", "link", "parents", "exclude"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "unpack"}),
    "HEALTHCHECK": frozenset({"interval", "timeout", "start-period", "start-interval", "retries"}),
}
_EVERY_MOUNT: Final = frozenset(
    {"type", "from", "source", "src", "target", "dst", "destination"}
    | {"readonly", "ro", "readwrite", "rw"}
)
_MOUNT_OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "bind": _EVERY_MOUNT,
    "tmpfs": _EVERY_MOUNT | {"size"},
}
_WHY_NO_MOUNT: Final[Mapping[str, str]] = {
    "cache": "what a cache holds has no digest and may come from another project's build",
    "secret": "builds get no secrets; the agent gets those that the contract names",
    "ssh": "builds get no keys; commit what the build needs",
}
_FETCHED: Final = "it is for what the builder fetches by itself; commit the file instead"
_WHY_NO_FLAG: Final[Mapping[tuple[str, str], str]] = {
    ("ADD", "checksum"): _FETCHED,
    ("ADD", "keep-git-dir"): _FETCHED,
    ("RUN", "security"): "no step gets more rights than the others",
    ("RUN", "device"): "no step gets a device",
}


@dataclass(frozen=True, slots=True)
class DockerfileAnalysis:
    """What a Dockerfile fetches.

    :param external: every image from outside, as it is written, each once, in the order of the
        file.
    :param reads_context: whether an instruction of the file could take files of the repository;
        what a base image's ``ONBUILD`` would take is not seen here.
    """

    external: tuple[str, ...]
    reads_context: bool = True


def analyse_dockerfile(data: bytes) -> DockerfileAnalysis:
    """All that the Dockerfile *data* makes the builder fetch.

    Takes some seconds for a file of the greatest size: give it a worker thread.

    :raises RefusedError: code ``image_policy_denied``: every finding with its line, instruction and
        remedy, up to :data:`MAX_FINDINGS`.
    """
    reader = _Reader()
    try:
        lines = read_lines(data)
        directives = read_directives(lines)
        reader.escape = directives.escape
        if directives.syntax is not None:
            reader.refuse_frontend(*directives.syntax)
        for instruction in read_instructions(lines, directives.escape):
            reader.read(instruction)
        if not reader.stages:
            raise Fault(1, "", "the file has no FROM")
    except Fault as fault:
        reader.object_to(Instruction(fault.line, fault.instruction), str(fault))
    if reader.objections:
        raise _refusal(reader.findings, reader.objections)
    return DockerfileAnalysis(tuple(reader.external), reader.reads_context)


def _refusal(findings: list[str], objections: int) -> RefusedError:
    more = [f"and {objections - len(findings)} more"] if objections > len(findings) else []
    return RefusedError(
        f"cannot build {DOCKERFILE_PATH}: {'; '.join([*findings, *more])}",
        code="image_policy_denied",
        field=DOCKERFILE_PATH,
    )


@dataclass(slots=True)
class _Reader:
    """Reads instruction after instruction, and objects to what it cannot allow."""

    escape: str = "\\"
    external: dict[str, None] = field(default_factory=dict)
    stages: list[StageVariables] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    objections: int = 0
    reads_context: bool = False
    _numbers: dict[str, int] = field(default_factory=dict)
    _globals: GlobalVariables = field(default_factory=GlobalVariables)
    _variables: int = 0
    _put_in: int = 0
    _now: Instruction = field(default_factory=lambda: Instruction(1, ""))

    def refuse_frontend(self, line: int, reference: str) -> None:
        """Another frontend builds what it likes of the file: nothing read here would hold."""
        self._now = Instruction(line, "# syntax")
        self._object(
            f"{_shown(reference)} would read the file in its own way; leave the line out: "
            "the builder's own frontend reads it"
        )

    def read(self, instruction: Instruction) -> None:
        """Judge the next instruction."""
        self._now = instruction
        if not self.stages and instruction.name not in ("ARG", "FROM"):
            self._object("it stands before the first FROM")
            return
        for name, _ in instruction.options():
            if name not in _FLAGS.get(instruction.name, ()):
                why = _WHY_NO_FLAG.get((instruction.name, name), "it is not known here")
                self._object(f"{_shown(f'--{name}')} is not allowed: {why}")
        judges: Mapping[str, Callable[[], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "LABEL": self._label,
            "COPY": self._copy,
            "ADD": self._add,
            "RUN": self._run,
            "VOLUME": lambda: self._object("an image must have no volumes; leave it out"),
            "ONBUILD": lambda: self._object("it acts in other builds only; leave it out"),
        }
        self._need_no_crash()
        if judge := judges.get(instruction.name):
            judge()

    def object_to(self, instruction: Instruction, why: str) -> None:
        """Count one objection, and keep it while there are few."""
        self.objections += 1
        if len(self.findings) < MAX_FINDINGS:
            name = instruction.name and f", {instruction.name}"
            self.findings.append(f"line {instruction.line}{name}: {why}")

    def _object(self, why: str) -> None:
        self.object_to(self._now, why)

    def _need_no_crash(self) -> None:
        lookup = self._globals.lookup
        if self.stages and self._now.name != "FROM":
            is_run = self._now.name == "RUN"
            lookup = self.stages[-1].lookup_in_title if is_run else self.stages[-1].lookup
        try:
            if may_crash(self._now, self._metered(lookup), escape=self.escape):
                self._object("it has a substitution without a pattern, on which builders crash")
        except WordTooComplex as error:
            self._object(f"it {error}")

    # what is fetched

    def _from(self) -> None:
        words = _BLANKS.split(self._now.arguments)
        if not words[0] or not (len(words) == 1 or (len(words) == 3 and words[1].lower() == "as")):
            raise Fault(self._now.line, "FROM", "it needs one image, or IMAGE AS NAME")
        if len(self.stages) >= MAX_STAGES:
            raise Fault(self._now.line, "FROM", f"there are over {MAX_STAGES} stages")
        base = self._resolved(words[0], self._globals.lookup)
        variables = StageVariables()
        if base in self._numbers:  # only in lower case: elsewhere BuildKit does not mind the case
            variables = self.stages[self._numbers[base]].inherited()
        elif base not in (None, "scratch"):
            self._fetch(base)
        self.stages.append(variables)
        if len(words) == 3:
            self._name_stage(words[2].lower())

    def _name_stage(self, name: str) -> None:
        if not _STAGE_NAME.fullmatch(name) or name in _NO_STAGE:
            self._object(f"{_shown(name)} cannot be the name of a stage")
        elif name in self._numbers:
            self._object(f"a stage above is called {_shown(name)} already")
        else:
            self._numbers[name] = len(self.stages) - 1

    def _copy(self) -> None:
        if not any(name == "from" and source for name, source in self._now.options()):
            self.reads_context = True
        for name, source in self._now.options():
            if name != "from" or not source:
                continue
            if _STAGE_NUMBER.fullmatch(source):
                self._need_above(source, int(source))
            else:
                self._take_from(source)

    def _run(self) -> None:
        for name, value in self._now.options():
            if name == "network" and value not in ("none", "default"):
                self._object(f"the network {_shown(value)} is not allowed; write none or default")
            if name == "mount":
                self._mount(value)

    def _mount(self, mount: str) -> None:
        if '"' in mount:  # a quoted field may hide any option
            self._object("--mount must have no quotes inside")
            return
        options = [option.partition("=") for option in mount.split(",")]
        given = {key.lower(): value for key, equals, value in options if equals}
        kind, source = given.get("type", "bind").lower(), given.get("from", "")
        if kind not in _MOUNT_OPTIONS:
            why = _WHY_NO_MOUNT.get(kind, "write bind or tmpfs")
            self._object(f"a mount of type {_shown(kind)} is not allowed: {why}")
        elif unknown := {key.lower() for key, _, _ in options} - _MOUNT_OPTIONS[kind]:
            self._object(f"a {kind} mount has no option {_shown(min(unknown))}")
        if source:  # a number is no stage here
            self._take_from(source)
        elif kind == "bind":
            self.reads_context = True

    def _take_from(self, source: str) -> None:
        number = self._numbers.get(source.lower())
        if number is not None:
            self._need_above(source, number)
        elif source != "scratch":
            self._fetch(source)

    def _need_above(self, source: str, number: int) -> None:
        if not 0 <= number < len(self.stages) - 1:
            self._object(f"from={_shown(source)} is no stage above this one")

    def _add(self) -> None:
        self.reads_context = True
        sources = json_array(self._now)
        if sources is None:
            sources = _BLANKS.split(self._now.arguments)
        for word in sources[:-1]:
            source = self._resolved(word, self.stages[-1].lookup)
            if source is not None and is_remote(source):
                self._object(
                    f"the builder fetches {_shown(source)} by itself, or may do so; commit the "
                    "file, and write ./ in front of a path that looks like a repository"
                )

    def _fetch(self, reference: str) -> None:
        if is_pinned(reference):
            self.external[reference] = None
            return
        stage = ", or the name of a stage above" if _STAGE_NAME.fullmatch(reference) else ""
        self._object(
            f"{_shown(reference)} is not pinned; write repository@sha256:<64 hex> "
            f"(docker buildx imagetools inspect shows it){stage}"
        )

    # variables

    def _arg(self) -> None:
        pairs: list[tuple[str, str | None]] = []
        for word in split_words(self._now.arguments, escape=self.escape):
            name, equals, default = word.partition("=")
            if self._is_variable(name):
                pairs.append((name, default if equals else None))
        if self.stages:
            self.stages[-1].declare(pairs, self._globals, escape=self.escape)
        else:
            self._globals.declare(pairs, escape=self.escape)

    def _env(self) -> None:
        pairs = [pair for pair in self._pairs() if self._is_variable(pair[0])]
        self.stages[-1].set_environment(pairs, escape=self.escape)

    def _label(self) -> None:
        for key, _ in self._pairs():
            label = self._resolved(key, self.stages[-1].lookup)
            if label is not None and f"{label}.".startswith(PREFIX):
                self._object(f"the label {_shown(label)} is the bridge's own; leave it out")

    def _pairs(self) -> list[tuple[str, str]]:
        """``NAME=value …``, or the old ``NAME value``."""
        words = split_words(self._now.arguments, escape=self.escape)
        if words and "=" not in words[0]:
            name, *value = _BLANKS.split(self._now.arguments, maxsplit=1)
            return [(name, "".join(value))]
        return [(name, value) for name, _, value in (word.partition("=") for word in words)]

    def _is_variable(self, name: str) -> bool:
        self._variables += 1
        if self._variables > MAX_VARIABLES:
            why = f"there are over {MAX_VARIABLES} variables"
            raise Fault(self._now.line, self._now.name, why)
        if _VARIABLE_NAME.fullmatch(name):
            return True
        self._object(f"{_shown(name)} cannot be the name of a variable")
        return False

    def _metered(self, lookup: Lookup) -> Lookup:
        def look(name: str) -> str | Unset:
            value = lookup(name)
            if isinstance(value, str):
                self._put_in += len(value)
                if self._put_in > MAX_PUT_IN_CHARACTERS:
                    raise WordTooComplex("comes after too many variables with long values")
            return value

        return look

    def _resolved(self, word: str, lookup: Lookup) -> str | None:
        """*word* with its variables put in; None, with an objection, when that cannot be done."""
        try:
            expansion = expand(word, self._metered(lookup), escape=self.escape)
        except (WordError, WordTooComplex) as error:
            self._object(f"{_shown(word)} {error}")
            return None
        if not expansion.unresolved:
            return expansion.text
        names = ", ".join(map(_shown, expansion.unresolved[:5]))
        self._object(
            f"cannot tell what {_shown(word)} is: this file alone gives no value to {names}; "
            "write out what is meant, or give the ARG a default"
        )
        return None


def _shown(text: str) -> str:
    return printable(text.encode("utf-8", "backslashreplace"))
