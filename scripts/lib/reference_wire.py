"""docs/reference/wire.md and wire.schema.json, from the models of the wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from forge_core.admission import DEFAULT_REQUEST
from forge_core.egress_domains import DOMAIN_PATTERN
from forge_core.wire.base import (
    COMMIT_PATTERN,
    ID_PATTERN,
    PROTOCOL_VERSION,
    TIME_PATTERN,
    WireModel,
)
from forge_core.wire.events import PAYLOADS
from forge_core.wire.from_bridge import HUB_METHODS
from forge_core.wire.from_hub import CLIENT_TARGETS
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_core.wire.limits import MAX_INBOUND_BYTES, MAX_MESSAGE_BYTES

from .reference_markdown import code, page, prose, table
from .reference_reasons import blockers, reasons

_NAMED_PATTERNS = {
    pattern.replace("\\Z", "$"): name
    for pattern, name in (
        (ID_PATTERN, "id"),
        (COMMIT_PATTERN, "commit"),
        (TIME_PATTERN, "time"),
        (DOMAIN_PATTERN, "domain"),
    )
}

Schema = Mapping[str, Any]

_INTRODUCTION = f"""\
Version {PROTOCOL_VERSION}. The bridge is a SignalR client (JSON hub protocol over WebSockets) of
`<server base>/hubs/runner`. This page lists every message; [wire.schema.json](wire.schema.json)
has the same as JSON Schema, [codes.md](codes.md) the closed lists.

- Property names are camelCase, enumerations are strings. An ASP.NET Core hub registers
  `JsonStringEnumConverter`.
- Times are RFC 3339 with an offset; the bridge sends UTC with milliseconds. Durations are whole
  milliseconds (`…Ms`), sizes whole bytes (`…Bytes`).
- Unknown properties are ignored. A property that is not marked *optional* and is missing, or any
  known one of another type, makes the message `malformed`; the error names the property.
- An *id* is 1 to 128 letters, digits, `-` and `_`, and begins with a letter or digit: ids become
  file names and labels. A *commit* is 40 or 64 lower-case hexadecimal digits. A *domain* is the
  name of a host, or with a dot before it of a host and all below it
  ([what may be listed](contract.md)).
- A hub method takes exactly one object and returns exactly one. A client target takes one.
- The bridge sends no message over {MAX_MESSAGE_BYTES} bytes, because an ASP.NET Core hub drops
  the connection above 32 KiB, and takes none over {MAX_INBOUND_BYTES}."""

_KEY = bytes(range(32))
_MESSAGE = lease_message("att-1", 7, 3, 60_000, "2026-11-29T14:00:00.000Z")
_DEFAULTS = (
    f"{DEFAULT_REQUEST.pids} processes, {DEFAULT_REQUEST.memory_bytes >> 30} GiB"
    f" and {DEFAULT_REQUEST.cpu_millis} `cpuMillis`"
)
_CONVERSATION = f"""\
## A conversation

The bridge connects with `Authorization: Bearer TOKEN` on negotiate and upgrade, and again after
every loss. *Call* is an invocation that waits for its completion; *send* is one without an id.

```
bridge                                              hub
  call RegisterRunner           ──▶                   a connection before it counts no more
                                ◀──  RegisterAck      how often to send heartbeats
  call ReadAttemptSnapshot 1…n  ──▶                   what it believes is on this instance
                                ◀──  SnapshotAck
  call Heartbeat                ──▶                   from here on it may offer
                                ◀──  send Offer       one offer id, attempt and fence
  call SubmitOfferDecision      ──▶                   accepted, or rejected and why
                                ◀──  send Start       at once: the reservation ends with the offer
  call SubmitDispatchEvent …    ──▶
                                ◀──  send LeaseUpdate   every third of the ttl
  call SubmitDispatchResult     ──▶                   revision 1: the outcome; cleanup pending
  call SubmitCleanupReport      ──▶                   what was removed
  call SubmitDispatchResult     ──▶                   revision 2: the same, cleanup complete
```

- *Fence*: the number of the dispatch within its attempt. Each further dispatch of an attempt has a
  higher one; the bridge ends what runs under a lower one, with `superseded`.
