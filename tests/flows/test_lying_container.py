"""Containers that lie: what PID 1 and the output helper say is a claim, and nothing more.

The programs run in real containers of a real engine, with everything that it does to streams.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from bridge_parts import KEY, Bridge, git, memory_bridge, real_bridge
from memory_engine import Container, MemoryEngine
from scripted_hub import renewal

from engines import Engine
from forge_core.output_exchange import attempt_ref

pytestmark = pytest.mark.engine("d26")

AT_ONCE = 4

PID_1 = """
import json, os, sys, time
def say(**frame):
    os.write(1, json.dumps(frame).encode() + b"\\n")
def write(channel, data):
    while data:
        data = data[os.write(channel, data):]
def orders():
    say(type="ready")
    sys.stdin.readline()
    say(type="started")
"""
FAITHFUL = PID_1 + 'orders(); say(type="exit", code=0)\n'
ENDS_WELL = 'say(type="exit", code=0)\n'


class Lie(NamedTuple):
    """A program, the failure that it ends in, and what else this attempt has."""

    source: str
    code: str | None = None
    sandbox: Mapping[str, Any] = {}
    start: Mapping[str, Any] = {}


LYING_PID_1 = {
    "says what is no frame": Lie(
        'orders(); write(1, b"\\x00\\xff\\n[]\\n{}\\nnull\\n" + b"[" * 100000 + b"\\n")\n'
        'say(type="exit", code=0, signal=9); say(type="exit", code=999); say(type="log", text=7)\n'
        + ENDS_WELL
    ),
    "writes a line of 10 MB": Lie('orders(); write(1, b"x" * 10000000 + b"\\n")\n' + ENDS_WELL),
    "floods stderr": Lie('orders(); write(2, b"y" * 20000000)\n' + ENDS_WELL),
    "prints lone surrogates": Lie(
        'orders(); write(1, b\'{"type":"log","stream":"stdout","text":"\\\\ud800<\\\\udfff>",'
        '"droppedBytes":0}\\n\')\n' + ENDS_WELL
    ),
    "refuses ten thousand frames": Lie(
        'orders(); write(1, b\'{"type":"refused","reason":"bad_mac","count":1}\\n\' * 10000)\n'
        + ENDS_WELL
    ),
    "ends well and then badly": Lie(
        "orders(); " + ENDS_WELL + 'say(type="exit", code=3); sys.exit(9)\n'
    ),
    "ends badly and then well": Lie(
        'orders(); say(type="exit", code=3); ' + ENDS_WELL, "agent_failed"
    ),
    "claims a deadline long before it": Lie(
        'orders(); say(type="expired", which="lease"); sys.exit(70)\n', "supervisor_lost"
    ),
    "ends with 0 and no status": Lie("orders(); sys.exit(0)\n", "supervisor_lost"),
    "ends before its orders": Lie('say(type="ready"); sys.exit(0)\n', "supervisor_lost"),
    "is never ready": Lie(
        "time.sleep(600)\n", "supervisor_lost", sandbox={"supervisor_ready_ms": 1_500}
    ),
    "never says that it started": Lie(
        'say(type="ready"); time.sleep(600)\n',
        "supervisor_lost",
        sandbox={"supervisor_ready_ms": 3_000},
    ),
    "closes its output and goes on": Lie(
        "orders(); os.close(1); os.close(2); time.sleep(600)\n",
        "lease_expired",
        start={"lease": {"ttlMs": 3_000, "sequence": 0, "key": base64.b64encode(KEY).decode()}},
    ),
}

HELPER = """
import json, os, subprocess, sys, time
os.environ.update(HOME="/tmp", GIT_CONFIG_COUNT="1", GIT_CONFIG_KEY_0="safe.directory",
                  GIT_CONFIG_VALUE_0="*")
for who in ("AUTHOR", "COMMITTER"):
    os.environ.update({"GIT_%s_NAME" % who: "forge", "GIT_%s_EMAIL" % who: "forge@localhost"})
def git(*arguments, data=None):
    command = ["git", "-C", "/tmp/made", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, input=data)
    return done.stdout.decode().strip()
def asked():
    request = json.loads(sys.stdin.buffer.readline())
    sys.stdin.buffer.read(request["listingBytes"])
    subprocess.run(["git", "init", "-q", "/tmp/made"], check=True)
    git("fetch", "-q", "--update-shallow", "/workspace/tree", "HEAD")
    return request
