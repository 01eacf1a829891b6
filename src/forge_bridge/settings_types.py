"""How each kind of setting is read: one strict parser, one phrase that says what is accepted.

The phrase appears in the error that refuses a value and in the generated reference, so the two
cannot disagree.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, SecretStr
from pydantic_core import CoreSchema, core_schema

from forge_core.errors import RefusedError
from forge_core.sandbox_spec import require_pinned
from forge_core.units import MAX_BYTES, format_size, parse_size_bytes, parse_whole_number
from forge_core.wire.base import ID_PATTERN
from forge_edges.hub_url import resolve_bridge_runner_hub_url

MAX_TEXT_CHARACTERS: Final = 4096
MAX_TOKEN_CHARACTERS: Final = 8192
_FLAGS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_DOCKER_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_EXECUTABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_PROXY_URL = re.compile(
    r"http://(?!.*\.\.)[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?:[0-9]{1,5}"
)
_TOKEN = re.compile(r"[\x21-\x7e]+")
_UNUSABLE: Final = ("is_loopback", "is_link_local", "is_multicast", "is_reserved", "is_unspecified")
_LSM = re.compile(r"(?:apparmor=[A-Za-z0-9][A-Za-z0-9_./-]{0,127}|label=[a-z]+:[A-Za-z0-9_.:,-]+)")


class NotAcceptedError(ValueError):
    """A value that a setting does not accept.

    :param wrong: what is wrong with it, as the end of a sentence that begins with the value.
    :param right: what would be accepted.
    """

    def __init__(self, wrong: str, right: str) -> None:
        super().__init__(f"{wrong}; give {right}")
        self.wrong = wrong
        self.right = right


@dataclass(frozen=True, slots=True)
class Accepts:
    """Metadata of an annotated field: its parser and the phrase for people.

    ``parse`` gets text from the environment or a typed value from an override; it returns the
    typed value or raises ValueError or RefusedError with what is wrong.
    """

    phrase: str
    parse: Callable[[Any], object]
    is_size: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, value: object) -> object:
        if value is None:
            return None
        try:
            return self.parse(value)
        except (RefusedError, ValueError) as error:
            raise NotAcceptedError(str(error), self.phrase) from None


def whole(low: int, high: int, what: str = "number") -> Accepts:
    """A whole number in a range; the setting's name carries its unit."""

    def parse(value: object) -> int:
        return _within(_integer(value, parse_whole_number), low, high, str)

    return Accepts(f"a whole {what} from {low} to {high}", parse)


def capped(low: int, cap: int, what: str) -> Accepts:
    """A whole number of at least ``low``; more than ``cap`` counts as ``cap``."""

    def parse(value: object) -> int:
        number = _within(_integer(value, parse_whole_number), low, MAX_BYTES, str)
        return min(number, cap)

    return Accepts(f"a whole {what} of at least {low}; more than {cap} counts as {cap}", parse)


def size(low: int, high: int = MAX_BYTES, *, bare: bool = False) -> Accepts:
    """A size in bytes; ``bare``: the setting's name says bytes, so a bare number will do."""

    def read(text: str) -> int:
        return parse_whole_number(text) if bare and text.isdecimal() else parse_size_bytes(text)

    def parse(value: object) -> int:
        return _within(_integer(value, read), low, high, format_size)

    unit = "bytes, or a size with a unit" if bare else "a size with a unit"
    bounds = f"at least {format_size(low)}"
    if high < MAX_BYTES:
        bounds += f" and at most {format_size(high)}"
    return Accepts(f"{unit}, such as 4GiB (4g is the same, 4GB is 4·10^9); {bounds}", parse, True)


def flag() -> Accepts:
    """True or false."""

    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        found = _FLAGS.get(value.lower()) if isinstance(value, str) else None
        if found is None:
            raise ValueError("it is neither true nor false")
        return found

    return Accepts("true or false", parse)


def choice(kind: type[StrEnum]) -> Accepts:
    """One word of a closed list."""
    words = " or ".join(member.value for member in kind)

    def parse(value: object) -> StrEnum:
        try:
            return kind(_text(value))
        except ValueError:
            raise ValueError(f"it is not {words}") from None

    return Accepts(words, parse)


def identifier() -> Accepts:
    """An id of the wire: also a file name and a label value (protocol.md, Ids)."""
    return _matching(re.compile(ID_PATTERN), "letters, digits, - and _, at most 128 characters")


def docker_context() -> Accepts:
    """The name of a context in the Docker CLI's store."""
    return _matching(_DOCKER_CONTEXT, "the name of a context, as docker context ls shows it")


def executable() -> Accepts:
    """A program: an absolute path, or a name that is looked up in PATH; never a command line."""

    def parse(value: object) -> str:
        text = str(value) if isinstance(value, Path) else _text(value)
        if "/" in text:
            return str(_absolute(text))
        if not _EXECUTABLE_NAME.fullmatch(text):
            raise ValueError("it is not the name of a program; arguments cannot be added")
        return text

    return Accepts("the absolute path of a program, or its name in PATH", parse)


