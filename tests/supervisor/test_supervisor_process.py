"""A real PID 1: starts the agent as asked, tells its end as it was, leaves nothing alive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pid1 import (
    SETPRIV,
    SOURCE,
    UID,
    Pid1,
    child_of,
    init_frame,
    lease_frame,
    now_ms,
    peak_memory_kib,
)

from forge_core.supervisor_frames import MAX_INIT_BYTES
from forge_core.wire.from_hub import MAX_ARGUMENT_BYTES

Start = Callable[..., Pid1]

DAEMONS = """
trap '' TERM HUP INT QUIT USR1
setsid sh -c 'setsid sh -c "while :; do sleep 1; done" & exit' &
setsid sh -c 'kill -STOP $$' &
"""
FLOOD = DAEMONS + "while :; do echo flood flood flood flood; done"
SILENT = DAEMONS + "while :; do sleep 1; done"


def run(start: Start, *argv: str, **changes: Any) -> Pid1:
    pid1 = start()
    pid1.send(init_frame(*argv, **changes))
    return pid1


def python(program: str) -> tuple[str, ...]:
    return "/usr/bin/python3", "-I", "-S", "-c", program


# --- the agent's own end


@pytest.mark.parametrize("code", [0, 1, 3, 70, 75, 126, 127, 255])
def test_an_exit_code_is_told_as_it_was(start: Start, code: int) -> None:
    pid1 = run(start, "sh", "-c", f"exit {code}")
    assert pid1.end() == 0
    assert pid1.frames[0] == {"type": "ready", "version": 1, "pid": 1}
    assert [frame["type"] for frame in pid1.frames] == ["ready", "started", "exit"]
    assert pid1.frames[-1] == {"type": "exit", "code": code}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_is_told_as_it_was(start: Start, number: int) -> None:
    pid1 = run(start, "sh", "-c", f"kill -{int(number)} $$")
    assert pid1.end() == 0
    assert pid1.frames[-1] == {"type": "exit", "signal": int(number)}


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"argv": ["no-such"]}, 127, "cannot run no-such: No such file or directory"),
        ({"argv": ["/no/such"]}, 127, "cannot run /no/such: No such file or directory"),
        ({"argv": ["/etc/passwd"]}, 126, "cannot run /etc/passwd: Permission denied"),
        ({"argv": ["/"]}, 126, "cannot run /: Permission denied"),
        ({"argv": ["true"], "env": {"PATH": "/nowhere"}}, 127, "cannot run true: No such file"),
        ({"argv": ["true", "x" * 200_000]}, 126, "cannot run true: Argument list too long"),
        ({"cwd": "/no/such"}, 126, "cannot enter /no/such: No such file or directory"),
    ],
    ids=["name", "path", "not executable", "directory", "PATH", "too long", "cwd"],
)
def test_what_cannot_be_run_ends_as_in_a_shell(
    start: Start, changes: dict[str, Any], code: int, text: str
) -> None:
    pid1 = run(start, **changes)
    assert pid1.end() == 0
    assert text in pid1.text("stderr")
    assert pid1.frames[-1] == {"type": "exit", "code": code}


def test_what_the_wire_lets_through_linux_starts(start: Start) -> None:
    """The longest argument, beside the longest value of the longest name."""
    name, longest = "N" * 256, "x" * MAX_ARGUMENT_BYTES
    script = f"echo ${{#1}} ${{#{name}}}"
    env = {"PATH": "/usr/bin:/bin", name: longest}
    pid1 = run(start, "sh", "-c", script, "sh", longest, env=env)
    assert pid1.end() == 0
    assert pid1.text().split() == [str(MAX_ARGUMENT_BYTES)] * 2


def test_all_that_fits_into_an_init_linux_starts(start: Start) -> None:
    """In many small pieces, each of which costs a pointer; and in few large ones."""
    for size_bytes in (8, MAX_ARGUMENT_BYTES):
        frame = init_frame("sh", "-c", "echo $#", "sh")
        room_bytes = MAX_INIT_BYTES - len(json.dumps(frame))
        count = room_bytes // (size_bytes + len('"", '))
        frame["argv"] += ["x" * size_bytes] * count
        assert MAX_INIT_BYTES - size_bytes - 4 < len(json.dumps(frame)) <= MAX_INIT_BYTES
        pid1 = start()
        pid1.send(frame)
        assert pid1.end() == 0
        assert pid1.text() == f"{count}\n"


def test_the_agent_starts_clean(start: Start) -> None:
    program = """
