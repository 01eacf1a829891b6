"""A push over real HTTP: with a lease, a credential that only the environment has, and no help."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from git_parts import make_project

from forge_core.errors import RefusedError
from forge_core.publication import Credential, Remote, RemoteUnreachable, Seen
from forge_edges.git_push import git_version, missing_for_push, remote_branch
from forge_edges.git_push import push as push_within
from git_server import PASSWORD, USERNAME, GitServer, git, git_server

pytestmark = pytest.mark.requirement("B-62", "B-63")

SAMPLE = "sample"
push = partial(push_within, timeout_ms=60_000)


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt has left in the store, and a remote that may get it."""

    store: Path
    clone: Path
    input_commit: str
    commit: str
    remote: Remote


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    with git_server(tmp_path / "served") as server:
        yield server


async def make_result(directory: Path, server: GitServer, object_format: str = "sha1") -> Result:
    project = await make_project(directory / "project", object_format)
    workspace = await project.unpack(directory / "workspace")
    (workspace / "README").write_text("changed\n")
    reply, bundle = await project.bundle(workspace)
    assert reply.result_commit is not None
    await project.take(bundle, reply.result_commit)
    url = server.create(SAMPLE, source=project.clone, object_format=object_format)
    remote = Remote(url, Credential(USERNAME, PASSWORD))
    return Result(project.store, project.clone, project.commit, reply.result_commit, remote)


@pytest.fixture
async def result(tmp_path: Path, server: GitServer) -> Result:
    return await make_result(tmp_path, server)


def forms(secret: str) -> set[str]:
    pair = f"{USERNAME}:{secret}".encode()
    return {secret, base64.b64encode(pair).decode(), base64.b64encode(secret.encode()).decode()}


def says_it(text: str) -> bool:
    return any(form in text for form in forms(PASSWORD))