def absolute_path() -> Accepts:
    """An absolute path without ``..``; whether the file is there is found out when it is used."""

    def parse(value: object) -> Path:
        return _absolute(str(value) if isinstance(value, Path) else _text(value))

    return Accepts("an absolute path", parse)


def pinned_image() -> Accepts:
    """An image that cannot be moved between the check and the run."""

    def parse(value: object) -> str:
        try:
            return require_pinned(_text(value), field_name="image")
        except RefusedError:
            raise ValueError("it is not pinned by digest") from None

    return Accepts(
        "repository@sha256:<64 hex digits>, as "
        "docker image inspect --format '{{.RepoDigests}}' IMAGE shows it",
        parse,
    )


def server_url() -> Accepts:
    """The base URL of the hub (B-02); kept as given, once it is known to be usable."""

    def parse(value: object) -> str:
        text = _text(value)
        try:
            resolve_bridge_runner_hub_url(text)
        except RefusedError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return text

    return Accepts("the hub's base URL, such as https://hub.example.org", parse)


def token() -> Accepts:
    """A bearer token; it goes into a header, so it is visible ASCII without spaces."""
    return Accepts("the bearer token alone, in visible ASCII characters", parse_token)


def parse_token(value: object) -> SecretStr:
    """The token, kept out of every representation.

    :raises ValueError: it cannot stand in an HTTP header; the message never repeats it.
    """
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str) or not _TOKEN.fullmatch(text):
        raise ValueError("it is empty or holds spaces or characters outside visible ASCII")
    if len(text) > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"it has more than {MAX_TOKEN_CHARACTERS} characters")
    return SecretStr(text)


def listen_address() -> Accepts:
    """Where to listen: ``address:port``, the address a literal, IPv6 in brackets."""

    def parse(value: object) -> str:
        text = _text(value)
        host, colon, port = text.rpartition(":")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ValueError("it is not an IP address and a port") from None
        if not (colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError("it has no port from 1 to 65535")
        return text

    return Accepts("an IP address and a port, such as 127.0.0.1:9464", parse)


def proxy_url() -> Accepts:
    """Where an HTTP proxy is; who may use it is told elsewhere."""

    def parse(value: object) -> str:
        text = _text(value)
        if not _PROXY_URL.fullmatch(text):
            if "@" in text:
                raise ValueError("it holds a login, which would be seen where settings are")
            raise ValueError("it is not http://HOST:PORT")
        if not 0 < int(text.rpartition(":")[2]) < 65_536:
            raise ValueError("it has no port from 1 to 65535")
        return text

    return Accepts("http://HOST:PORT, such as http://proxy.example.org:3128", parse)


def subnet_pool() -> Accepts:
    """A private IPv4 network with room for many small ones."""

    def parse(value: object) -> ipaddress.IPv4Network:
        try:
            network = ipaddress.IPv4Network(str(value))
        except ValueError:
            raise ValueError("it is not an IPv4 network with its host bits clear") from None
        if network.is_global or any(getattr(network, kind) for kind in _UNUSABLE):
            raise ValueError("it is not private address space")
        if not 8 <= network.prefixlen <= 26:
            raise ValueError(f"/{network.prefixlen} is outside /8 to /26")
        return network

    return Accepts("a private IPv4 network from /8 to /26, such as 10.213.0.0/20", parse)


def lsm_security_opt() -> Accepts:
    """An AppArmor profile or SELinux label, never one that switches confinement off."""

    def parse(value: object) -> str:
        text = _text(value)
        if text.startswith(("apparmor=unconfined", "label=disable")):
            raise ValueError("it switches confinement off; leave the setting out instead")
        if not _LSM.fullmatch(text):
            raise ValueError("it is not a security option of Docker")
        return text

    return Accepts("apparmor=PROFILE or label=type:TYPE", parse)


def _matching(pattern: re.Pattern[str], phrase: str) -> Accepts:
    def parse(value: object) -> str:
        text = _text(value)
        if not pattern.fullmatch(text):
            raise ValueError("it holds characters that are not allowed, or too many")
        return text

    return Accepts(phrase, parse)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it is not text")  # noqa: TRY004 - pydantic collects ValueErrors
    if len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"it has more than {MAX_TEXT_CHARACTERS} characters")
    return value


def _absolute(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or ".." in path.parts or not text.isprintable():
        raise ValueError("it is not an absolute path without ..")
    return path


def _integer(value: object, read: Callable[[str], int]) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, str):
        raise ValueError("it is not a whole number")  # noqa: TRY004 - as above
    return read(value)


def _within(number: int, low: int, high: int, show: Callable[[int], str]) -> int:
    if number < low:
        raise ValueError(f"it is less than {show(low)}")
    if number > high:
        raise ValueError(f"it is more than {show(high)}")
    return number