import json, os
print(json.dumps(sorted(os.environ.items())))
print(sorted(f"{n}:{os.readlink('/proc/self/fd/' + n).split(':')[0]}"
    for n in ("0", "1", "2")), len(os.listdir("/proc/self/fd")) - 1)
print(os.getcwd(), os.getsid(0) == os.getpid(), os.getuid())
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(int(status["SigBlk"], 16), status["NoNewPrivs"].strip())
"""
    # Python itself ignores SIGPIPE and SIGXFSZ, so the shell looks at the dispositions
    ignored = "grep SigIgn /proc/self/status"
    environment = {"PATH": "/usr/bin:/bin", "ONLY": "ü"}
    pid1 = start(SOURCE)
    pid1.send(init_frame(*python(program), env=environment, cwd="/usr"))
    assert pid1.end() == 0
    lines = pid1.text().splitlines()
    # LC_CTYPE is the work of the agent's own Python (PEP 538)
    assert {**dict(json.loads(lines[0])), "LC_CTYPE": "C.UTF-8"} == {
        "LC_CTYPE": "C.UTF-8",
        "ONLY": "ü",
        "PATH": "/usr/bin:/bin",
    }
    assert lines[1:] == ["['0:/dev/null', '1:pipe', '2:pipe'] 3", f"/usr True {UID}", "0 1"]
    shell = run(start, "sh", "-c", ignored)
    assert shell.end() == 0
    assert int(shell.text().split()[1], 16) == 0


def test_what_the_runtime_leaked_does_not_reach_the_agent(start: Start) -> None:
    leak = ("sh", "-c", 'exec 7</etc/passwd 9>/dev/null; exec "$@"', "sh")
    pid1 = start(prefix=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *leak))
    pid1.send(init_frame("sh", "-c", "ls /proc/self/fd"))
    assert pid1.end() == 0
    assert pid1.text().split() == ["0", "1", "2", "3"]  # 3 is the listing itself


def test_memory_runs_out_on_the_agent_first(start: Start) -> None:
    # PID 1 is like its agent for a moment, from before the fork to after it.
    script = """
        read -r agent < /proc/self/oom_score_adj
        until read -r own < /proc/1/oom_score_adj && [ "$own" -lt "$agent" ]; do :; done
        echo "$agent"
    """
    pid1 = run(start, "sh", "-c", script)
    assert pid1.end() == 0
    assert int(pid1.text()) >= 500


# --- nothing is left


def test_what_the_agent_leaves_behind_dies_with_it(start: Start) -> None:
    pid1 = run(start, "sh", "-c", DAEMONS + "sleep 1000 & echo last words; exit 5")
    assert pid1.end() == 0
    assert pid1.text() == "last words\n"
    assert pid1.frames[-1] == {"type": "exit", "code": 5}


def test_a_fork_bomb_ends_with_its_agent(start: Start) -> None:
    bomb = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_NPROC, (120, 120))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    for _ in iter(lambda: os.path.exists("/proc/100"), True): pass
    os._exit(9)
while True:
    try: os.setsid() if os.fork() == 0 else None
    except OSError: pass
"""
    pid1 = run(start, *python(bomb))
    assert pid1.end() == 0
    assert pid1.frames[-1] == {"type": "exit", "code": 9}


def test_orphans_are_reaped_while_the_agent_runs(start: Start) -> None:
    program = """
import os
for _ in range(300):
    if os.fork() == 0:
        if os.fork(): os._exit(0)
        os._exit(0)
    os.wait()
def zombies():
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try: count += ") Z " in open(f"/proc/{name}/stat").read()
        except OSError: pass
    return count
while zombies(): pass
print("all reaped")
"""
    pid1 = run(start, *python(program))
    assert pid1.end() == 0
    assert pid1.text() == "all reaped\n"


def test_the_agent_cannot_signal_its_supervisor(start: Start) -> None:
    program = """
import os, signal
for number in signal.valid_signals():
    for _ in range(50):
        os.kill(1, number)
print("still here", os.getppid())
"""
    pid1 = run(start, *python(program))
    assert pid1.end() == 0
    assert pid1.text() == "still here 1\n"
    assert pid1.frames[-1] == {"type": "exit", "code": 0}


# --- three deadlines