def processes_of(*words: str) -> dict[int, tuple[str, str]]:
    """Every process whose argv or environment holds one of the words: its argv, its environment."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            argv, environ = ((process / n).read_bytes().decode() for n in ("cmdline", "environ"))
        except (OSError, UnicodeDecodeError):
            continue
        if any(word in argv or word in environ for word in words):
            found[int(process.name)] = (argv, environ)
    return found


# -- what is pushed ------------------------------------------------------------------------------


async def test_a_branch_at_the_input_commit_gets_exactly_the_result(
    server: GitServer, result: Result
) -> None:
    before = await remote_branch(result.remote, "main")
    assert before == Seen(result.input_commit)
    pushed = await push(
        result.store, result.remote, branch="main", commit=result.commit, expected=before
    )
    assert pushed.accepted, pushed
    assert await remote_branch(result.remote, "main") == Seen(result.commit)
    served = server.root / f"{SAMPLE}.git"
    assert git(served, "rev-list", "--parents", "-1", result.commit).split() == [
        result.commit,
        result.input_commit,
    ]
    assert git(served, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(served, "fsck", "--strict", "--no-dangling") == ""
    assert all(right for *_, right in server.seen), "a request without the credential"


@pytest.mark.parametrize("object_format", ["sha1", "sha256"])
async def test_a_new_branch_is_made_although_others_have_moved_on(
    tmp_path: Path, server: GitServer, object_format: str
) -> None:
    result = await make_result(tmp_path, server, object_format)
    server.commit(SAMPLE, "main", "main has moved on")
    before = await remote_branch(result.remote, "forge/attempt-1")
    assert before == Seen(None)
    pushed = await push(
        result.store, result.remote, branch="forge/attempt-1", commit=result.commit, expected=before
    )
    assert pushed.accepted, pushed
    assert server.branch(SAMPLE, "forge/attempt-1") == result.commit


async def test_a_branch_whose_name_ends_like_another_is_not_that_one(
    server: GitServer, result: Result
) -> None:
    git(
        server.root / f"{SAMPLE}.git",
        "update-ref",
        "refs/heads/x/refs/heads/y",
        result.input_commit,
    )
    assert await remote_branch(result.remote, "y") == Seen(None)


async def test_a_human_who_was_faster_is_never_overwritten(
    server: GitServer, result: Result
) -> None:
    before = await remote_branch(result.remote, "main")
    theirs = server.commit(SAMPLE, "main", "a human's")
    pushed = await push(
        result.store, result.remote, branch="main", commit=result.commit, expected=before
    )
    assert not pushed.accepted
    assert "stale info" in pushed.said
    assert server.branch(SAMPLE, "main") == theirs


async def test_a_branch_that_was_made_meanwhile_is_never_overwritten(
    server: GitServer, result: Result
) -> None:
    theirs = server.commit(SAMPLE, "new", "a human's")
    pushed = await push(
        result.store, result.remote, branch="new", commit=result.commit, expected=Seen(None)
    )
    assert not pushed.accepted
    assert server.branch(SAMPLE, "new") == theirs


async def test_a_human_who_comes_between_lease_and_update_is_never_overwritten(
    server: GitServer, result: Result
) -> None:
    """The server is told the old value too, so that a race within it is lost by us."""
    served = server.root / f"{SAMPLE}.git"
    theirs = git(served, "commit-tree", f"{result.input_commit}^{{tree}}", "-m", "a human's")
    hook = served / "hooks" / "pre-receive"
    hook.write_text(
        f"#!/bin/sh\nunset GIT_QUARANTINE_PATH\nexec git update-ref refs/heads/main {theirs}\n"
    )
    hook.chmod(0o755)
    before = await remote_branch(result.remote, "main")
    pushed = await push(
        result.store, result.remote, branch="main", commit=result.commit, expected=before
    )
    assert not pushed.accepted
    assert server.branch(SAMPLE, "main") == theirs


# -- what is refused ------------------------------------------------------------------------------


async def test_a_wrong_credential_is_refused_and_not_told(
    server: GitServer, result: Result
) -> None:
    wrong = Remote(result.remote.url, Credential(USERNAME, f"{PASSWORD}-not"))
    with pytest.raises(RefusedError) as refused:
        await remote_branch(wrong, "main")
    assert refused.value.code == "remote_refused"
    assert not says_it(str(refused.value))
    pushed = await push(
        result.store,
        wrong,
        branch="main",
        commit=result.commit,
        expected=Seen(result.input_commit),
    )
    assert not pushed.accepted
    assert not says_it(pushed.said)
    assert server.branch(SAMPLE, "main") == result.input_commit


async def test_a_credential_that_expires_under_a_push_moves_nothing(
    server: GitServer, result: Result
) -> None:
    before = await remote_branch(result.remote, "main")
    server.fault.expires_after = 1
    pushed = await push(
        result.store, result.remote, branch="main", commit=result.commit, expected=before
    )
    assert not pushed.accepted
    assert server.branch(SAMPLE, "main") == result.input_commit


async def test_a_redirect_is_not_followed(
    tmp_path: Path, server: GitServer, result: Result
) -> None:
    with git_server(tmp_path / "other") as other:
        other.create(SAMPLE, source=result.clone)
        server.fault.redirect_to = other.url
        with pytest.raises(RefusedError, match="307"):
            await remote_branch(result.remote, "main")
        pushed = await push(
            result.store,
            result.remote,
            branch="main",
            commit=result.commit,
            expected=Seen(result.input_commit),
        )
        assert not pushed.accepted
        assert other.seen == []


@pytest.mark.parametrize("status", [404, 403, 500, 503, 429])
async def test_what_the_remote_cannot_do_now_is_told_from_what_it_refuses(
    server: GitServer, result: Result, status: int
) -> None:
    server.fault.status = status
    expected = RemoteUnreachable if status in {500, 503, 429} else RefusedError
    with pytest.raises(expected, match=str(status) if status != 404 else "not found"):
        await remote_branch(result.remote, "main")


async def test_a_remote_that_is_away_may_come_back(result: Result) -> None:
    remote = Remote("http://127.0.0.1:9/sample.git", Credential(USERNAME, PASSWORD))
    with pytest.raises(RemoteUnreachable):
        await remote_branch(remote, "main")


async def test_what_a_remote_shouts_is_bounded_masked_and_printable(
    server: GitServer, result: Result
) -> None:
    hook = server.root / f"{SAMPLE}.git" / "hooks" / "pre-receive"
    shout = f"printf 'no \\033[31m {PASSWORD} {PASSWORD[:20]}' >&2"
    hook.write_text(f"#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' 'x' >&2\n{shout}\nexit 1\n")
    hook.chmod(0o755)
    before = await remote_branch(result.remote, "main")
    pushed = await push(
        result.store, result.remote, branch="main", commit=result.commit, expected=before
    )
    assert not pushed.accepted
    assert "pre-receive hook declined" in pushed.said
    assert "***" in pushed.said
    assert len(pushed.said) <= 500
    assert pushed.said.isprintable()
    assert not says_it(pushed.said)


# -- who has no say -------------------------------------------------------------------------------


async def test_nobodys_configuration_or_hook_has_a_say(
    tmp_path: Path, server: GitServer, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of account, system, environment and clone, nor one that is planted in the store."""
    marks = tmp_path / "marks"
    marks.mkdir()
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nenv > "$(mktemp {marks}/XXXXXX)"\n')
    program.chmod(0o755)
    with git_server(tmp_path / "other") as other:
        other.create(SAMPLE, source=result.clone)
        hostile = (
            f'[url "{other.url}/"]\n\tinsteadOf = {server.url}/\n\tpushInsteadOf = {server.url}/\n'
            f"[credential]\n\thelper = {program}\n"
            f"[core]\n\thooksPath = {tmp_path / 'hooks'}\n\taskPass = {program}\n"
            f"\tfsmonitor = {program}\n\tsshCommand = {program}\n\tpager = {program}\n"
            f"[http]\n\tproxy = {other.url}\n\tsslVerify = false\n\textraHeader = X-Evil: 1\n"
            f"\tfollowRedirects = true\n"
            f"[protocol]\n\tallow = always\n[push]\n\tgpgSign = true\n\tfollowTags = true\n"
            f'[remote "{server.url}/{SAMPLE}.git"]\n\turl = {other.url}/{SAMPLE}.git\n'
            f"[gpg]\n\tprogram = {program}\n[trace2]\n\teventTarget = {marks}/trace\n"
        )
        home = tmp_path / "home"
        for directory in (home, home / "git", tmp_path / "hooks", result.store / "hooks"):
            directory.mkdir(exist_ok=True)
        for path in (
            home / ".gitconfig",
            home / "git" / "config",
            result.clone / ".git" / "config",
        ):
            path.write_text(hostile)
        (home / ".netrc").write_text("machine 127.0.0.1 login evil password evil\n")
        for hooks in (tmp_path / "hooks", result.store / "hooks", result.clone / ".git" / "hooks"):
            shutil.copy(program, hooks / "pre-push")
        for name, value in {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "GIT_CONFIG": str(home / ".gitconfig"),
            "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
            "GIT_CONFIG_SYSTEM": str(home / ".gitconfig"),
            "GIT_CONFIG_PARAMETERS": f"'url.{other.url}/.insteadof'='{server.url}/'",
            "GIT_ASKPASS": str(program),
            "GIT_EXEC_PATH": str(home),
            "GIT_TRACE": str(marks / "trace"),
            "GIT_TRACE_CURL": str(marks / "trace"),
            "GIT_CURL_VERBOSE": "1",
            "GIT_SSL_NO_VERIFY": "1",
            "GIT_PROXY_COMMAND": str(program),
            "GIT_HTTP_USER_AGENT": "evil",
            "http_proxy": other.url,
            "all_proxy": other.url,
        }.items():
            monkeypatch.setenv(name, value)
        before = await remote_branch(result.remote, "main")
        pushed = await push(
            result.store, result.remote, branch="main", commit=result.commit, expected=before
        )
        assert other.seen == []
    assert before == Seen(result.input_commit)
    assert pushed.accepted, pushed
    assert server.branch(SAMPLE, "main") == result.commit
    assert list(marks.iterdir()) == []


