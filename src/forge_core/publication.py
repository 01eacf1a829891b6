"""A result commit on its way to a branch of a remote (B-61, B-62, B-63).

Which remote may be pushed to, with which credential, and what was seen there means.  The edge
pushes with a lease on what was seen before, so that nothing but the input commit, or no branch at
all, is ever replaced, whatever happens between two looks.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from forge_core.errors import RefusedError, RetryableError
from forge_core.redaction import Masker
from forge_core.wire.codes import PublicationOutcome

PUBLISHED: Final = frozenset({PublicationOutcome.PUSHED, PublicationOutcome.ALREADY_PUBLISHED})
"""The outcomes that leave the result commit on its branch."""

MAX_URL: Final = 2_048
MAX_CREDENTIAL: Final = 16_384
DEFAULT_PORTS: Final = {"https": 443, "http": 80}
_URL: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/%\[\]-]+")
_HOST: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_ESCAPE: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED: Final = re.compile(r"[A-Za-z0-9._~-]")
_IN_HEADER: Final = re.compile(r"[^\x00-\x1f\x7f]+")


class RemoteUnreachable(RetryableError):  # noqa: N818 - says what is the case
    """The remote did not answer, or answered that it cannot do so now."""


def normal_url(url: str) -> str:
    """The one spelling of the URL of a remote that may be pushed to; equal remotes are equal text.

    ``https`` only, or ``http`` to a loopback address, for trials.  No userinfo, query or
    fragment, no path that a server could resolve to another one.  Source: RFC 3986, 6.2.2.

    :raises RefusedError: code ``remote_refused``; the text does not repeat the URL, which may
        hold a password.
    """
    if not _URL.fullmatch(url) or len(url) > MAX_URL:
        raise _refused("it is no URL of plain ASCII without query and fragment")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused("its host or port is none") from None
    if "@" in parts.netloc:
        raise _refused("it holds a user name or password; credentials come with the grant")
    if parts.scheme not in DEFAULT_PORTS or not _is_host(host):
        raise _refused("it is not https://HOST/PATH")
    if parts.scheme == "http" and not _is_loopback(host):
        raise _refused("http is for loopback addresses only; use https")
    where = f"[{ipaddress.ip_address(host)}]" if ":" in host else host
    if port not in {None, DEFAULT_PORTS[parts.scheme]}:
        where = f"{where}:{port}"
    return f"{parts.scheme}://{where}{_normal_path(parts.path)}"


def is_loopback(url: str) -> bool:
    """Whether a :func:`normal_url` stays on this machine, and so needs no proxy."""
    return _is_loopback(urlsplit(url).hostname or "")


def _normal_path(path: str) -> str:
    path = _ESCAPE.sub(_normal_escape, path).rstrip("/")
    for segment in path.split("/")[1:]:
        plain = unquote_to_bytes(segment)
        if plain in {b"", b".", b".."} or re.search(rb"[/\\\x00-\x1f\x7f]", plain):
            raise _refused("its path has a segment that is empty, dots, or not one name")
    if not path or "%" in _ESCAPE.sub("", path):
        raise _refused("it has no path, or one with a broken escape")
    return path


def _normal_escape(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if _UNRESERVED.fullmatch(character) else escape[0].upper()


def _is_host(host: str) -> bool:
    if ":" in host:
        try:
            return "%" not in host and ipaddress.ip_address(host).version == 6
        except ValueError:
            return False
    return len(host) <= 253 and _HOST.fullmatch(host) is not None and ".." not in host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(why: str) -> RefusedError:
    return RefusedError(
        f"cannot use the URL of the remote: {why}", code="remote_refused", field="repositoryUrl"
    )


class Credential:
    """A user name and password for HTTP Basic (RFC 7617), in memory that can be overwritten.

    Python keeps copies that nobody can reach (of the text that it was made from, of the
    environment of a program): :meth:`wipe` takes what can be taken.

    :raises RefusedError: code ``credential_refused``: it cannot be sent, or not be masked.
    """

    def __init__(self, username: str, password: str) -> None:
        if ":" in username or not (
            _IN_HEADER.fullmatch(username) and _IN_HEADER.fullmatch(password)
        ):
            raise self._unusable(
                "it has a control character, is empty, or names a user with a colon"
            )
        pair = f"{username}:{password}"
        if len(pair) > MAX_CREDENTIAL:
            raise self._unusable(f"it has more than {MAX_CREDENTIAL} characters")
        masker = Masker((password, pair))
        if masker.refused:
            raise self._unusable("it is too short to be masked")
        self._masker: Masker | None = masker
        self._basic = bytearray(base64.b64encode(pair.encode()))

    def __repr__(self) -> str:
        return "Credential(***)"

    @property
    def header(self) -> str:
        """The line of an HTTP request."""
        assert self._basic, "the credential was wiped"
        return f"Authorization: Basic {self._basic.decode('ascii')}"

    def mask(self, text: str) -> str:
        """The text without the password, in whatever form it stands there."""
        assert self._masker is not None, "the credential was wiped"
        return self._masker.mask(text)

    def wipe(self) -> None:
        """Overwrite it; nothing can be done with it any more."""
        self._basic[:] = bytes(len(self._basic))
        self._basic.clear()
        self._masker = None

    @staticmethod
    def _unusable(why: str) -> RefusedError:
        return RefusedError(
            f"cannot use the credential for the remote: {why}",
            code="credential_refused",
            field="credential",
        )


@dataclass(frozen=True, slots=True)
class Remote:
    """Where to push.

    :param url: a :func:`normal_url`.
    """

    url: str
    credential: Credential = field(repr=False)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push came to by the word of Git.

    :param accepted: the remote said that it moved the branch.
    :param said: why it did not, for people; masked.
    """

    accepted: bool
    said: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A branch as it was seen at the remote: its commit, or None where there is no branch."""

    commit: str | None


def before_push(seen: Seen, *, input_commit: str, result_commit: str) -> PublicationOutcome | None:
    """What the branch says before anything is pushed; None: push (B-63).

    A branch that is not there is made, one at the input commit is moved, nothing else is touched.
    """
    if seen.commit == result_commit:
        return PublicationOutcome.ALREADY_PUBLISHED
    if seen.commit in {None, input_commit}:
        return None
    return PublicationOutcome.STALE_REMOTE


def after_push(
    before: Seen, push: Pushed | None, after: Seen | None, *, result_commit: str
) -> PublicationOutcome:
    """What came of a push that has ended.

    Somebody may have pushed on top of an accepted result before the second look.  A branch that
    an accepted push left where it was contradicts itself: then nobody here knows.

    :param push: None: it was ended in the middle, so that the remote may still carry it out.
    :param after: the branch now; None: it could not be seen.
    """
    if after is not None and after.commit == result_commit:
        return PublicationOutcome.PUSHED
    if push is None:
        return PublicationOutcome.UNKNOWN
    if push.accepted:
        return PublicationOutcome.UNKNOWN if after == before else PublicationOutcome.PUSHED
    if after is None:
        return PublicationOutcome.UNKNOWN
    return PublicationOutcome.ABORTED if after == before else PublicationOutcome.STALE_REMOTE


def after_a_crash(
    seen: Seen, *, input_commit: str, result_commit: str, may_still_come: bool
) -> PublicationOutcome | None:
    """What became of a push of which nobody tells; None: look again later.

    :param may_still_come: a push that was under way can still arrive, so that a branch which has
        not moved says nothing yet.
    """
    match before_push(seen, input_commit=input_commit, result_commit=result_commit):
        case PublicationOutcome.ALREADY_PUBLISHED:
            return PublicationOutcome.PUSHED
        case None:
            return None if may_still_come else PublicationOutcome.ABORTED
        case settled:
            return settled
