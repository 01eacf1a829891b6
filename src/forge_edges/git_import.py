"""A hostile output bundle on its way into the bare store.

Each step may only refuse; the store changes at the very end, by a rename and a ref:

1. received into a quarantine, with a ceiling on its bytes;
2. its header, by our own strict parser: one version, one prerequisite, one ref;
3. its pack, inflated into nothing by our own scanner: counts and sizes have ceilings;
4. ``index-pack --strict`` in the quarantine: hashes, fsck, nothing missing; one thread, with
   limits on memory, processor time and file size;
5. one commit of exactly four header lines, whose only parent is the input commit;
6. the changed tree against the rules of ``forge_core.tree_changes``;
7. a new pack of what that commit adds, made by our Git: anything else in the bundle stays behind.

Source: sandbox.md, Output; docs/explanation/output.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from forge_core.errors import RefusedError
from forge_core.output_exchange import MAX_BUNDLE_HEADER_BYTES, parse_bundle_header
from forge_core.ports import ImportedOutput
from forge_core.tree_changes import Change, changes_violation, link_ids, parse_changes
from forge_core.tree_rules import MAX_SYMLINK_BYTES, MODE_TREE, object_format, parse_listing
from forge_edges.git import Repository, adopt_pack, disk_errors, quarantine
from forge_edges.pack_scan import PackLimits, scan_pack
from forge_edges.process import Bounds, OutputOverflow, ProcessTimedOut

_MEMORY_BYTES = 2 << 30
_LISTING_BYTES = 256 << 20
_COMMIT = re.compile(
    rb"tree [0-9a-f]+\n((?:parent [0-9a-f]+\n)*)author [^\n]+\ncommitter [^\n]+\n\n.*", re.DOTALL
)
_STRICT = "badFilemode=error,gitmodulesParse=error"


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """What one output may amount to.

    :param bundle_bytes: as received.
    :param object_bytes: of any one object, inflated.
    :param inflated_bytes: of all objects together.
    :param objects: commit, trees and blobs together.
    :param files: paths added, changed or removed.
    :param timeout_ms: for the whole import.
    """

    bundle_bytes: int = 256 << 20
    object_bytes: int = 256 << 20
    inflated_bytes: int = 1 << 30
    objects: int = 200_000
    files: int = 100_000
    timeout_ms: int = 120_000


async def import_bundle(
    store_path: Path,
    bundle: AsyncIterable[bytes],
    *,
    input_commit: str,
    bundle_ref: str,
    claimed_commit: str,
    target_ref: str,
    limits: ImportLimits | None = None,
) -> ImportedOutput:
    """Accept *bundle* into the store under *target_ref*, or refuse it and change nothing.

    Importing the same result again is a success that changes nothing.

    :param input_commit: the only parent that the result may have; in the store already.
    :param bundle_ref: the one ref that the bundle must hold.
    :param claimed_commit: what the helper said that the bundle holds.
    :param target_ref: created, never moved (``forge_core.output_exchange.attempt_ref``).
    :raises RefusedError: ``code="output_invalid"``, with the broken rule as ``field``: ``size``,
        ``time``, ``format``, ``refs``, ``claim``, ``parent``, ``objects``, ``fsck``, ``path``,
        ``symlink``, ``submodule``, ``duplicate``, ``files`` or ``empty``.
    :raises DiskUnusable: the quarantine or the store cannot be written.
    """
    limits = limits or ImportLimits()
    bounds = Bounds(
        timeout_ms=limits.timeout_ms,
        stdout_bytes=_LISTING_BYTES,
        memory_bytes=_MEMORY_BYTES,
        cpu_seconds=max(1, limits.timeout_ms // 1000),
        file_bytes=limits.bundle_bytes + limits.inflated_bytes,
    )
    store = Repository(store_path, Bounds(timeout_ms=limits.timeout_ms))
    async with quarantine(
        store_path, object_format=object_format(input_commit), bounds=bounds
    ) as isolated:
        with _named_refusals(), anyio.fail_after(limits.timeout_ms / 1000):
            result = await _unpack(isolated, bundle, input_commit, bundle_ref, limits)
            if result != claimed_commit:
                raise _refused("claim", f"it holds {result}, the helper claimed {claimed_commit}")
            await _check_commit(isolated, result, input_commit)
            output = await _check_tree(isolated, result, input_commit, limits)
            packs = await _repack(isolated, result, input_commit)
        await _publish(store, packs, target_ref, result)
    return output


async def _unpack(
    isolated: Repository,
    bundle: AsyncIterable[bytes],
    input_commit: str,
    bundle_ref: str,
    limits: ImportLimits,
) -> str:
    """Steps 1 to 4; the commit that the bundle's ref names."""
    path = isolated.path / "bundle"
    deadline = time.monotonic() + limits.timeout_ms / 1000
    await _receive(bundle, path, limits.bundle_bytes)
    result, pack_offset = await anyio.to_thread.run_sync(
        partial(_read_header, path, input_commit=input_commit, ref=bundle_ref)
    )
    await anyio.to_thread.run_sync(
        _scan, path, pack_offset, object_format(input_commit), limits, deadline
    )
    async with await anyio.open_file(path, "rb", buffering=0) as file:
        await file.seek(pack_offset)
        indexed = await isolated.git(
            *("index-pack", "--stdin", "--fix-thin", f"--strict={_STRICT}", "--threads=1"),
            f"--max-input-size={limits.bundle_bytes}",
            input=file.wrapped,
        )
    if indexed.exit_code != 0:
        raise _refused(_blame(indexed.exit_code, indexed.stderr), indexed.complaint())
    return result


