"""YAML without its hazards: a tree whose every value means the same to every reader.

YAML 1.1 and 1.2 take the same plain word for different things (``no``, ``0o17``, ``1e3``,
``12:30``), aliases make a small file huge, of two equal keys one vanishes silently.  Here all of
that is refused by name, with the line.  What is left is JSON with comments and fewer quotes.

Only the pure Python parser is used, though a faster one may be installed: they differ in what
they accept, and the same file must be read alike everywhere.  Events are taken one by one, so
that nothing is nested or built before its bounds are checked.

Sources: https://yaml.org/type/ (1.1), https://yaml.org/spec/1.2.2/#103-core-schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import yaml
from yaml import events

from forge_core.yaml_tree import NULL, Document, Fault, Node, Path, Unclear, shown

MAX_TEXT_FAULTS: Final = 100
MAX_PROBLEM: Final = 200

_UNFIT_IN_LINE: Final = (
    (re.compile("\t"), "there is a tab; indent and separate with spaces"),
    (re.compile("\r"), "there is a carriage return without a line feed"),
    (re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"), "there is the control character {}"),
    (
        re.compile("[\u00a0\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]"),
        "there is the character {}, which looks like another or like nothing",
    ),
)
_UNFIT_IN_VALUE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DECIMAL: Final = re.compile(r"(?:0|-?[1-9][0-9]{0,17})\Z")
_READ_AS: Final = (
    (NULL, re.compile(r"(?:~|null|Null|NULL|)\Z")),
    (
        "true or false",
        re.compile(
            r"(?:y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE"
            r"|on|On|ON|off|Off|OFF)\Z"
        ),
    ),
    (
        "a number",
        re.compile(
            r"[-+]?(?:0b[01_]+|0o[0-7]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*(?::[0-5]?[0-9])*(?:\.[0-9_]*)?"
            r"|(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
    ),
    ("a date", re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ][0-9:.Zz+ -]*)?\Z")),
    ("a default value", re.compile(r"=\Z")),
    ("a merge key", re.compile(r"<<\Z")),
)
"""What some reader takes a plain word for; everything else is text to all of them."""


def read_yaml(data: bytes, *, max_bytes: int, max_depth: int, max_nodes: int) -> Document:
    """Read one document; raises nothing: what is wrong is a fault.

    :param max_depth: of lists and groups within one another.
    :param max_nodes: scalars, keys, lists and groups together.
    """
    if len(data) > max_bytes:
        return _unread(1, f"it has more than {max_bytes} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return _unread(data.count(b"\n", 0, error.start) + 1, "it is not UTF-8")
    if text.startswith("\ufeff"):
        return _unread(1, "it begins with a byte order mark; save it without one")
    if faults := tuple(_text_faults(text)):
        return Document(None, faults)
    builder = _Builder(max_depth, max_nodes)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except _Stop as stop:
        builder.faults.append(stop.fault)
    except yaml.YAMLError as error:
        builder.faults.append(_syntax_fault(error))
    except (ValueError, OverflowError):  # chr() and int() of what an escape or a directive says
        builder.faults.append(Fault(builder.line, (), "it has a number that is out of range"))
    else:
        if not builder.documents:
            builder.faults.append(Fault(1, (), "it is empty"))
    return Document(builder.root, tuple(builder.faults))


def _unread(line: int, what: str) -> Document:
    return Document(None, (Fault(line, (), what),))


def _text_faults(text: str) -> Iterator[Fault]:
    """One fault for each line and kind of hazard, a bounded number of them."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if text.endswith("\r"):
        lines[-1] += "\r"
    found = (
        Fault(number, (), what.format(f"U+{ord(match[0]):04X}"))
        for number, line in enumerate(lines, 1)
        for unfit, what in _UNFIT_IN_LINE
        if (match := unfit.search(line))
    )
    return islice(found, MAX_TEXT_FAULTS)