@pytest.mark.requirement("B-70", "B-71")
@pytest.mark.parametrize(
    ("which", "changes", "program", "code"),
    [
        ("lease", {"leaseMs": 500}, FLOOD, 70),
        ("hardWall", {"hardWallMs": 500}, FLOOD, 71),
        ("idle", {"idleMs": 500}, SILENT, 72),
    ],
)
def test_each_deadline_ends_everything_under_its_own_code(
    start: Start, which: str, changes: dict[str, int], program: str, code: int
) -> None:
    pid1 = run(start, "sh", "-c", program, **changes)
    pid1.wait_for("started")
    began_ms = now_ms()
    pid1.wait_for("expired")
    assert now_ms() - began_ms < 5_000
    assert pid1.end() == code
    assert [f["which"] for f in pid1.of_type("expired")] == [which]
    assert pid1.of_type("exit") == []


@pytest.mark.requirement("B-71")
def test_output_keeps_an_agent_from_being_idle(start: Start) -> None:
    chatty = "for i in 1 2 3 4 5 6 7 8; do printf .; sleep 0.2; done"
    pid1 = run(start, "sh", "-c", chatty, idleMs=1_000)
    assert pid1.end() == 0
    assert pid1.text() == "........"


@pytest.mark.requirement("B-71")
def test_a_lease_that_is_over_starts_nothing(start: Start) -> None:
    pid1 = run(start, "true", leaseMs=0)
    assert pid1.end() == 70
    assert [frame["type"] for frame in pid1.frames] == ["ready", "expired"]


@pytest.mark.requirement("B-70", "B-71")
def test_orders_that_were_held_back_start_nothing_once_their_lease_is_over(start: Start) -> None:
    pid1 = start()
    pid1.wait_for("ready")
    heard_ms = now_ms()
    while now_ms() <= heard_ms + 1:
        pass
    pid1.send(init_frame("true", leaseMs=1))
    assert pid1.end() == 70
    assert [frame["type"] for frame in pid1.frames] == ["ready", "expired"]


@pytest.mark.requirement("B-71")
def test_the_grace_is_there_to_be_used(start: Start) -> None:
    program = "trap 'sleep 0.2; echo tidy; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    pid1 = run(start, "sh", "-c", program, leaseMs=700, graceMs=20_000)
    assert pid1.end() == 70
    assert pid1.text() == "up\ntidy\n"


# --- renewals


@pytest.mark.requirement("B-70")
def test_a_renewal_moves_the_deadline(start: Start) -> None:
    pid1 = run(start, "sh", "-c", "sleep 2; echo done", leaseMs=1_000)
    pid1.send(lease_frame(3, 20_000))
    assert pid1.end() == 0
    assert (pid1.text(), pid1.refusals()) == ("done\n", {})


@pytest.mark.requirement("B-70")
def test_wrong_renewals_change_nothing_and_are_counted(start: Start) -> None:
    pid1 = run(start, "sh", "-c", SILENT, leaseMs=800)
    pid1.send(
        {**lease_frame(), "mac": lease_frame(4)["mac"]},
        lease_frame(fence=8),
        lease_frame(fence=6),
        lease_frame(attempt_id="att-2"),
        lease_frame(2),
        lease_frame(1),
        {**lease_frame(), "ttlMs": 60_000.0},
    )
    assert pid1.end() == 70
    assert pid1.refusals() == {"bad_mac": 4, "stale_sequence": 2, "malformed": 1}


@pytest.mark.requirement("B-70")
def test_a_renewal_that_waited_while_the_container_was_frozen_revives_nothing(start: Start) -> None:
    pid1 = run(start, "sh", "-c", SILENT, leaseMs=1_000)
    pid1.wait_for("started")
    host_pid = pid1.host_pid
    os.kill(host_pid, signal.SIGSTOP)  # from outside of the namespace even PID 1 obeys
    frozen_ms = now_ms()
    pid1.send(lease_frame(3, 60_000))
    while now_ms() < frozen_ms + 1_100:
        signal.sigtimedwait([], 0.05)
    os.kill(host_pid, signal.SIGCONT)
    assert pid1.end() == 70
    assert pid1.refusals() == {"lease_expired": 1}


@pytest.mark.requirement("B-70")
@pytest.mark.parametrize(("lease_ms", "code"), [(600, 70), (60_000, 0)])
def test_a_lost_stdin_is_no_end(start: Start, lease_ms: int, code: int) -> None:
    pid1 = run(start, "sh", "-c", "sleep 1.2; echo done", leaseMs=lease_ms)
    pid1.lose_stdin()
    assert pid1.end() == code
    assert pid1.text() == ("done\n" if code == 0 else "")