async def _receive(bundle: AsyncIterable[bytes], path: Path, ceiling: int) -> None:
    size = 0
    with disk_errors(path):
        async with await anyio.open_file(path, "xb") as file:
            async for chunk in bundle:
                size += len(chunk)
                if size > ceiling:
                    raise _refused("size", f"it is larger than {ceiling} bytes")
                await file.write(chunk)


def _read_header(path: Path, *, input_commit: str, ref: str) -> tuple[str, int]:
    with path.open("rb") as file:
        start = file.read(MAX_BUNDLE_HEADER_BYTES)
    end = start.find(b"\n\n")
    if end < 0:
        raise _refused("format", f"it has no header within {MAX_BUNDLE_HEADER_BYTES} bytes")
    header = start[: end + 2]
    return parse_bundle_header(header, input_commit=input_commit, ref=ref), len(header)


def _scan(
    path: Path, pack_offset: int, hash_name: str, limits: ImportLimits, deadline: float
) -> None:
    ceilings = PackLimits(limits.objects, limits.object_bytes, limits.inflated_bytes)
    with path.open("rb") as file:
        file.seek(pack_offset)
        scan_pack(file, hash_name=hash_name, limits=ceilings, deadline=deadline)


async def _check_commit(isolated: Repository, result: str, input_commit: str) -> None:
    answer = await isolated.output("cat-file", "--batch", input=f"{result}\n".encode())
    head, _, content = answer.partition(b"\n")
    if head.split()[1:2] != [b"commit"]:
        raise _refused("objects", f"its ref does not name a commit: {head.decode('ascii')}")
    match = _COMMIT.fullmatch(content)
    if match is None:
        raise _refused("format", "its commit has other headers than tree, parent and authors")
    if match[1] != f"parent {input_commit}\n".encode():
        raise _refused("parent", f"its commit's only parent is not the input {input_commit}")


async def _check_tree(
    isolated: Repository, result: str, input_commit: str, limits: ImportLimits
) -> ImportedOutput:
    """Step 6, in worker threads: a hundred thousand paths take seconds, and leases go on."""
    raw = await isolated.output(
        *("diff-tree", "-r", "-t", "-z", "--raw", "--no-renames", "--no-abbrev"),
        *(input_commit, result),
    )
    changes = await anyio.to_thread.run_sync(parse_changes, raw)
    files = [c for c in changes if MODE_TREE not in (c.old_mode, c.new_mode)]
    if not files:
        raise _refused("empty", "its commit changes nothing")
    if len(files) > limits.files:
        raise _refused("files", f"{len(files)} files changed, {limits.files} are allowed")
    listing = await isolated.output("ls-tree", "-r", "-z", "--full-tree", result)
    entries = await anyio.to_thread.run_sync(parse_listing, listing)
    targets = await _contents(isolated, link_ids(changes, entries))
    if violation := await anyio.to_thread.run_sync(changes_violation, changes, entries, targets):
        raise _refused(violation.rule, str(violation))
    return ImportedOutput(result, len(files), await _new_bytes(isolated, files))