# -- where the credential is ----------------------------------------------------------------------


async def test_only_the_environment_of_git_has_the_credential_and_a_cancel_ends_it_at_once(
    server: GitServer, result: Result
) -> None:
    server.fault.hang = "pushes"
    before = await remote_branch(result.remote, "main")
    files = {p for p in result.store.rglob("*") if p.is_file()}
    async with anyio.create_task_group() as tasks:

        async def go() -> None:
            await push(
                result.store, result.remote, branch="main", commit=result.commit, expected=before
            )

        tasks.start_soon(go)
        assert await anyio.to_thread.run_sync(server.entered.wait, 20)
        found = processes_of(*forms(PASSWORD))
        assert found, "nothing pushes"
        assert not any(says_it(argv) for argv, _ in found.values())
        assert all(says_it(environ) for _, environ in found.values())
        new = {p for p in result.store.rglob("*") if p.is_file()} - files
        assert not any(says_it(p.read_bytes().decode("latin-1")) for p in new)
        cancelled_s = time.monotonic()
        tasks.cancel_scope.cancel()
    assert time.monotonic() - cancelled_s < 1.0
    assert processes_of(*forms(PASSWORD)) == {}
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)
    assert server.branch(SAMPLE, "main") == result.input_commit


async def test_a_push_that_takes_too_long_is_ended_and_nobody_knows(
    server: GitServer, result: Result
) -> None:
    server.fault.lose_answer = True
    before = await remote_branch(result.remote, "main")
    with pytest.raises(RemoteUnreachable, match="1500 ms"):
        await push(
            result.store,
            result.remote,
            branch="main",
            commit=result.commit,
            expected=before,
            timeout_ms=1_500,
        )
    assert processes_of(*forms(PASSWORD)) == {}
    assert server.branch(SAMPLE, "main") == result.commit, "a look must tell"


