"""A pydantic model of a YAML document, with every fault at its line and field."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forge_core.yaml_tree import NULL, Document, Fault, Node, Path, shown

Model = TypeVar("Model", bound=BaseModel)

_KEY: Final = "[key]"
_WANTED: Final = {
    "string_type": "text",
    "int_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a group of fields",
    "model_type": "a group of fields",
}
_ADVICE: Final = {
    "text": "write it in quotes",
    "a number": "write it in decimal digits, without quotes",
    "true or false": "write true or false",
    "a list": "begin each entry with -",
    "a group of fields": "write name: value below it",
}


def validate(
    model: type[Model], document: Document, *, private: frozenset[str] = frozenset()
) -> tuple[Model | None, tuple[Fault, ...]]:
    """The document as ``model``, or every reason why not, in the order of the lines.

    Faults of the document's own count too, and hide others of the same value.

    :param model: strict, with tuples for lists; unclear values are accepted by no type of it.
    :param private: top-level fields whose values never appear in a fault.
    """
    faults = list(document.faults)
    if document.root is None:
        return None, tuple(faults)
    known = {fault.path for fault in faults if fault.path}
    validated: Model | None = None
    try:
        validated = model.model_validate(document.root.plain())
    except ValidationError as error:
        found = error.errors(include_url=False)
        faults += [_fault(one, model, document.root, private) for one in found]
    unique = {
        (fault.line, fault.path, fault.what): fault
        for n, fault in enumerate(faults)
        if n < len(document.faults) or fault.path not in known
    }
    ordered = tuple(sorted(unique.values(), key=lambda fault: fault.line))
    return (None if ordered else validated), ordered


def _fault(
    error: ErrorDetails, model: type[BaseModel], root: Node, private: frozenset[str]
) -> Fault:
    location = error["loc"]
    is_key = location[-1:] == (_KEY,)
    path: Path = location[:-1] if is_key else location
    *_, nearest = _nodes(root, path)
    hides = bool(path) and path[0] in private
    return Fault(nearest.line, path, _what(error, nearest, model, path, hides=hides))


def _nodes(root: Node, path: Path) -> Iterator[Node]:
    """The node at ``path`` and all above it, the root first, as far as they are there."""
    node = root
    yield node
    for step in path:
        if isinstance(node.value, tuple) and isinstance(step, int):
            node = node.value[step]
        elif isinstance(node.value, Mapping) and step in node.value:
            node = node.value[str(step)]
        else:
            return
        yield node


def _what(
    error: ErrorDetails, node: Node, model: type[BaseModel], path: Path, *, hides: bool
) -> str:
    kind = error["type"]
    context: Mapping[str, Any] = error.get("ctx", {})
    written = ("" if hides else shown(node.text.strip())) or "this"
    if kind == "extra_forbidden":
        return _unknown(str(path[-1]), _fields_at(model, path[:-1]))
    if kind == "missing":
        return "it is missing"
    if kind == "value_error":
        return str(context["error"])
    if node.kind == NULL:
        return "it has no value; give it one or leave the line out"
    if kind in _WANTED:
        return _mistaken(node, written, _WANTED[kind])
    if kind in ("enum", "literal_error"):
        choices = str(context["expected"]).replace("'", "")
        if node.text == choices:
            return f"{written} is {node.kind} here; write it without quotes"
        return f"{written} is unknown here; write {choices}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = context.get("ge", context.get("le"))
        few = "small" if "ge" in context else "large"
        return f"{written} is too {few}; the {'least' if 'ge' in context else 'most'} is {bound}"
    if kind in ("too_long", "string_too_long"):
        unit = "entries" if kind == "too_long" else "characters"
        return f"it has more than {context['max_length']} {unit}"
    return error["msg"][:1].lower() + error["msg"][1:]


def _mistaken(node: Node, written: str, wanted: str) -> str:
    if node.kind == wanted:
        return f"{written} means different things to different readers; {_ADVICE[wanted]}"
    return f"{written} is {node.kind} here; {_ADVICE[wanted]}"


def _unknown(name: str, fields: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), fields, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
    return f"it is no field of this file; {hint}"


def _fields_at(model: type[BaseModel], path: Path) -> list[str]:
    for step in path:
        if isinstance(step, str):
            inner = _model_in(model.model_fields[step].annotation)
            assert inner is not None, "only a model forbids fields"
            model = inner
    return list(model.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for a in get_args(annotation) if (found := _model_in(a))), None)