@pytest.mark.requirement("B-70")
def test_a_lost_reader_is_no_end_either(start: Start) -> None:
    pid1 = run(start, "sh", "-c", FLOOD, leaseMs=1_000)
    pid1.wait_for_text("flood")
    pid1.lose_reader()
    assert pid1.wait() == 70


# --- cancel


def test_a_cancel_lets_the_agent_say_goodbye(start: Start) -> None:
    program = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    pid1 = run(start, "sh", "-c", program)
    pid1.wait_for_text("up")
    pid1.send({"type": "cancel", "graceMs": 20_000})
    assert pid1.end() == 73
    assert pid1.text() == "up\nbye\n"
    assert pid1.of_type("exit") == []


def test_a_second_cancel_only_hurries(start: Start) -> None:
    pid1 = run(start, "sh", "-c", FLOOD)
    pid1.wait_for_text("flood")
    pid1.send({"type": "cancel", "graceMs": 600_000}, {"type": "cancel", "graceMs": 700_000})
    before = len(pid1.frames)
    while len(pid1.frames) < before + 1_000:  # it goes on, ignoring SIGTERM
        assert pid1.read_some()
    pid1.send({"type": "cancel", "graceMs": 0})
    assert pid1.end() == 73


@pytest.mark.requirement("B-71")
def test_the_grace_of_a_cancel_does_not_outlive_the_lease(start: Start) -> None:
    pid1 = run(start, "sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done", leaseMs=1_500)
    pid1.wait_for_text("up")
    pid1.send({"type": "cancel", "graceMs": 600_000})
    assert pid1.end() == 73


def test_an_agent_that_has_ended_cannot_be_cancelled_any_more(start: Start) -> None:
    pid1 = run(start, "sh", "-c", "read -r line < /dev/zero")
    pid1.wait_for("started")
    host_pid = pid1.host_pid
    agent = child_of(host_pid)
    os.kill(host_pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGUSR1)
    while ") Z " not in Path(f"/proc/{agent}/stat").read_text():
        signal.sigtimedwait([], 0.01)
    pid1.send({"type": "cancel", "graceMs": 0})
    os.kill(host_pid, signal.SIGCONT)
    assert pid1.end() == 0
    assert pid1.frames[-1] == {"type": "exit", "signal": signal.SIGUSR1}


def test_a_stopped_process_gets_its_grace(start: Start) -> None:
    program = "trap 'echo bye; exit' TERM; echo up; kill -STOP $$"
    pid1 = run(start, "sh", "-c", program)
    pid1.wait_for_text("up")
    pid1.send({"type": "cancel", "graceMs": 20_000})
    assert pid1.end() == 73
    assert pid1.text() == "up\nbye\n"


def test_sigterm_from_outside_is_a_cancel(start: Start) -> None:
    pid1 = run(start, "sh", "-c", SILENT)
    pid1.wait_for("started")
    os.kill(pid1.host_pid, signal.SIGTERM)
    assert pid1.end() == 73


# --- output


def test_nothing_it_reads_or_writes_can_block_it(start: Start) -> None:
    """Not even an agent that opens its own pipe for reading, to empty it after our poll."""
    pid1 = run(start, "sh", "-c", SILENT)
    pid1.wait_for("started")
    pipes = [
        int(fdinfo.name)
        for fdinfo in Path(f"/proc/{pid1.host_pid}/fdinfo").iterdir()
        if os.readlink(f"/proc/{pid1.host_pid}/fd/{fdinfo.name}").startswith("pipe:")
    ]
    assert len(pipes) == 7  # stdin, stdout, stderr, the agent's two, both ends of the wake pipe
    for fd in pipes:
        flags = Path(f"/proc/{pid1.host_pid}/fdinfo/{fd}").read_text().splitlines()[1].split()[1]
        assert fd == 2 or int(flags, 8) & os.O_NONBLOCK  # 2: set before the one line it gets