PUSHER = """
import sys
from functools import partial
from pathlib import Path
import anyio
from forge_core.publication import Credential, Remote, Seen
from forge_edges.git_push import push
store, url, commit, before, user, password = sys.stdin.read().split("\\n")
remote = Remote(url, Credential(user, password))
what = {"branch": "main", "commit": commit, "expected": Seen(before), "timeout_ms": 60_000}
anyio.run(lambda: push(Path(store), remote, **what))
"""


async def test_no_push_outlives_the_process_that_began_it(
    server: GitServer, result: Result
) -> None:
    server.fault.hang = "pushes"
    orders = (result.store, result.remote.url, result.commit, result.input_commit)
    with subprocess.Popen([sys.executable, "-c", PUSHER], stdin=subprocess.PIPE) as pusher:
        assert pusher.stdin is not None
        pusher.stdin.write("\n".join([*map(str, orders), USERNAME, PASSWORD]).encode())
        pusher.stdin.close()
        assert await anyio.to_thread.run_sync(server.entered.wait, 20)
        assert processes_of(*forms(PASSWORD))
        pusher.send_signal(signal.SIGKILL)
        await anyio.to_thread.run_sync(pusher.wait)
    with anyio.fail_after(10):
        while processes_of(*forms(PASSWORD)):
            await anyio.sleep(0.02)


# -- TLS ------------------------------------------------------------------------------------------


def make_certificate(directory: Path, host: str = "localhost") -> tuple[Path, Path]:
    """Of a server at this host, signed by itself; and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, key_file = directory / "certificate.pem", directory / "key.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pem, key_file


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "GIT_SSL_CAINFO", None])
async def test_the_operators_certificates_count_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "GIT_SSL_CAPATH"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, str(certificate))
    with git_server(tmp_path / "served", tls=context) as server:
        result = await make_result(tmp_path, server)
        assert result.remote.url.startswith("https://")
        if variable is None:
            with pytest.raises(RefusedError, match="certificate"):
                await remote_branch(result.remote, "main")
            return
        before = await remote_branch(result.remote, "main")
        pushed = await push(
            result.store, result.remote, branch="main", commit=result.commit, expected=before
        )
        assert pushed.accepted, pushed
        assert server.branch(SAMPLE, "main") == result.commit


@contextmanager
def proxy_to(address: tuple[str, int]) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that knows one way (RFC 9110, CONNECT); its URL, and what it was told."""
    told: list[bytes] = []

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b"".join(iter(self.rfile.readline, b"\r\n"))
            told.append(head)
            with socket.create_connection(address) as onward:
                self.wfile.write(b"HTTP/1.1 200 Connected\r\n\r\n")
                back = threading.Thread(target=pour, args=(onward, self.connection))
                back.start()
                pour(self.connection, onward)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", told
        server.shutdown()
        thread.join()


def pour(source: socket.socket, target: socket.socket) -> None:
    """Everything, then the end of it."""
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


async def test_the_operators_proxy_is_used_and_not_told_the_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name resolves nowhere but behind the proxy."""
    host = "git.forge.invalid"
    certificate, key = make_certificate(tmp_path, host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("GIT_SSL_CAINFO", str(certificate))
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with git_server(tmp_path / "served", tls=context) as server:
        result = await make_result(tmp_path, server)
        port = int(server.url.rpartition(":")[2])
        remote = Remote(f"https://{host}/{SAMPLE}.git", Credential(USERNAME, PASSWORD))
        with proxy_to(("127.0.0.1", port)) as (proxy, told):
            monkeypatch.setenv("https_proxy", proxy)
            before = await remote_branch(remote, "main")
            pushed = await push(
                result.store, remote, branch="main", commit=result.commit, expected=before
            )
        assert pushed.accepted, pushed
        assert server.branch(SAMPLE, "main") == result.commit
    assert told
    assert all(head.startswith(b"CONNECT git.forge.invalid:443 ") for head in told)
    assert not says_it(b"".join(told).decode())


async def test_this_hosts_git_can_push_like_this() -> None:
    assert await missing_for_push() is None
    assert (await git_version()).startswith("git version ")