def _syntax_fault(error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = str(getattr(error, "problem", None) or getattr(error, "context", None) or error)
    what = "there is a tag (!); leave it out" if " tag" in problem else f"it is not YAML: {problem}"
    return Fault(mark.line + 1 if mark else 1, (), shown(what, MAX_PROBLEM))


class _Stop(Exception):  # noqa: N818 - nothing that leaves this module
    """Reading cannot go on."""

    def __init__(self, line: int, path: Path, what: str) -> None:
        super().__init__(what)
        self.fault = Fault(line, path, what)


@dataclass(slots=True)
class _Frame:
    """A list or a group of fields that is still open.

    :ivar key: the key that waits for its value; None: a key is next.
    :ivar is_kept: False where that value has been refused for its key.
    """

    line: int
    path: Path
    is_list: bool
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    key: str | None = None
    key_line: int = 0
    is_kept: bool = True

    @property
    def child_path(self) -> Path:
        if self.is_list:
            return (*self.path, len(self.items))
        return self.path if self.key is None else (*self.path, self.key)

    @property
    def awaits_key(self) -> bool:
        return not self.is_list and self.key is None

    def add(self, node: Node) -> None:
        if self.is_list:
            self.items.append(node)
            return
        assert self.key is not None
        if self.is_kept:
            self.entries[self.key] = replace(node, line=self.key_line)
        self.key = None

    def close(self) -> Node:
        return Node(self.line, tuple(self.items) if self.is_list else self.entries)


class _Builder:
    """Makes the tree from events; never recursive, however the document is nested."""

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self.root: Node | None = None
        self.faults: list[Fault] = []
        self.documents = 0
        self.line = 1
        self._open: list[_Frame] = []
        self._nodes = 0
        self._max_depth = max_depth
        self._max_nodes = max_nodes

    @property
    def path(self) -> Path:
        return self._open[-1].child_path if self._open else ()

    def take(self, event: events.Event) -> None:
        assert event.start_mark is not None
        self.line = event.start_mark.line + 1
        match event:
            case events.DocumentStartEvent():
                self._start(event)
            case events.AliasEvent():
                self._count()
                self._refuse("there is an alias (*); write the value out")
                self._add(Node(self.line, Unclear("an alias")))
            case events.ScalarEvent():
                self._count()
                self._refuse_properties(event)
                self._scalar(event)
            case events.SequenceStartEvent() | events.MappingStartEvent():
                self._count()
                self._refuse_properties(event)
                self._enter(is_list=isinstance(event, events.SequenceStartEvent))
            case events.SequenceEndEvent() | events.MappingEndEvent():
                self._add(self._open.pop().close())

    def _start(self, event: events.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            raise _Stop(self.line, (), "a second document begins; there must be one")
        if event.version or event.tags:
            self._refuse("there is a % directive; leave it out")

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > self._max_nodes:
            raise _Stop(self.line, (), f"it has more than {self._max_nodes} values")

    def _refuse(self, what: str) -> None:
        self.faults.append(Fault(self.line, self.path, what))

    def _refuse_properties(self, event: events.ScalarEvent | events.CollectionStartEvent) -> None:
        if event.anchor is not None:
            self._refuse("there is an anchor (&); write every value out")
        if event.tag is not None:
            self._refuse("there is a tag (!); leave it out")

    def _enter(self, *, is_list: bool) -> None:
        if self._open and self._open[-1].awaits_key:
            raise _Stop(self.line, self.path, "a key must be text")
        if len(self._open) >= self._max_depth:
            raise _Stop(self.line, (), f"it is nested more than {self._max_depth} deep")
        self._open.append(_Frame(self.line, self.path, is_list))

    def _scalar(self, event: events.ScalarEvent) -> None:
        text = event.value
        if unfit := _UNFIT_IN_VALUE.search(text):
            self._refuse(f"it holds the character U+{ord(unfit[0]):04X}")
            text = _UNFIT_IN_VALUE.sub("\ufffd", text)
        is_plain = event.style in (None, "")
        if self._open and self._open[-1].awaits_key:
            self._key(self._open[-1], text, is_plain=is_plain)
        else:
            self._add(Node(self.line, _value(text) if is_plain else text, text))

    def _key(self, frame: _Frame, key: str, *, is_plain: bool) -> None:
        value = _value(key) if is_plain else key
        is_kept = False
        if is_plain and key == "<<":
            self._refuse("<< is a merge key; write the fields out")
        elif not isinstance(value, str):
            kind = value.kind if isinstance(value, Unclear) else Node(0, value).kind
            self._refuse(f"the key {shown(key) or '(none)'} is {kind} to YAML; write it in quotes")
        elif key in frame.entries:
            first = frame.entries[key].line
            self._refuse(f"{shown(key)} is there twice, first in line {first}")
        else:
            is_kept = True
        frame.key, frame.key_line, frame.is_kept = key, self.line, is_kept

    def _add(self, node: Node) -> None:
        if self._open:
            if self._open[-1].awaits_key:
                raise _Stop(self.line, self.path, "a key must be text")
            self._open[-1].add(node)
        else:
            self.root = node


def _value(plain: str) -> str | int | bool | Unclear:
    if plain in ("true", "false"):
        return plain == "true"
    if _DECIMAL.match(plain):
        return int(plain)
    return next((Unclear(kind) for kind, form in _READ_AS if form.match(plain)), plain)