- Messages answered with [ReplayAck](#replayack), but for `log` and `deadline`, are on the runner's
  disk until one comes, and are sent again after each connect: a hub sees some of them twice.
  Answer `persisted` only when they are on your disk. `rejected` sets the message aside for good; an
  error of the call does not.
- What an offer's `resources` leave out or at 0 is taken for {_DEFAULTS}.
- Cleanup and result do not wait for each other: a report may come before the revision 2, or after.
- An attempt that two snapshots in a row do not list, the bridge ends. What one lists and the bridge
  does not know, it answers with the result `bridge_stopped`.
- Not accepted (`"accepted": false`) has a `reason`, a word for programs ([all of them](#reasons)),
  and a `detail` for people.
  After a refused `RegisterRunner` the bridge waits its longest pause and tries again.
- Ids of offers, attempts, sessions and requests are the hub's; instance ids are the bridge's, new
  at each start of it. `Offer`, `Start` and `Reap` name the instance they are meant for;
  another one ignores them.

## The lease

`Start` brings the first lease: `key` is base64 of 32 random bytes, made for this dispatch alone;
`ttlMs` runs from its receipt. Each `LeaseUpdate` has a higher `sequence` than the one before, and
restarts the ttl, never past `hardWallMs`. A lease that has run out is not revived.

`mac` is base64 of HMAC-SHA256 under the key over these six lines, joined by one line feed, without
one at the end: `forge-lease-v1`, `attemptId`, `fence`, `sequence`, `ttlMs` (integers in decimal),
and `issuedAt` exactly as it is sent. To try it:

| | |
| --- | --- |
| key | the bytes 0 to 31: `{base64.b64encode(_KEY).decode()}` |
| message | `{_MESSAGE.decode().replace(chr(10), chr(92) + "n")}` |
| `mac` | `{sign_lease(_KEY, _MESSAGE)}` |"""


def wire_page() -> str:
    """The page for people."""
    return page(
        "The wire",
        _INTRODUCTION,
        _CONVERSATION,
        "## Bridge → hub",
        *_hub_methods(),
        "## Hub → bridge",
        *(_message(f"### {target}", model) for target, model in CLIENT_TARGETS.items()),
        "## Payloads of dispatch events",
        "`SubmitDispatchEvent` carries one of these, by `type`. `log` and `deadline` are not "
        "durable and count in `streamSequence`; all others are, and count in `sequence`. The "
        "`code` of a `warning` is a [WarningCode](codes.md#warningcode).",
        *_event_payloads(),
        "## Shapes",
        *(_message(f"### {name}", None, name) for name in _shapes()),
        *reasons(),
        *blockers(),
    )


def schema_page() -> str:
    """The schema for programs."""
    definitions, references = _definitions()
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"forge-bridge wire protocol, version {PROTOCOL_VERSION}",
        "description": "hubMethods and clientTargets name the definition of each message.",
        "hubMethods": {
            name: {
                "request": references[method.request],
                "acknowledgement": references[method.acknowledgement],
            }
            for name, method in HUB_METHODS.items()
        },
        "clientTargets": {name: references[model] for name, model in CLIENT_TARGETS.items()},
        "eventPayloads": {kind.value: references[model] for kind, model in PAYLOADS.items()},
        "$defs": definitions,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _hub_methods() -> Iterator[str]:
    for name, method in HUB_METHODS.items():
        yield _message(f"### {name}", method.request)
        answer = method.acknowledgement
        yield f"Acknowledged with {_link(answer.__name__)}."


def _event_payloads() -> Iterator[str]:
    shown: set[str] = set()
    for kind, model in PAYLOADS.items():
        name = model.__name__
        if _definitions()[0][name].get("properties"):
            if name not in shown:
                yield _message(f"### {kind.value}", model)
            shown.add(name)
    empty = [code(kind.value) for kind, model in PAYLOADS.items() if not model.model_fields]
    yield f"Empty: {', '.join(empty)}."


def _shapes() -> list[str]:
    """Every object that is a part of a message and not one itself."""
    definitions, _ = _definitions()
    messages = {method.request for method in HUB_METHODS.values()}
    messages |= {*CLIENT_TARGETS.values(), *PAYLOADS.values()}
    names = {model.__name__ for model in messages}
    return sorted(n for n, d in definitions.items() if n not in names and d["type"] == "object")


def _message(heading: str, model: type[WireModel] | None, name: str | None = None) -> str:
    definition = _definitions()[0][name or (model.__name__ if model else "")]
    required = set(definition.get("required", ()))
    rows = [
        (code(field), _type(schema), "" if field in required else "optional")
        for field, schema in definition.get("properties", {}).items()
    ]
    about = prose(definition.get("description"))
    return "\n\n".join(
        part for part in (heading, about, rows and table(("property", "type", ""), rows)) if part
    )


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return _link(str(schema["$ref"]).rpartition("/")[2])
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " ".join(code(str(word)) for word in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema.get('items', {}))}{_bounds(schema, 'Items')}"
        case "object":
            return f"object of {_values(schema)}"
        case "string":
            pattern = schema.get("pattern")
            if pattern in _NAMED_PATTERNS:
                return _NAMED_PATTERNS[pattern]
            return f"string{_bounds(schema, 'Length')}{f' {code(pattern)}' if pattern else ''}"
        case "integer":
            return f"integer{_range(schema)}"
        case None:
            return "any"
        case other:
            return str(other)


def _values(schema: Schema) -> str:
    by_pattern = list(schema.get("patternProperties", {}).values())
    values = by_pattern[0] if by_pattern else schema.get("additionalProperties", True)
    names = schema.get("propertyNames", {})
    named = f" by {_type(names)}" if "$ref" in names else ""
    return f"{'any' if values is True else _type(values)}{named}"


def _bounds(schema: Schema, what: str) -> str:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is None:
        return f", at least {low}" if low else ""
    return f", {low} to {high}" if low else f", at most {high}"


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    return f", {low} to {high}" if high is not None and high < 2**63 - 1 else f", at least {low}"


def _link(name: str) -> str:
    if "enum" in _definitions()[0].get(name, {}):
        return f"[{name}](codes.md#{name.lower()})"
    return f"[{name}](#{name.lower()})"


@cache
def _definitions() -> tuple[dict[str, Any], dict[type[WireModel], Any]]:
    """Every definition by name, and the reference to each message's own."""
    models: dict[type[WireModel], None] = {}
    for method in HUB_METHODS.values():
        models |= {method.request: None, method.acknowledgement: None}
    models |= dict.fromkeys([*CLIENT_TARGETS.values(), *PAYLOADS.values()])
    by_mode, whole = models_json_schema(
        [(model, "serialization") for model in models], by_alias=True
    )
    references = {model: by_mode[model, "serialization"] for model in models}
    return _plain(whole["$defs"]), references


def _plain(schema: Any) -> Any:
    """Patterns as ECMA 262 has them, and no titles, which only repeat the names."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.replace("\\Z", "$") if key == "pattern" else _plain(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