def commit(*parents, name="made"):
    git("read-tree", "FETCH_HEAD")
    blob = git("hash-object", "-w", "--stdin", data=name.encode())
    git("update-index", "--add", "--cacheinfo", "100644,%s,%s" % (blob, name))
    options = [option for parent in parents for option in ("-p", parent)]
    return git("commit-tree", git("write-tree"), *options, "-m", name)
def bundle(tip, *others):
    git("update-ref", request["ref"], tip)
    for name, other in others:
        git("update-ref", name, other)
    names = [request["ref"], *[name for name, _ in others]]
    git("bundle", "create", "-q", "/tmp/bundle", "^" + base, *names)
    with open("/tmp/bundle", "rb") as file:
        return file.read()
def answer(tip, content, **more):
    reply = {"resultCommit": tip, "files": 1, "bytes": 4, **more}
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\\n" + content)
    sys.stdout.buffer.flush()
"""
ASKED = HELPER + 'request = asked(); base = request["inputCommit"]\n'
HONEST = ASKED + "tip = commit(base); answer(tip, bundle(tip))\n"

TWO_COMMITS = "more than one commit|parent"
"""Git may pack one as a delta, whose kind is known only when it is applied; both rules refuse."""

LYING_HELPER = {
    "two refs": (
        ASKED + 'tip = commit(base); answer(tip, bundle(tip, ("refs/heads/more", tip)))\n',
        "ref",
    ),
    "another parent": (
        ASKED + "tip = commit(commit(base, name='first')); answer(tip, bundle(tip))\n",
        TWO_COMMITS,
    ),
    "a merge": (
        ASKED + "tip = commit(base, commit(base, name='side')); answer(tip, bundle(tip))\n",
        TWO_COMMITS,
    ),
    "another commit than it claims": (
        ASKED + "tip = commit(base); answer('1' * 40, bundle(tip))\n",
        "claim",
    ),
    "not a bundle": (ASKED + "answer('1' * 40, b'PACK' * 9000)\n", "bundle"),
    "half a bundle": (ASKED + "tip = commit(base); answer(tip, bundle(tip)[:-40])\n", ""),
    "an answer without end": (
        ASKED + "\nwhile True: sys.stdout.buffer.write(b'x' * 65536)\n",
        "answer",
    ),
    "an answer that is no JSON": (ASKED + "print('fine', flush=True)\n", "malformed"),
    "no answer": (ASKED + "time.sleep(600)\n", "within 4000 ms"),
    "nothing at all": ("raise SystemExit(3)\n", "no answer"),
    "a refusal of its own": (
        ASKED + "answer(None, b'', refused={'rule': 'size', 'detail': 'too\\nlarge'})\n",
        "size",
    ),
}


async def all_of(bridge: Bridge, lies: Mapping[str, Lie]) -> dict[str, dict[str, Any]]:
    """Every case in an attempt of its own, some at a time; the results by name."""
    results: dict[str, dict[str, Any]] = {}
    room = anyio.CapacityLimiter(AT_ONCE)

    async def one(name: str, lie: Lie) -> None:
        async with room:
            attempt_id = await bridge.run(sandbox=lie.sandbox, **lie.start)
            results[name] = await bridge.hub.over(attempt_id)

    async with anyio.create_task_group() as tasks:
        for name, lie in lies.items():
            tasks.start_soon(one, name, lie)
    return results


def left(engine: Engine, runner_id: str) -> list[str]:
    """What the engine still has of this runner, by another door than the bridge's."""
    wanted = json.dumps({"label": [f"dev.forge.runner-id={runner_id}"]})
    containers = engine.api.get("/containers/json", {"all": "1", "filters": wanted})
    volumes = engine.api.get("/volumes", {"filters": wanted})["Volumes"] or []
    return [c["Names"][0] for c in containers] + [v["Name"] for v in volumes]


@pytest.mark.requirement("B-71", "B-72", "B-86")
async def test_a_pid_1_that_lies(tmp_path: Path, engine: Engine, runner_id: str) -> None:
    lies = {
        name: lie._replace(sandbox={"supervisor_source": PID_1 + lie.source, **lie.sandbox})
        for name, lie in LYING_PID_1.items()
    }
    async with real_bridge(tmp_path, engine, runner_id, max_concurrent_sandboxes=AT_ONCE) as bridge:
        results = await all_of(bridge, lies)
        found = {name: result.get("failureCode") for name, result in results.items()}
        assert found == {name: lie.code for name, lie in lies.items()}
        assert results["ends badly and then well"]["exitCode"] == 3
        assert "within 1500 ms" in results["is never ready"]["summary"]
        logs = bridge.hub.of("SubmitDispatchEvent", type="log")
        assert [log["payload"]["text"] for log in logs] == ["\ufffd<\ufffd>"]
        assert len(bridge.logged("PID 1 refused a frame")) == 1
        await bridge.until_idle()
        assert left(engine, runner_id) == []


