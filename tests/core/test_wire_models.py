"""Every message of the wire, in both directions, against everything that JSON can say."""

from __future__ import annotations

import copy
import json
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_parts import KEY, MODELS, Place, alternatives, example, payloads, places, schema_of

from forge_core.errors import RefusedError
from forge_core.wire.base import MAX_FIELD_PATH, MAX_INT, WireModel, parse, well_formed
from forge_core.wire.from_bridge import (
    HUB_METHODS,
    PublishGrantAck,
    RedeemPublishGrant,
    RedeemSecretGrant,
    SecretGrantAck,
)
from forge_core.wire.from_hub import (
    CLIENT_TARGETS,
    Dispatch,
    LeaseGrant,
    LeaseUpdate,
    Offer,
    Reap,
    Start,
)

pytestmark = pytest.mark.requirement("B-03", "B-04", "B-06", "B-08", "B-83", "B-84", "B-88")

SCHEMAS = {name: schema_of(model) for name, model in MODELS.items()}
SECRET = "S3CRET VALUE\n"
HUGE = 987_654_321_098_765_432_109_876
WRONG: dict[str, list[Any]] = {
    "integer": [True, 1.0, "1", SECRET, float("nan"), float("inf"), HUGE, -HUGE, 10**4_500, [], {}],
    "boolean": [0, 1, "true", SECRET, 1.0, [], {}],
    "string": [1, True, 1.5, [], {}, [SECRET], {"x": SECRET}],
    "array": ["x", SECRET, 1, True, {}, {"x": SECRET}, None],
    "object": ["x", SECRET, 1, True, [], [SECRET], None],
}


def full(name: str) -> Any:
    return example(SCHEMAS[name])


def refusal(name: str, payload: Any) -> RefusedError | None:
    """How it is refused; whatever else it raised would be a bug."""
    try:
        parse(MODELS[name], payload, what=name)
    except RefusedError as error:
        refused = error
    else:
        return None
    text = str(refused)
    assert refused.code == "malformed"
    assert refused.field is not None
    assert len(refused.field) <= MAX_FIELD_PATH
    assert text.encode()
    assert SECRET.strip() not in text
    assert str(HUGE) not in text
    return refused


def kind_of(schema: dict[str, Any]) -> str:
    return "string" if "enum" in schema or "const" in schema else schema.get("type", "object")


EVERY_PLACE = [
    pytest.param(name, place.path, id=f"{name}-{place.path}")
    for name, schema in SCHEMAS.items()
    for place in places(schema, example(schema))
]


def find(name: str, path: str) -> tuple[Any, Place]:
    payload = full(name)
    return payload, next(p for p in places(SCHEMAS[name], payload) if p.path == path)


@pytest.mark.parametrize("name", MODELS)
def test_the_full_message_goes_there_and_back(name: str) -> None:
    model = parse(MODELS[name], full(name), what=name)
    assert model.to_wire() == full(name)
    assert parse(MODELS[name], json.loads(json.dumps(model.to_wire())), what=name) == model


@pytest.mark.parametrize(("name", "path"), EVERY_PLACE)
def test_a_property_that_is_missing(name: str, path: str) -> None:
    payload, place = find(name, path)
    del place.holder[place.name]
    refused = refusal(name, payload)
    assert (refused is not None) == place.required
    assert refused is None or refused.field == path


@pytest.mark.parametrize(("name", "path"), EVERY_PLACE)
def test_a_property_that_is_null(name: str, path: str) -> None:
    payload, place = find(name, path)
    place.holder[place.name] = None
    refused = refusal(name, payload)
    nullable = any(one.get("type") == "null" for one in place.schema.get("anyOf", ()))
    assert (refused is None) == nullable
    assert refused is None or refused.field == path


@pytest.mark.parametrize(("name", "path"), EVERY_PLACE)
def test_a_property_of_another_type(name: str, path: str) -> None:
    payload, place = find(name, path)
    schema = alternatives(place.schema)[0]
    for wrong in WRONG[kind_of(schema)]:
        if wrong is None and len(place.schema.get("anyOf", ())) > 1:
            continue
        place.holder[place.name] = wrong
        refused = refusal(name, payload)
        if schema.get("minItems") == 0 or not (
            wrong in ([], {}) and kind_of(schema) in ("array", "object")
        ):
            assert refused is not None, wrong
            assert refused.field is not None
            assert refused.field == path or refused.field.startswith(f"{path}.")


@pytest.mark.parametrize(("name", "path"), EVERY_PLACE)
def test_a_property_out_of_range(name: str, path: str) -> None:
    payload, place = find(name, path)
    schema = alternatives(place.schema)[0]
    wrong: list[Any] = []
    match kind_of(schema):
        case "integer":
            wrong = [schema["minimum"] - 1, schema["maximum"] + 1]
            assert schema["maximum"] <= MAX_INT
        case "string" if "enum" in schema or "const" in schema or "pattern" in schema:
            wrong = [SECRET, "", "x\0", "a\nb", "\ud800"]
        case "string" if "maxLength" in schema:
            wrong = ["x" * (schema["maxLength"] + 1)]
    for value in wrong:
        if "\\0" in schema.get("pattern", "") and value != "x\0":
            continue
        place.holder[place.name] = value
        refused = refusal(name, payload)
        assert refused is not None, value
        assert refused.field == path