def test_a_flood_keeps_memory_flat_and_loses_nothing(start: Start) -> None:
    size_bytes = 64 << 20
    flood = f"""
import sys, time
sys.stderr.write("up\\n")
block = b"0123456789abcde\\n" * 65536
for _ in range({size_bytes} // len(block)): sys.stdout.buffer.write(block)
sys.stdout.flush()
sys.stderr.write("done\\n")
while True: time.sleep(1)
"""
    pid1 = run(start, *python(flood))
    pid1.wait_for_text("up", "stderr")
    before_kib = peak_memory_kib(pid1.host_pid)
    pid1.wait_for_text("done", "stderr")
    assert peak_memory_kib(pid1.host_pid) - before_kib < 4_096
    pid1.send({"type": "cancel", "graceMs": 0})
    assert pid1.end() == 73
    assert (len(pid1.text()), pid1.dropped_bytes()) == (size_bytes, 0)


def test_a_line_without_end_is_forwarded_in_pieces(start: Start) -> None:
    pid1 = run(start, "sh", "-c", "head -c 10000000 /dev/zero | tr '\\0' x")
    assert pid1.end() == 0
    assert pid1.text() == "x" * 10_000_000
    assert max(len(f["text"]) for f in pid1.of_type("log")) <= 16_384


def test_a_reader_that_sleeps_delays_nobody_and_learns_what_it_missed(start: Start) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        done = Path(folder, "done")
        os.mkfifo(done)
        done.chmod(0o666)
        program = f"head -c 8388608 /dev/zero | tr '\\0' x; echo done > {done}"
        pid1 = run(start, "sh", "-c", program)
        # Nothing has been read from the supervisor until here.
        assert done.read_text() == "done\n"
    assert pid1.end() == 0
    assert pid1.frames[-1] == {"type": "exit", "code": 0}
    assert pid1.dropped_bytes() > 7 << 20
    assert len(pid1.text()) + pid1.dropped_bytes() == 8 << 20


def test_a_reader_that_never_reads_keeps_nothing_alive(start: Start) -> None:
    pid1 = run(start, "sh", "-c", "head -c 2000000 /dev/zero; exit 4", leaseMs=2_000)
    assert pid1.wait() == 76
    flooded = run(start, "sh", "-c", FLOOD, leaseMs=700)
    assert flooded.wait() == 70


def test_the_output_limit_is_exact_and_told(start: Start) -> None:
    program = "head -c 3000000 /dev/zero | tr '\\0' x; echo up >&2; while :; do sleep 1; done"
    pid1 = run(start, "sh", "-c", program, maxOutputBytes=1_000_000)
    pid1.wait_for("log", text="", stream="stdout")  # told while the agent still runs
    while not any(f["droppedBytes"] for f in pid1.of_type("log") if f["stream"] == "stderr"):
        assert pid1.read_some()
    pid1.send({"type": "cancel", "graceMs": 0})
    assert pid1.end() == 73
    assert (len(pid1.text()), pid1.dropped_bytes()) == (1_000_000, 2_000_000)
    assert (pid1.text("stderr"), pid1.dropped_bytes("stderr")) == ("", 3)


# --- a host that sends nonsense


def test_nonsense_is_counted_and_changes_nothing(start: Start) -> None:
    program = "trap '' TERM; echo up; read -r line < /dev/null; sleep 1; echo done"
    pid1 = run(start, "sh", "-c", program)
    pid1.wait_for_text("up")
    pid1.send(
        b"x" * (2 << 20),
        b"\xff\xfe",
        b"",
        b"[" * 1_000_000,
        b'{"type":"lease","ttlMs":' + b"9" * 900_000 + b"}",
        b'{"type":"cancel"}',
        b'{"type":"cancel","graceMs":true}',
        b'{"type":"cancel","graceMs":-1}',
        {"type": "exec", "argv": ["sh"]},
        {"type": "exit"},
        init_frame("sh", "-c", "echo twice"),
    )
    assert pid1.end() == 0
    assert pid1.text() == "up\ndone\n"
    assert pid1.refusals() == {"oversized": 1, "malformed": 7, "unknown_type": 2, "unexpected": 1}
    assert pid1.frames[-1] == {"type": "exit", "code": 0}


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (init_frame(fence=0), "malformed"),
        (init_frame(key="c2VjcmV0"), "malformed"),
        (init_frame(argv=[]), "malformed"),
        (init_frame(env={"A=B": "secret"}), "malformed"),
        (lease_frame(), "unexpected"),
        ({"type": "cancel", "graceMs": 0}, "unexpected"),
        (b"nonsense", "malformed"),
        (b"x" * (2 << 20), "oversized"),
    ],
    ids=["fence", "key", "argv", "env", "lease", "cancel", "no JSON", "too long"],
)
def test_a_bad_init_starts_nothing(
    start: Start, frame: dict[str, Any] | bytes, reason: str
) -> None:
    pid1 = start()
    pid1.send(frame)
    assert pid1.end() == 74
    assert [f["type"] for f in pid1.frames] == ["ready", "refused"]
    assert pid1.frames[-1] == {"type": "refused", "reason": reason, "count": 1}
    assert pid1.stderr.startswith(f"forge-supervisor: cannot accept init: {reason}")