async def _contents(isolated: Repository, links: Iterable[str]) -> dict[str, bytes]:
    """Content of small blobs; of a larger one, as much as shows that it is too large."""
    wanted = sorted(links)
    answer = await isolated.output(
        "cat-file", "--batch", input="".join(f"{link}\n" for link in wanted).encode()
    )
    contents, at = {}, 0
    for link in wanted:
        end = answer.index(b"\n", at)
        words = answer[at:end].split()
        if words[1:2] != [b"blob"]:
            raise _refused("objects", f"the target {link} of a symbolic link is no blob")
        contents[link] = answer[end + 1 : end + 1 + min(int(words[2]), MAX_SYMLINK_BYTES + 1)]
        at = end + 2 + int(words[2])
    return contents


async def _new_bytes(isolated: Repository, files: Iterable[Change]) -> int:
    """Bytes of the blobs that changed files have now, each blob once."""
    wanted = sorted({change.new_id for change in files if not change.removed})
    answer = await isolated.output(
        *(
            "cat-file",
            "--batch-check=%(objecttype) %(objectsize)",
        ),
        input="".join(f"{blob}\n" for blob in wanted).encode(),
    )
    total = 0
    for blob, line in zip(wanted, answer.splitlines(), strict=True):
        kind, size = line.split()
        if kind != b"blob":
            raise _refused("objects", f"{blob} is used as a file and is none")
        total += int(size)
    return total


async def _repack(isolated: Repository, result: str, input_commit: str) -> Path:
    """Step 7; the directory with the finished pack."""
    packs = isolated.path / "accepted"
    await anyio.Path(packs).mkdir()
    await isolated.output(
        *("pack-objects", "--revs", "--delta-base-offset", "-q", str(packs / "pack")),
        input=f"{result}\n^{input_commit}\n".encode(),
    )
    return packs


async def _publish(store: Repository, packs: Path, target_ref: str, result: str) -> None:
    there = await store.git("rev-parse", "--verify", "--quiet", target_ref)
    if there.exit_code == 0:
        if there.stdout.decode().strip() == result:
            return
        raise _refused("refs", f"{target_ref} already has another result")
    with anyio.CancelScope(shield=True), disk_errors(store.path):
        await anyio.to_thread.run_sync(adopt_pack, packs, store.path)
        await store.output(
            "update-ref", "--stdin", input=f"create {target_ref} {result}\n".encode()
        )


class _named_refusals(AbstractContextManager[None]):  # noqa: N801 - used as a word
    """Turns what Git and the clock say into refusals of the output."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case TimeoutError() | ProcessTimedOut():
                raise _refused("time", "checking it took too long") from error
            case OutputOverflow():
                raise _refused("size", "it makes Git say too much") from error
            case RefusedError(code="too_many_entries"):
                raise _refused("files", f"its tree has {error}") from error
            case RefusedError(code="too_many_steps"):
                raise _refused("symlink", f"it has {error}") from error
            case RefusedError(code="git_failed" | "malformed"):
                raise _refused("objects", str(error)) from error


def _blame(exit_code: int, stderr: bytes) -> str:
    if exit_code < 0 or b"ut of memory" in stderr or b"maximum allowed size" in stderr:
        return "size"
    if b"fsck error" in stderr:
        return "fsck"
    wrong = (b"expected object", b"unresolved delta", b"missing", b"mismatch", b"fatal: invalid ")
    return "objects" if any(words in stderr for words in wrong) else "format"


def _refused(field: str, why: str) -> RefusedError:
    return RefusedError(
        f"cannot import the output bundle: {why}", code="output_invalid", field=field
    )
