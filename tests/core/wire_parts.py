"""Payloads for every model of the wire, made from the models' own JSON schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from forge_core.egress_domains import DOMAIN_PATTERN
from forge_core.wire.base import COMMIT_PATTERN, ID_PATTERN, TIME_PATTERN, WireModel
from forge_core.wire.events import PAYLOADS
from forge_core.wire.from_bridge import HUB_METHODS
from forge_core.wire.from_hub import CLIENT_TARGETS, Branch

Schema = dict[str, Any]
KEY = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
BRANCH_PATTERN = Branch.__metadata__[0].metadata[2].pattern  # type: ignore[attr-defined]
EXAMPLES = {
    ID_PATTERN: "id-1",
    COMMIT_PATTERN: "0123456789abcdef0123456789abcdef01234567",
    TIME_PATTERN: "2026-11-29T14:00:00.000Z",
    BRANCH_PATTERN: "topic/one",
    DOMAIN_PATTERN: "example.org",
}
MODELS: dict[str, type[WireModel]] = {
    **CLIENT_TARGETS,
    **{name: method.request for name, method in HUB_METHODS.items()},
    **{m.acknowledgement.__name__: m.acknowledgement for m in HUB_METHODS.values()},
    **{f"event {event_type}": model for event_type, model in PAYLOADS.items()},
}


@dataclass(frozen=True)
class Place:
    """One property of an example payload: where it is, and what it may hold."""

    holder: dict[str, Any]
    name: str
    path: str
    schema: Schema
    required: bool


def schema_of(model: type[WireModel]) -> Schema:
    return inlined(model.model_json_schema(by_alias=True))


def inlined(schema: Schema) -> Schema:
    """Without references; no model of the wire contains itself."""
    definitions = schema.get("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return walk(definitions[node["$ref"].rpartition("/")[2]])
        return {key: walk(value) for key, value in node.items() if key != "$defs"}

    result = walk(schema)
    assert isinstance(result, dict)
    return result


def alternatives(schema: Schema) -> list[Schema]:
    """What it may be besides null."""
    return [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]


def example(schema: Schema, name: str = "") -> Any:
    """A payload in which every property is there and every list and mapping has one entry."""
    schema = alternatives(schema)[0]
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {key: example(value, key) for key, value in schema["properties"].items()}
        case "object" if "patternProperties" in schema:
            (value,) = schema["patternProperties"].values()
            return {"NAME": example(value)}
        case "object":
            value = schema.get("additionalProperties", True)
            key = example({"type": "string", **schema.get("propertyNames", {})})
            return {key: "x" if value is True else example(value)}
        case "array":
            return [example(schema["items"])]
        case "integer":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return True
        case "string" if name == "key":
            return KEY
        case "string":
            return EXAMPLES.get(schema.get("pattern", ""), "x")
    raise AssertionError(schema)


def places(schema: Schema, value: Any, path: str = "") -> Iterator[Place]:
    """Every property of an example, at any depth."""
    schema = alternatives(schema)[0]
    if isinstance(value, list):
        yield from places(schema["items"], value[0], f"{path}0.")
    elif isinstance(value, dict) and "properties" in schema:
        for name, inner in schema["properties"].items():
            required = name in schema.get("required", ())
            yield Place(value, name, path + name, inner, required)
            yield from places(inner, value[name], f"{path}{name}.")
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        for name, entry in value.items():
            yield from places(schema["additionalProperties"], entry, f"{path}{name}.")


def payloads(schema: Schema, name: str = "") -> st.SearchStrategy[Any]:
    """Any valid payload; optional properties may be absent or null."""
    nullable = any(one.get("type") == "null" for one in schema.get("anyOf", ()))
    inner = st.one_of(*(_payloads(one, name) for one in alternatives(schema)))
    return st.none() | inner if nullable else inner


def _payloads(schema: Schema, name: str) -> st.SearchStrategy[Any]:
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object" if "properties" in schema:
            properties = {key: payloads(value, key) for key, value in schema["properties"].items()}
            required = {key: properties.pop(key) for key in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=properties)
        case "object" if "patternProperties" in schema:
            (value,) = schema["patternProperties"].values()
            return st.dictionaries(st.sampled_from(["A", "_b9"]), payloads(value))
        case "object":
            value = schema.get("additionalProperties", True)
            names = {"type": "string", "minLength": 1, **schema.get("propertyNames", {})}
            values = st.text(max_size=8) if value is True else payloads(value)
            return st.dictionaries(_payloads(names, ""), values, max_size=3)
        case "array":
            return st.lists(
                payloads(schema["items"]), min_size=schema.get("minItems", 0), max_size=3
            )
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
        case "string":
            return _texts(schema, name)
    raise AssertionError(schema)


def _texts(schema: Schema, name: str) -> st.SearchStrategy[str]:
    pattern = schema.get("pattern")
    if name == "key":
        return st.just(KEY)
    if pattern == BRANCH_PATTERN:
        return st.sampled_from(["main", "topic/one", "é", "a-b_c.d", "x" * 255])
    if pattern == DOMAIN_PATTERN:
        return st.sampled_from(["example.org", ".example.org", "münchen.example"])
    if pattern == ID_PATTERN:
        return st.sampled_from(["a", "9", "A_-", "x" * 128])
    if pattern is not None and "\\0" not in pattern:
        return st.from_regex(re.compile(pattern.removeprefix("^")), fullmatch=True)
    alphabet = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    return st.text(
        alphabet, min_size=schema.get("minLength", 0), max_size=min(schema.get("maxLength", 12), 12)
    )
