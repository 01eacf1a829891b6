"""Which value a variable has at a place of a Dockerfile, or that the file alone does not say.

Known is only what the file sets, in one way, and what no base image, builder or client can set
otherwise.  Source: BuildKit 0.13 and later, frontend/dockerfile/dockerfile2llb/convert.go
(dispatchArg, dispatchEnv, getPlatformArgs).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from forge_core.dockerfile.lexer import Lookup, Unset, WordError, WordTooComplex
from forge_core.dockerfile.words import expand

_SET_BY_BUILDER: Final = re.compile(
    r"(?:BUILD|TARGET)(?:PLATFORM|OS|OSVERSION|ARCH|VARIANT)|TARGETSTAGE|BUILDKIT_.*"
    r"|SOURCE_DATE_EPOCH|(?i:(?:http|https|ftp|no|all)_proxy)"
)
"""Variables that the builder or its client may set, whatever the file says."""


@dataclass(slots=True)
class GlobalVariables:
    """Those of ``ARG`` above the first ``FROM``; nothing else is seen in a ``FROM``."""

    _values: dict[str, str | Unset] = field(default_factory=dict)

    def lookup(self, name: str) -> str | Unset:
        """What was never declared is blank here."""
        if _SET_BY_BUILDER.fullmatch(name):
            return Unset.UNKNOWN
        return self._values.get(name, Unset.BLANK)

    def declare(self, pairs: Iterable[tuple[str, str | None]], *, escape: str) -> None:
        """``ARG name=default name …``, from left to right."""
        for name, default in pairs:
            value = Unset.BLANK if default is None else _value(default, self.lookup, escape)
            self._values[name] = value


@dataclass(slots=True)
class StageVariables:
    """Those of one stage; what the file does not set, the base image may have set."""

    _values: dict[str, str | Unset] = field(default_factory=dict)
    _set_by: dict[str, str] = field(default_factory=dict)

    def lookup(self, name: str) -> str | Unset:
        """Never blank: nobody knows here what a base image leaves unset."""
        if _SET_BY_BUILDER.fullmatch(name):
            return Unset.UNKNOWN
        return self._values.get(name, Unset.UNKNOWN)

    def lookup_in_title(self, name: str) -> str | Unset:
        """As the text of a ``RUN`` is expanded for people: what the file does not set is kept."""
        return self._values.get(name, Unset.KEPT)

    def inherited(self) -> StageVariables:
        """Those of a stage on top of this one.

        There, a variable that the base image has comes back over an ``ARG`` of this stage.
        """
        values = {
            name: value if self._set_by[name] == "ENV" else Unset.UNKNOWN
            for name, value in self._values.items()
        }
        return StageVariables(values, dict(self._set_by))

    def declare(
        self, pairs: Iterable[tuple[str, str | None]], outside: GlobalVariables, *, escape: str
    ) -> None:
        """``ARG name=default name …``.

        Some versions see in a default what this very instruction has set, others do not.
        """
        before = self.lookup
        made: set[str] = set()

        def seen(name: str) -> str | Unset:
            return Unset.UNKNOWN if name in made else before(name)

        for name, default in pairs:
            if default is not None:
                value = _value(default, seen, escape)
            else:
                given = outside.lookup(name)
                value = Unset.UNKNOWN if isinstance(given, Unset) else given
            self._assign(name, value, "ARG")
            made.add(name)

    def set_environment(self, pairs: Iterable[tuple[str, str]], *, escape: str) -> None:
        """``ENV name=value …``: every value sees what was set before the instruction."""
        values = [(name, _value(word, self.lookup, escape)) for name, word in pairs]
        for name, value in values:
            self._assign(name, value, "ENV")

    def _assign(self, name: str, value: str | Unset, instruction: str) -> None:
        """A name that ``ARG`` and ``ENV`` set is unknown: which of them wins depends."""
        if self._set_by.setdefault(name, instruction) != instruction:
            value = Unset.UNKNOWN
        self._values[name] = value


def _value(word: str, lookup: Lookup, escape: str) -> str | Unset:
    """A value that cannot be told is unknown; that matters only where it is used."""
    try:
        expansion = expand(word, lookup, escape=escape)
    except (WordError, WordTooComplex):
        return Unset.UNKNOWN
    return Unset.UNKNOWN if expansion.unresolved else expansion.text