@pytest.mark.parametrize("name", MODELS)
def test_unknown_properties_are_ignored(name: str) -> None:
    payload = full(name)
    holders = {id(place.holder): place.holder for place in places(SCHEMAS[name], payload)}
    for holder in holders.values():
        holder["somethingNewer"] = {"deeply": [SECRET, float("nan"), None]}
    assert parse(MODELS[name], payload, what=name) == parse(MODELS[name], full(name), what=name)


def test_only_the_names_of_the_wire_are_names() -> None:
    payload = full("Offer")
    payload["offer_id"] = payload.pop("offerId")
    refused = refusal("Offer", payload)
    assert refused is not None
    assert refused.field == "offerId"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "x\0", "\u0661", "2026-11-29T14:00:00Z", HUGE, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
names = st.sampled_from(sorted(MODELS))


@given(names, json_values)
def test_any_json_is_read_or_refused(name: str, payload: Any) -> None:
    refusal(name, payload)


@given(st.data(), names)
def test_one_bad_place_in_a_good_message(data: st.DataObject, name: str) -> None:
    payload = full(name)
    every = list(places(SCHEMAS[name], payload))
    if every:
        place = data.draw(st.sampled_from(every))
        place.holder[place.name] = data.draw(json_values)
    refusal(name, payload)


@given(st.data(), names)
def test_any_valid_message_goes_there_and_back(data: st.DataObject, name: str) -> None:
    payload = data.draw(payloads(SCHEMAS[name]))
    if payload.get("scope") == "attempt":
        # What one field demands of others the generator does not read from the schema.
        payload |= {"attemptId": "a", "fence": 1}
    model = parse(MODELS[name], copy.deepcopy(payload), what=name)
    assert parse(MODELS[name], model.to_wire(), what=name) == model


@pytest.mark.parametrize("payload", [None, [], "x", 1, True, float("nan"), [{}]])
def test_what_is_no_object_is_refused(payload: Any) -> None:
    for name in MODELS:
        assert refusal(name, payload) is not None


def test_deep_nesting_is_refused_or_ignored() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    assert refusal("Offer", {**full("Offer"), "services": deep}) is None
    assert refusal("Offer", {**full("Offer"), "requirements": deep}) is not None
    assert refusal("Start", {**full("Start"), "services": deep}) is not None


HOSTILE_IDS = [
    *("", "-a", "_a", "a/b", "..", ".", "a.b", "a\n", "\na", "a b", "a\0", "x" * 129),
    *("é", "a\u0661", "\u0661", "\ud800"),
]
NO_BRANCHES = [
    *("", "-d", "--delete", "a..b", "a/", "/a", "a//b", ".a", "a/.b", "a.lock", "a.lock/b"),
    *("a b", "a\n", "a\0", "a~", "a^", "a:b", "a?", "a*", "a[", "a\\b", "a@{0}", "a.", "x" * 256),
]
NO_KEYS = ["", "AAAA", KEY + "\n", KEY[:-1], KEY.replace("A", "é", 1), "A" * 44]


@pytest.mark.parametrize("value", HOSTILE_IDS)
def test_an_id_can_be_a_file_name_and_a_label_or_it_is_none(value: str) -> None:
    for name in ("offerId", "attemptId", "runnerInstanceId", "projectId", "trustDomainId"):
        refused = refusal("Offer", {**full("Offer"), name: value})
        assert refused is not None
        assert refused.field == name


@pytest.mark.parametrize("value", ["a", "0", "A-_9", "x" * 128])
def test_good_ids(value: str) -> None:
    assert refusal("Offer", {**full("Offer"), "attemptId": value}) is None


@pytest.mark.parametrize(
    "value",
    [
        "2026-11-29",
        "2026-11-29T14:00:00",
        "2026-11-29 14:00:00Z",
        "2026-11-29T14:00:00Z\n",
        "\u0662\u0660\u0662\u0666-11-29T14:00:00Z",
        "2026-11-29T14:00:00.Z",
        "2026-11-29T14:00:00.0000000000Z",
    ],
)
def test_a_time_is_rfc_3339_in_ascii(value: str) -> None:
    refused = refusal("LeaseUpdate", {**full("LeaseUpdate"), "issuedAt": value})
    assert refused is not None
    assert refused.field == "issuedAt"


branches = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="ab/.@{-~^:?*[\\ \n\x7f", max_size=8),
    st.lists(
        st.sampled_from(
            ["a", ".", "..", "/", "//", "@", "@{", ".lock", "-", "é", "\n", " ", "HEAD"]
        )
    ).map("".join),
)


