"""Secrets are planted, attempts are run and broken, and every place is searched.

The one place that holds a secret by contract is the hub's database: ``agent.env`` of a session
is kept there as it came (docs/explanation/threat-model.md).
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from anyio import to_thread
from canary_parts import children_of, engine_says, files_with, holds, processes_with

from engines import REPOSITORY, Engine
from rig import API_TOKEN, RUNNER_TOKEN, Rig, wait_for

sys.path.insert(0, str(REPOSITORY / "tests" / "flows"))

from bridge_parts import KEY, Bridge, real_bridge

GRANT = f"canary of+a secret-grant-4b1d-{os.getpid()}"
ENVIRONMENT = f"canary/of+an agent-environment-9e02-{os.getpid()}"

pytestmark = pytest.mark.engine("d26")


def pid_1(engine: Engine, runner_id: str) -> int:
    wanted = json.dumps({"label": [f"dev.forge.runner-id={runner_id}", "dev.forge.role=agent"]})
    (container,) = engine.api.get("/containers/json", {"filters": wanted})
    return int(engine.api.get(f"/containers/{container['Id']}/json")["State"]["Pid"])


# -- a secret grant and the lease key, with a hub that we script ----------------------------------

TELL_AND_WAIT = """
import base64, json, os, signal, sys, urllib.parse
ends = {signal.SIGUSR1: 0, signal.SIGUSR2: 3, signal.SIGALRM: 0}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
secret = os.environ["GRANT"]
raw = secret.encode()
quoted = urllib.parse.quote(secret)
for text in (secret, base64.b64encode(raw).decode(), raw.hex(), quoted, json.dumps([secret])):
    print(text, flush=True)
    print(text[:9], end="", file=sys.stderr, flush=True)
    print(text[9:], file=sys.stderr, flush=True)
name = "\\n" + secret  # refused in a result for its newline, by name
open(name, "w")
print("told", flush=True)
told = signal.sigwait(ends)
if told == signal.SIGUSR1:
    os.rename(name, "result")
sys.exit(ends[told])
"""


async def told(bridge: Bridge, attempt_id: str) -> None:
    def printed() -> str:
        logs = bridge.hub.of("SubmitDispatchEvent", attemptId=attempt_id, type="log")
        return "".join(event["payload"]["text"] for event in logs)

    await bridge.hub.until(lambda: "told" in printed())


SIGNALS = {
    "success": (signal.SIGUSR1, None),
    "failure": (signal.SIGUSR2, "agent_failed"),
    "refused output": (signal.SIGALRM, "output_invalid"),
}


@pytest.mark.requirement("B-60", "B-70")
@pytest.mark.parametrize("how", [*SIGNALS, "cancel"])
async def test_a_redeemed_secret_and_the_lease_key_are_written_nowhere(
    tmp_path: Path, engine: Engine, runner_id: str, how: str
) -> None:
    async with real_bridge(tmp_path, engine, runner_id) as bridge:
        answer = {"accepted": True, "secrets": {"GRANT": GRANT}}
        bridge.hub.answers["RedeemSecretGrant"] = lambda _payload: answer
        bridge.secrets.add(GRANT)
        attempt_id = await bridge.run("python3", "-c", TELL_AND_WAIT, secretGrants=["handle"])
        await told(bridge, attempt_id)
        supervisor = pid_1(engine, runner_id)
        (agent,) = children_of(supervisor) - {supervisor}
        found = await to_thread.run_sync(processes_with, GRANT)
        assert found == {agent: ["environ"]}
        assert await to_thread.run_sync(processes_with, KEY) == {}
        said = await to_thread.run_sync(engine_says, engine, runner_id)
        assert attempt_id.encode() in said
        assert not holds(said, (GRANT, KEY))
        assert files_with(bridge.state_root, GRANT, KEY) == []
        number, code = SIGNALS.get(how, (None, "cancelled"))
        if number is None:
            bridge.hub.send("Cancel", {"attemptId": attempt_id, "fence": 1, "reason": "enough"})
        else:
            os.kill(agent, number)
        result = await bridge.hub.over(attempt_id)
        assert result.get("failureCode") == code, result
        everything = json.dumps([call.payload for call in bridge.hub.calls]).encode()
        assert b"told" in everything
        for place in (everything, repr(bridge.logs).encode()):
            assert not holds(place, (GRANT, KEY))
    assert files_with(tmp_path, GRANT, KEY) == []


# -- the agent's environment and the tokens, with real processes, one of which is killed ----------

SAY_AND_WAIT = """
import os, time
print(os.environ["CANARY"], flush=True)
time.sleep(60)
"""


def columns_with(database: Path, *secrets: str) -> set[str]:
    """``table.column`` of the hub's database, wherever a secret is."""
    found = set()
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        tables = connection.execute("select name from sqlite_master where type = 'table'")
        for (table,) in tables.fetchall():
            rows = connection.execute(f'select * from "{table}"')  # noqa: S608 - its own name
            names = [column[0] for column in rows.description]
            for row in rows:
                cells = zip(names, row, strict=True)
                found |= {f"{table}.{n}" for n, cell in cells if holds(str(cell).encode(), secrets)}
    connection.close()
    return found


@pytest.mark.requirement("B-60")
def test_a_killed_bridge_leaves_no_secret_behind(rig: Rig) -> None:
    session_id = rig.dispatch("python3", "-c", SAY_AND_WAIT, env={"CANARY": ENVIRONMENT})
    wait_for("its output", lambda: ENVIRONMENT in rig.diagnostics(session_id)["logTail"])
    inside = children_of(pid_1(rig.engine, rig.runner_id))
    assert set(processes_with(ENVIRONMENT)) <= inside
    ours = inside | children_of(os.getpid())  # other sessions may use the same tokens
    tokens = {pid: w for pid, w in processes_with(RUNNER_TOKEN, API_TOKEN).items() if pid in ours}
    assert tokens == {rig.bridge.pid: ["environ"], rig.hub.pid: ["environ"]}
    assert not holds(engine_says(rig.engine, rig.runner_id), (ENVIRONMENT, RUNNER_TOKEN, API_TOKEN))
    rig.bridge.kill()
    searched(rig)
    rig.start_bridge()
    wait_for("the remains to be removed", lambda: not rig.resources())
    searched(rig)
    shown = json.dumps([rig.get(f"/sessions/{session_id}"), rig.get("/sessions")])
    assert not holds(shown.encode(), (ENVIRONMENT, RUNNER_TOKEN, API_TOKEN))


def searched(rig: Rig) -> None:
    """State root, clone, logs and database hold nothing but what the contract says."""
    left = {path.name for path in map(Path, files_with(rig.directory, ENVIRONMENT))}
    assert left <= {"hub.sqlite3", "hub.sqlite3-wal"}, left
    assert files_with(rig.directory, RUNNER_TOKEN, API_TOKEN) == []
    assert columns_with(rig.directory / "hub.sqlite3", ENVIRONMENT) == {"attempts.input"}