@pytest.mark.requirement("B-72")
async def test_a_stream_that_ends_proves_nothing(tmp_path: Path) -> None:
    async def agent(container: Container) -> int:
        container.frame("ready")
        await container.read_line()
        container.frame("started")
        container.hang_up()
        await anyio.sleep_forever()
        return 0

    engine = MemoryEngine()
    engine.programs["agent"] = agent
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        result = await bridge.hub.over(await bridge.run(sandbox={"exit_ms": 100}))
        assert result["failureCode"] == "supervisor_lost"
        assert "went on" in result["summary"]
        assert engine.is_empty


@pytest.mark.requirement("B-36", "B-71", "B-72")
@pytest.mark.parametrize("deadline", ["lease", "hard_wall"])
async def test_a_helper_that_takes_its_time_outlives_no_deadline(
    tmp_path: Path, deadline: str
) -> None:
    asked = anyio.Event()

    async def helper(container: Container) -> int:
        await container.read_line()
        asked.set()
        await anyio.sleep_forever()
        return 0

    engine = MemoryEngine()
    engine.programs["helper"] = helper
    lease = {"ttlMs": 60_000, "sequence": 0, "key": base64.b64encode(KEY).decode()}
    limits = {"hardWallMs": 60_000, "idleMs": 1_000, "maxOutputBytes": 1}
    if deadline == "lease":
        lease["ttlMs"] = 2_000
    else:
        limits["hardWallMs"] = 2_000
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        attempt_id = await bridge.run("true", lease=lease, limits=limits)
        await asked.wait()
        if deadline == "hard_wall":  # which no renewal moves
            bridge.hub.send("LeaseUpdate", renewal(attempt_id, 1, 1, KEY, ttl_ms=60_000))
        result = await bridge.hub.over(attempt_id)
        assert (result["outcome"], result["failureCode"]) == ("expired", f"{deadline}_expired")
        assert result["exitCode"] == 0
        assert engine.is_empty


@pytest.mark.requirement("B-04", "B-86")
async def test_a_helper_that_lies(tmp_path: Path, engine: Engine, runner_id: str) -> None:
    faithful: dict[str, Any] = {"supervisor_source": FAITHFUL, "output_ms": 60_000}
    lies = {
        name: Lie("", sandbox={**faithful, "bundle_source": source})
        for name, (source, _) in LYING_HELPER.items()
    }
    # Only the one that is to run out of time has little of it: the machine may be busy.
    hasty = lies["no answer"]
    lies["no answer"] = hasty._replace(sandbox={**hasty.sandbox, "output_ms": 4_000})
    async with real_bridge(tmp_path, engine, runner_id, max_concurrent_sandboxes=AT_ONCE) as bridge:
        honest = Lie("", sandbox={**faithful, "bundle_source": HONEST})
        (result,) = (await all_of(bridge, {"honest": honest})).values()
        store = bridge.state_root / "repositories" / "sample.git"
        assert git(store, "rev-parse", f"{result['resultCommit']}^") == bridge.commit
        kept = git(store, "for-each-ref", "--format=%(refname)", "refs/forge/attempts")
        assert kept == attempt_ref(result["attemptId"], 1)
        before = git(store, "count-objects", "-v"), git(store, "for-each-ref")
        results = await all_of(bridge, lies)
        for name, (_, words) in LYING_HELPER.items():
            result = results[name]
            assert (result["outcome"], result["failureCode"]) == ("failed", "output_invalid"), name
            assert re.search(words, result["summary"]), (name, result["summary"])
            assert "resultCommit" not in result
        assert (git(store, "count-objects", "-v"), git(store, "for-each-ref")) == before
        kept_files = [p for p in store.parent.rglob("*") if store not in (p, *p.parents)]
        assert [p for p in kept_files if not p.is_dir()] == []
        await bridge.until_idle()
        assert left(engine, runner_id) == []