def waiting(init_ms: int) -> str:
    """The supervisor, which waits no longer than this for its orders."""
    return SOURCE.replace("INIT_WAIT_MS = 60_000", f"INIT_WAIT_MS = {init_ms}")


IMPATIENT = waiting(300)


def test_without_an_init_it_does_not_stay(start: Start) -> None:
    impatient = start(IMPATIENT)
    assert impatient.end() == 75
    lost = start()
    lost.lose_stdin()
    assert lost.end() == 75


@pytest.mark.requirement("B-70")
def test_an_empty_line_lets_it_wait_as_long_again_for_its_init(start: Start) -> None:
    pid1 = start(waiting(3_000))  # far longer than this process may have to wait for a core
    pid1.wait_for("ready")
    began_ms = now_ms()
    while now_ms() < began_ms + 4_000:
        pid1.send(b"")
        time.sleep(0.1)
    pid1.send(b"", init_frame("echo", "at last"))
    assert pid1.end() == 0
    assert len(pid1.of_type("ready")) > 2, "nobody would see that it is still there"
    assert pid1.text() == "at last\n"
    assert pid1.refusals() == {}


@pytest.mark.requirement("B-70")
def test_it_waits_no_longer_than_that_and_no_longer_than_an_attempt(start: Start) -> None:
    pid1 = start(IMPATIENT)
    pid1.wait_for("ready")
    with contextlib.suppress(BrokenPipeError):  # when it has gone before
        pid1.send(b"", b"", b"")
    assert pid1.end() == 75
    bounded = SOURCE.replace("self._ready_ms + MAX_DURATION_MS", "self._ready_ms + 400")
    assert bounded != SOURCE
    pid1 = start(bounded)
    with contextlib.suppress(BrokenPipeError):
        while pid1.process.poll() is None:
            pid1.send(b"")
            time.sleep(0.05)
    assert pid1.end() == 75


@pytest.mark.requirement("B-70")
def test_the_lease_counts_from_ready_however_long_it_was_made_to_wait(start: Start) -> None:
    pid1 = start()
    pid1.wait_for("ready")
    began_ms = now_ms()
    while now_ms() < began_ms + 600:
        pid1.send(b"")
        time.sleep(0.05)
    pid1.send(init_frame("true", leaseMs=600))
    assert pid1.end() == 70
    assert pid1.of_type("started") == []


@pytest.mark.requirement("B-70")
def test_an_empty_line_is_nothing_to_one_that_has_its_orders(start: Start) -> None:
    pid1 = run(start, "sh", "-c", "echo ready; sleep 1")
    pid1.wait_for_text("ready")
    pid1.send(b"")
    assert pid1.end() == 0
    assert pid1.refusals() == {"malformed": 1}


# --- where it must not run


def test_it_refuses_to_be_anything_but_pid_1(namespaces: None) -> None:
    """As root of an ordinary namespace its ``kill(-1)`` would reach the whole machine."""
    command = [*SETPRIV, *python(SOURCE)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (79, "")
    assert "not PID 1" in result.stderr


@pytest.mark.requirement("B-70")
def test_it_refuses_to_start_where_it_stays_readable(start: Start) -> None:
    broken = SOURCE.replace("prctl(set_dumpable, 0, 0, 0, 0)", "pass")
    assert broken != SOURCE
    pid1 = start(broken)
    assert pid1.end() == 79
    assert pid1.frames == []


def test_a_failure_of_its_own_ends_the_container_and_quotes_nothing(start: Start) -> None:
    broken = SOURCE.replace("(pid, status)", "status").replace(
        "def saw_output(self, now_ms: int) -> None:",
        'def saw_output(self, now_ms: int) -> None:\n        raise KeyError("the secret")',
    )
    pid1 = start(broken)
    pid1.send(init_frame("sh", "-c", DAEMONS + "echo out; while :; do sleep 1; done"))
    assert pid1.end() == 79
    stderr = pid1.stderr
    assert "internal error: KeyError, line" in stderr
    assert "secret" not in stderr
