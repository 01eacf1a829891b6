"""The record codec, and the behaviour of pysignalr that it stands on."""

from __future__ import annotations

from importlib.metadata import version

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pysignalr.messages import (
    CloseMessage,
    CompletionMessage,
    HandshakeRequestMessage,
    InvocationMessage,
    Message,
    PingMessage,
    StreamInvocationMessage,
)
from pysignalr.protocol.json import JSONProtocol

from forge_core.errors import RefusedError
from forge_edges import signalr_codec as codec

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.requirement("B-01")
class TestPysignalr:
    """What pysignalr 1.3.3 does; a change of it must be looked at, not discovered."""

    def test_version(self) -> None:
        assert version("pysignalr") == "1.3.3"

    def test_handshake_request(self) -> None:
        protocol = JSONProtocol()
        assert protocol.record_separator == "\x1e"
        assert protocol.handshake_message() == HandshakeRequestMessage("json", 1)
        assert orjson.loads(codec.handshake_request()[:-1]) == {"protocol": "json", "version": 1}

    def test_messages_become_these_records(self) -> None:
        assert InvocationMessage("7", "M", [1]).dump() == {
            "type": 1,
            "invocationId": "7",
            "target": "M",
            "arguments": [1],
        }
        assert CompletionMessage("7", result={"a": 1}).dump() == {
            "type": 3,
            "invocationId": "7",
            "result": {"a": 1},
        }
        assert PingMessage().dump() == {"type": 6}

    def test_records_become_these_messages(self) -> None:
        parse = JSONProtocol.parse_message
        assert parse({"type": 6}) == PingMessage()
        assert parse({"type": 3, "invocationId": "7", "error": "e"}) == CompletionMessage(
            "7", error="e"
        )
        assert parse({"type": 7, "error": "e", "allowReconnect": True}) == CloseMessage("e", True)

    def test_a_close_would_be_written_with_a_field_that_nobody_reads(self) -> None:
        assert CloseMessage("e", True).dump() == {
            "type": 7,
            "error": "e",
            "allow_reconnect": True,
        }
        encoded = orjson.loads(codec.encode(CloseMessage("e", True))[:-1])
        assert encoded == {"type": 7, "error": "e", "allowReconnect": True}
        assert orjson.loads(codec.encode(CloseMessage())[:-1]) == {"type": 7}

    def test_a_record_without_type_would_be_a_close(self) -> None:
        assert JSONProtocol.parse_message({}) == CloseMessage()
        assert isinstance(codec.decode(b"{}"), codec.MalformedRecord)


@pytest.mark.requirement("B-01")
@given(json_values, st.text(min_size=1, max_size=20))
def test_what_is_encoded_is_decoded(payload: object, target: str) -> None:
    message = InvocationMessage("1", target, [payload])
    encoded = codec.encode(message)
    assert encoded.count(b"\x1e") == 1
    assert list(codec.decode_frame(encoded, max_record_bytes=1 << 20)) == [message]


@pytest.mark.requirement("B-01")
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_garbage_never_raises_anything_but_a_framing_error(pieces: list[bytes]) -> None:
    frame = b"\x1e".join(pieces)
    try:
        decoded = list(codec.decode_frame(frame, max_record_bytes=100))
    except codec.FramingError:
        assert not frame.endswith(b"\x1e") or max(map(len, frame.split(b"\x1e"))) >= 100
    else:
        assert len(decoded) == frame.count(b"\x1e")


@pytest.mark.requirement("B-01")
@given(st.dictionaries(st.sampled_from(
    ["type", "invocationId", "target", "arguments", "result", "error", "allowReconnect", "item",
     "headers", "streamIds", "surprise"]
), json_values | st.integers(0, 9)))  # fmt: skip
def test_a_lying_record_is_a_typed_message_or_set_aside(fields: dict[str, object]) -> None:
    match codec.decode(orjson.dumps(fields)):
        case InvocationMessage() | StreamInvocationMessage() as message:
            assert isinstance(message.target, str)
            assert isinstance(message.arguments, list)
        case CompletionMessage() as message:
            assert isinstance(message.invocation_id, str)
            assert message.error is None or isinstance(message.error, str)
        case CloseMessage() as message:
            assert message.error is None or isinstance(message.error, str)
        case Message() | codec.MalformedRecord() | codec.UnknownRecord():
            pass


@pytest.mark.requirement("B-01")
@pytest.mark.parametrize(
    "record",
    [
        b"", b"null", b"[]", b"7", b"{", b"\xff\xfe", b'{"type":"1"}', b'{"type":true}',
        b'{"type":1,"target":"Offer"}', b'{"type":1,"target":7,"arguments":[]}',
        b'{"type":1,"target":"Offer","arguments":{}}', b'{"type":3}', b'{"type":3,"result":1}',
        b'{"type":3,"invocationId":1}', b'{"type":7,"allowReconnect":"no"}',
        b'{"type":1,"target":"Offer","arguments":[NaN]}',
    ],
)  # fmt: skip
def test_malformed_records_are_named(record: bytes) -> None:
    assert isinstance(codec.decode(record), codec.MalformedRecord)


@pytest.mark.requirement("B-01")
def test_unknown_types_and_fields_are_set_aside() -> None:
    assert codec.decode(b'{"type":9,"sequenceId":4}') == codec.UnknownRecord(9)
    decoded = codec.decode(b'{"type":1,"target":"T","arguments":[1],"headers":{"a":"b"},"new":1}')
    assert decoded == InvocationMessage(None, "T", [1])


@pytest.mark.requirement("B-01")
@pytest.mark.parametrize(
    "payload",
    [float("nan"), [{"a": float("inf")}], {"a": (float("-inf"),)}, 1 << 65, "\ud800", {1: 2}, {1}],
)
def test_what_json_cannot_say_is_refused(payload: object) -> None:
    with pytest.raises(RefusedError) as caught:
        codec.encode(InvocationMessage("1", "M", [payload]))
    assert caught.value.code == "not_encodable"


@pytest.mark.requirement("B-01")
def test_text_travels_as_utf8_without_escapes() -> None:
    assert "é☃\u2028".encode() in codec.encode(InvocationMessage(None, "M", ["é☃\u2028"]))


@pytest.mark.requirement("B-01")
def test_the_bound_of_a_record_counts_its_separator() -> None:
    assert codec.split_records(b"x" * 9 + b"\x1e", max_record_bytes=10) == [b"x" * 9]
    with pytest.raises(codec.FramingError, match="11 bytes"):
        codec.split_records(b"x" * 10 + b"\x1e", max_record_bytes=10)


@pytest.mark.requirement("B-01")
@pytest.mark.parametrize(
    ("record", "speaks"),
    [
        (b'{"protocol":"json","version":1}', True),
        (b'{"protocol":"messagepack","version":1}', False),
        (b'{"protocol":"json","version":2}', False),
        (b"[]", False),
        (b"GET / HTTP/1.1", False),
    ],
)
def test_handshake_requests(record: bytes, speaks: bool) -> None:
    assert codec.is_handshake_request(record) is speaks