@given(st.lists(branches, min_size=30, max_size=60))
def test_a_branch_is_one_that_git_takes_and_never_an_option(values: list[str]) -> None:
    accepted = [v for v in values if refusal("Start", {**full("Start"), "branch": v}) is None]
    for value in accepted[:3]:
        assert not value.startswith("-")
        command = ["git", "check-ref-format", f"refs/heads/{value}"]
        assert subprocess.run(command, check=False).returncode == 0, value


@pytest.mark.parametrize("value", ["main", "topic/one", "a.b", "é", "v1.0", "a@b", "x" * 255])
def test_ordinary_branches_are_taken(value: str) -> None:
    assert refusal("Start", {**full("Start"), "branch": value}) is None


@pytest.mark.parametrize("value", NO_BRANCHES)
def test_what_git_refuses_is_refused(value: str) -> None:
    refused = refusal("Start", {**full("Start"), "branch": value})
    assert refused is not None
    assert refused.field == "branch"


@pytest.mark.parametrize("key", NO_KEYS)
def test_a_lease_key_is_32_bytes_in_base64(key: str) -> None:
    payload = full("Start")
    payload["lease"]["key"] = key
    refused = refusal("Start", payload)
    assert refused is not None
    assert refused.field == "lease.key"
    payload["lease"]["key"] = KEY
    start = parse(Start, payload, what="Start")
    assert start.lease.key_bytes == bytes(range(32))


def test_a_key_that_should_not_be_there_is_not_told() -> None:
    for env in ({"TOKEN=S3CRET VALUE": "x"}, {SECRET: "x"}, {"x" * 100_000: "x"}, {"\ud800": "x"}):
        refused = refusal("Dispatch", {**full("Dispatch"), "env": env})
        assert refused is not None
        assert refused.field == "env.[key]"
        assert len(str(refused)) < 300


def test_a_long_path_is_cut() -> None:
    refused = refusal("SecretGrantAck", {"accepted": True, "secrets": {"x" * 256: 1}})
    assert refused is not None
    assert refused.field == ("secrets." + "x" * 256)[:MAX_FIELD_PATH]


def test_an_error_of_our_own_construction_does_not_tell_the_value() -> None:
    with pytest.raises(ValueError, match="key") as refused:
        LeaseGrant(ttl_ms=1, sequence=1, key=SECRET)
    assert SECRET.strip() not in str(refused.value)


def secret_messages() -> list[WireModel]:
    start, dispatch = full("Start"), full("Dispatch")
    start["agent"] |= {"env": {"TOKEN": SECRET}, "prompt": SECRET}
    start["publication"]["handle"] = SECRET
    start["secretGrants"] = [SECRET]
    dispatch["env"] = {"TOKEN": SECRET}
    handle = {"handle": SECRET}
    redeemed = {"accepted": True, "secrets": {"TOKEN": SECRET}, "credential": SECRET}
    return [
        parse(Start, start, what="Start"),
        parse(Dispatch, dispatch, what="Dispatch"),
        parse(RedeemSecretGrant, {**full("RedeemSecretGrant"), **handle}, what="it"),
        parse(RedeemPublishGrant, {**full("RedeemPublishGrant"), **handle}, what="it"),
        parse(SecretGrantAck, redeemed, what="it"),
        parse(PublishGrantAck, redeemed, what="it"),
    ]


@pytest.mark.requirement("B-60", "B-61")
@pytest.mark.parametrize("model", secret_messages(), ids=lambda model: type(model).__name__)
def test_no_secret_shows(model: WireModel) -> None:
    for text in (repr(model), str(model), f"{model}", repr([model])):
        assert SECRET.strip() not in text
        assert KEY not in text
    assert SECRET.strip() in json.dumps(model.to_wire())


def test_the_tables_name_each_message_like_its_model() -> None:
    for name, method in HUB_METHODS.items():
        assert method.request.__name__ == name
    named = {m.__name__.removesuffix("Changed") for m in CLIENT_TARGETS.values()}
    assert named == set(CLIENT_TARGETS)
    assert LeaseGrant.model_fields["key"].repr is False
    assert CLIENT_TARGETS["Offer"] is Offer
    assert CLIENT_TARGETS["LeaseUpdate"] is LeaseUpdate


@given(st.text(st.characters(), max_size=20))
def test_well_formed_text_can_be_encoded_and_good_text_stays(text: str) -> None:
    clean = well_formed(text)
    clean.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert clean == text


@pytest.mark.requirement("B-88")
def test_a_reap_of_one_attempt_is_never_a_reap_of_all() -> None:
    asked = {"requestId": "r", "runnerId": "n", "runnerInstanceId": "i"}
    named = {"attemptId": "a", "fence": 3}
    for missing in ({}, {"attemptId": "a"}, {"fence": 3}):
        with pytest.raises(RefusedError, match="attemptId and fence"):
            parse(Reap, {**asked, "scope": "attempt", **missing}, what="Reap")
    assert parse(Reap, {**asked, "scope": "attempt", **named}, what="Reap").dispatch == ("a", 3)
    assert parse(Reap, {**asked, "scope": "orphans", **named}, what="Reap").dispatch is None
