"""What is said between the bridge and the helper that bundles a workspace's output.

To the helper, on its standard input: one JSON line, then ``listingBytes`` bytes of
``git ls-tree -r -t -z`` of the input commit.  From the helper: one JSON line, then a Git bundle
when there is a result.  Every word of the answer is a claim of a container; only the bundle's
import decides.  Source: sandbox.md, Output; docs/explanation/output.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from forge_core.errors import RefusedError
from forge_core.tree_rules import is_object_id

MAX_REPLY_LINE_BYTES = 1 << 16
MAX_BUNDLE_HEADER_BYTES = 1 << 13
_MAX_WARNINGS = 100
_PREREQUISITE = re.compile(rb"-([0-9a-f]{40}|[0-9a-f]{64})(?: [^\n\0]*)?")


@dataclass(frozen=True, slots=True)
class HelperReply:
    """What the helper claims.

    :param result_commit: the one commit of the bundle that follows; None: nothing changed.
    :param files: paths added, changed or removed.
    :param size_bytes: of the new blobs together.
    :param refused: why no bundle was made, or None.
    :param warnings: what was left out of the result.
    """

    result_commit: str | None
    files: int
    size_bytes: int
    refused: str | None = None
    warnings: tuple[str, ...] = ()


def attempt_ref(attempt_id: str, fence: int) -> str:
    """Where a result is kept in the store (protocol.md, Ids): a ref never contains an id."""
    digest = hashlib.sha256(attempt_id.encode()).hexdigest()[:32]
    return f"refs/forge/attempts/{digest}/{fence}"


def helper_request(
    listing: bytes,
    *,
    input_commit: str,
    ref: str,
    author_name: str,
    author_email: str,
    date_seconds: int,
    message: str,
    max_bytes: int,
    max_files: int,
) -> bytes:
    """Everything that the helper reads from its standard input.

    :param listing: ``git ls-tree -r -t -z`` of *input_commit* (``forge_edges.git.tree_listing``).
    :param date_seconds: author and committer date, Unix time, UTC: the commit is deterministic.
    :param max_bytes: of all new blobs together.
    :param max_files: paths added, changed or removed.
    """
    header = {
        "inputCommit": input_commit,
        "ref": ref,
        "author": {"name": author_name, "email": author_email},
        "date": date_seconds,
        "message": message,
        "maxBytes": max_bytes,
        "maxFiles": max_files,
        "listingBytes": len(listing),
    }
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + listing


def parse_helper_reply(line: bytes) -> HelperReply:
    """The helper's first line, without trusting a word of it.

    :raises RefusedError: ``code="output_invalid"``, ``field="reply"``: not of the agreed form.
    """
    try:
        if len(line) > MAX_REPLY_LINE_BYTES:
            raise ValueError(f"it is longer than {MAX_REPLY_LINE_BYTES} bytes")
        reply = json.loads(line)
        commit, refused = reply["resultCommit"], reply.get("refused")
        warnings = [_text(warning) for warning in reply.get("warnings", [])[:_MAX_WARNINGS]]
        if commit is not None and not is_object_id(_text(commit)):
            raise ValueError("resultCommit is not a full object id")
        if refused is not None:
            refused = f"{_text(refused['rule'])}: {_text(refused['detail'])}"
        return HelperReply(
            commit, _count(reply["files"]), _count(reply["bytes"]), refused, tuple(warnings)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RefusedError(
            f"cannot use the output: the helper's answer is malformed: {error}",
            code="output_invalid",
            field="reply",
        ) from error


def parse_bundle_header(header: bytes, *, input_commit: str, ref: str) -> str:
    """The one commit that a bundle offers, from its header up to and with the empty line.

    Stricter than gitformat-bundle(5): version 2 for SHA-1, or version 3 with exactly the
    capability ``object-format`` of *input_commit*; exactly one prerequisite, *input_commit* (a
    comment after it is ignored); exactly one ref, *ref*.

    :raises RefusedError: ``code="output_invalid"`` with field ``format``, ``parent`` or ``refs``.
    """
    lines = header.split(b"\n")
    hash_name = b"sha1" if len(input_commit) == 40 else b"sha256"
    if lines[0] == b"# v3 git bundle":
        if lines[1:2] != [b"@object-format=" + hash_name]:
            raise _refused("format", "its capabilities are not those of the input commit")
        body = lines[2:-2]
    elif lines[0] == b"# v2 git bundle" and hash_name == b"sha1":
        body = lines[1:-2]
    else:
        raise _refused("format", "it is not a Git bundle of a known version")
    if lines[-2:] != [b"", b""] or b"" in body:
        raise _refused("format", "its header has no end")
    bases = [line for line in body if line.startswith(b"-")]
    heads = body[len(bases) :]
    if body[: len(bases)] != bases:
        raise _refused("format", "its header is out of order")
    base = _PREREQUISITE.fullmatch(bases[0]) if len(bases) == 1 else None
    if base is None or base[1] != input_commit.encode():
        raise _refused("parent", f"its one prerequisite is not the input commit {input_commit}")
    commit, _, name = (heads[0] if len(heads) == 1 else b"").partition(b" ")
    if name != ref.encode():
        raise _refused("refs", f"it does not hold exactly the ref {ref}")
    text = commit.decode("ascii", "replace")
    if not is_object_id(text) or len(text) != len(input_commit):
        raise _refused("refs", f"its ref {ref} is not a full object id")
    return text


def _refused(field: str, why: str) -> RefusedError:
    return RefusedError(
        f"cannot import the output bundle: {why}", code="output_invalid", field=field
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text was expected")
    return "".join(c if c.isprintable() else "\ufffd" for c in value[:1000])


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError("a count was expected")
    return value
