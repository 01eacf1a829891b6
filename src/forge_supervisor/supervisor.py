"""PID 1 of an agent container: starts the agent, keeps its deadlines, leaves nothing alive.

Run as ``python3 -I -S -c <this source>``, so it is one file, standard library only, Python 3.9
and later, and imports little.  Frames are NDJSON: ``init``, ``lease``, ``cancel`` on stdin;
``ready``, ``started``, ``log``, ``exit``, ``expired``, ``refused`` on stdout.  Everything above
``Supervisor`` is pure: time is an argument, CLOCK_BOOTTIME in milliseconds.

Source: sandbox.md, PID 1; protocol.md, Lease (B-70, B-71).
"""

from __future__ import annotations

import binascii
import codecs
import collections
import contextlib
import ctypes
import enum
import errno
import hmac
import json
import os
import select
import signal
import struct
import time

# The exit status of the container.  Anything else is not the supervisor's own word.
EXIT_STATUS_WRITTEN = 0
EXIT_EXPIRED = {"lease": 70, "hardWall": 71, "idle": 72}
EXIT_CANCELLED = 73
EXIT_BAD_INIT = 74
EXIT_NO_INIT = 75
EXIT_STATUS_NOT_READ = 76
EXIT_INTERNAL = 79

MAX_FRAME_BYTES = 1024 * 1024
READ_BYTES = 16 * 1024 - 3  # with the 3 bytes a decoder may hold back, 16 KiB raw a log frame
HOST_READ_BYTES = 64 * 1024
LOG_BUFFER_BYTES = 256 * 1024  # encoded; may be overrun by one frame
MAX_INT = 2**63 - 1
MAX_DURATION_MS = 8 * 60 * 60 * 1000
MAX_REAPED_A_TURN = 256

INIT_WAIT_MS = 60_000  # for init, from ready or from the last empty line, which the host sends
TICK_MS = 250  # poll() sleeps on CLOCK_MONOTONIC, which stands still while the machine sleeps
HOLD_MS = 1_000  # how long a full log buffer may hold the agent before bytes are dropped
KILL_WAIT_MS = 2_000  # for SIGKILL to take effect; the kernel kills the rest when PID 1 exits
STATUS_FLUSH_MS = 20_000  # for a slow reader to take the agent's status, within the lease
LAST_WORDS_MS = 1_000

ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


class Refused(Exception):  # noqa: N818 - says what is the case
    """A frame that changes nothing.

    :param reason: ``malformed``, ``oversized``, ``unknown_type``, ``unexpected``, ``bad_mac``,
        ``stale_sequence`` or ``lease_expired``: closed list, counted one by one.
    :param field: the field at fault; never its value, which may be a secret.
    """

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(reason + (f": {field}" if field else ""))
        self.reason = reason


# --- frames ------------------------------------------------------------------------------------


class Lines:
    """Splits a byte stream into lines of bounded length."""

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._line = bytearray()
        self._oversized = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that ``data`` completes; None stands for one that was too long."""
        *ends, rest = data.split(b"\n")
        lines: list[bytes | None] = []
        for end in ends:
            self._keep(end)
            lines.append(None if self._oversized else bytes(self._line))
            self._line.clear()
            self._oversized = False
        self._keep(rest)
        return lines

    def _keep(self, part: bytes) -> None:
        if len(self._line) + len(part) > self._limit_bytes:
            self._oversized = True
            self._line.clear()
        if not self._oversized:
            self._line += part


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:  # int() of a megabyte of digits takes minutes before Python 3.11
        raise ValueError("integer too long")
    return int(digits)


def _no_constant(name: str) -> object:
    raise ValueError(name + " is not JSON")


_decoder = json.JSONDecoder(parse_int=_bounded_int, parse_constant=_no_constant)
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode_frame(frame: dict[str, object]) -> bytes:
    """One line of NDJSON."""
    return _encoder.encode(frame).encode() + b"\n"


def decode_frame(line: bytes | None) -> dict[str, object]:
    """One line of NDJSON as a frame with a ``type``.

    :raises Refused: ``oversized`` or ``malformed``.
    """
    if line is None:
        raise Refused("oversized")
    try:
        frame = _decoder.decode(line.decode())
    except (ValueError, RecursionError):
        raise Refused("malformed") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise Refused("malformed", "type")
    return frame


def _integer(frame: dict[str, object], name: str, low: int, high: int) -> int:
    value = frame.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Refused("malformed", name)
    return value


def _text(frame: dict[str, object], name: str, max_length: int) -> str:
    value = frame.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= max_length:
        raise Refused("malformed", name)
    return value


def _os_bytes(value: object, name: str) -> bytes:
    """A string as the kernel takes it: UTF-8, without NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise Refused("malformed", name)
    try:
        return value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise Refused("malformed", name) from None


class Init:
    """The first frame: what to run, for how long, and the key of its lease.

    :raises Refused: ``malformed``, naming the field.
    """

    def __init__(self, frame: dict[str, object]) -> None:
        if frame["type"] != "init":
            raise Refused("unexpected", "type")
        self.attempt_id = _text(frame, "attemptId", 128)
        if not ID_CHARACTERS.issuperset(self.attempt_id) or self.attempt_id[0] in "_-":
            raise Refused("malformed", "attemptId")
        self.fence = _integer(frame, "fence", 1, MAX_INT)
        self.key = self._key(frame)
        self.sequence = _integer(frame, "sequence", 0, MAX_INT)
        self.lease_ms = _integer(frame, "leaseMs", 0, MAX_DURATION_MS)
        self.hard_wall_ms = _integer(frame, "hardWallMs", 1, MAX_DURATION_MS)
        self.idle_ms = _integer(frame, "idleMs", 1, MAX_DURATION_MS)
        self.grace_ms = _integer(frame, "graceMs", 0, MAX_DURATION_MS)
        self.max_output_bytes = _integer(frame, "maxOutputBytes", 0, MAX_INT)
        self.cwd = _os_bytes(frame.get("cwd"), "cwd")
        argv, env = frame.get("argv"), frame.get("env")
        if not isinstance(argv, list) or not argv or argv[0] == "":
            raise Refused("malformed", "argv")
        if not isinstance(env, dict) or any(not name or "=" in name for name in env):
            raise Refused("malformed", "env")
        self.argv = [_os_bytes(part, "argv") for part in argv]
        self.env = {_os_bytes(k, "env"): _os_bytes(v, "env") for k, v in env.items()}

    @staticmethod
    def _key(frame: dict[str, object]) -> bytes:
        text = _text(frame, "key", 44)
        try:
            key = binascii.a2b_base64(text)
        except ValueError:
            raise Refused("malformed", "key") from None
        if len(key) != 32 or binascii.b2a_base64(key, newline=False) != text.encode():
            raise Refused("malformed", "key")
        return key


# --- deadlines ---------------------------------------------------------------------------------


def lease_mac(
    key: bytes, attempt_id: str, fence: int, sequence: int, ttl_ms: int, issued_at: str
) -> bytes:
    """The base64 MAC of one renewal (protocol.md, Lease)."""
    parts = ("forge-lease-v1", attempt_id, str(fence), str(sequence), str(ttl_ms), issued_at)
    digest = hmac.digest(key, "\n".join(parts).encode(), "sha256")
    return binascii.b2a_base64(digest, newline=False)


class Deadlines:
    """Lease, hard wall and idle: the three ends that an attempt cannot talk itself out of.

    :param ready_ms: when ``ready`` was said, from where both sides count what init grants.
    :param started_ms: when the agent was started; hard wall and idle count from here.
    """

    def __init__(self, init: Init, ready_ms: int, started_ms: int) -> None:
        self._key = init.key
        self._attempt_id = init.attempt_id
        self._fence = init.fence
        self._sequence = init.sequence
        self._idle_ms = init.idle_ms
        self._hard_wall_at_ms = started_ms + init.hard_wall_ms
        self._idle_at_ms = started_ms + init.idle_ms
        self.lease_at_ms = min(ready_ms + init.lease_ms, self._hard_wall_at_ms)

    def renew(self, frame: dict[str, object], now_ms: int) -> None:
        """Let the lease end ``ttlMs`` from now, never past the hard wall.

        :raises Refused: nothing has changed.
        """
        sequence = _integer(frame, "sequence", 0, MAX_INT)
        ttl_ms = _integer(frame, "ttlMs", 1, MAX_DURATION_MS)
        issued_at = _text(frame, "issuedAt", 64)
        mac = _text(frame, "mac", 64)
        if not issued_at.isascii() or not mac.isascii():
            raise Refused("malformed")
        right = lease_mac(self._key, self._attempt_id, self._fence, sequence, ttl_ms, issued_at)
        if not hmac.compare_digest(right, mac.encode()):
            raise Refused("bad_mac")
        if now_ms >= self.lease_at_ms:
            raise Refused("lease_expired")
        if sequence <= self._sequence:
            raise Refused("stale_sequence")
        self._sequence = sequence
        self.lease_at_ms = min(now_ms + ttl_ms, self._hard_wall_at_ms)

    def saw_output(self, now_ms: int) -> None:
        self._idle_at_ms = now_ms + self._idle_ms

    def next(self) -> tuple[int, str]:
        """When the first of them is, and which; a lease cut by the hard wall is the hard wall."""
        ends = (self._hard_wall_at_ms, "hardWall"), (self.lease_at_ms, "lease")
        return min((*ends, (self._idle_at_ms, "idle")), key=lambda end: end[0])

    def expired(self, now_ms: int) -> str | None:
        at_ms, which = self.next()
        return which if now_ms >= at_ms else None


# --- output ------------------------------------------------------------------------------------


class _Stream:
    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.dropped_bytes = 0
        self.cut = False


class Logs:
    """The agent's output as log frames, within a buffer and within ``max_output_bytes``.

    Every raw byte is accounted for once: in the text of a frame, or in the ``droppedBytes`` of
    the next frame of its stream.
    """

    def __init__(self, max_output_bytes: int) -> None:
        self._budget_bytes = max_output_bytes
        self._streams = {"stdout": _Stream(), "stderr": _Stream()}
        self._frames: collections.deque[tuple[str, int, bytes]] = collections.deque()
        self._size_bytes = 0

    @property
    def full(self) -> bool:
        return self._size_bytes >= LOG_BUFFER_BYTES

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Take what was read from ``name``; ``final``: nothing will follow."""
        stream = self._streams[name]
        kept = data[: self._budget_bytes]
        self._budget_bytes -= len(kept)
        held_bytes = len(stream.decoder.getstate()[0])
        text = stream.decoder.decode(kept, final)
        raw_bytes = held_bytes + len(kept) - len(stream.decoder.getstate()[0])
        if self.full:
            stream.dropped_bytes += raw_bytes
        elif text:
            self._put(name, text, raw_bytes)
        stream.dropped_bytes += len(data) - len(kept)
        if len(data) > len(kept) and not stream.cut:
            stream.cut = True
            self._put(name, "", 0)  # say at once that the limit is reached
        if final and stream.dropped_bytes:
            self._put(name, "", 0)

    def pop(self) -> bytes | None:
        if not self._frames:
            return None
        frame = self._frames.popleft()[2]
        self._size_bytes -= len(frame)
        return frame

    def abandon(self) -> None:
        """Drop all that waits, leaving at most one frame a stream that says how much it was."""
        for name, lost_bytes, _ in self._frames:
            self._streams[name].dropped_bytes += lost_bytes
        self._frames.clear()
        self._size_bytes = 0
        for name, stream in self._streams.items():
            if stream.dropped_bytes:
                self._put(name, "", 0)

    def _put(self, name: str, text: str, raw_bytes: int) -> None:
        dropped_bytes = self._streams[name].dropped_bytes
        self._streams[name].dropped_bytes = 0
        frame = encode_frame(
            {"type": "log", "stream": name, "text": text, "droppedBytes": dropped_bytes}
        )
        self._frames.append((name, raw_bytes + dropped_bytes, frame))
        self._size_bytes += len(frame)


class Outbox:
    """What waits for the reader; control frames are never dropped and go before logs."""

    def __init__(self) -> None:
        self.logs = Logs(0)
        self._control: collections.deque[bytes] = collections.deque()
        self._last = b""
        self._refusals: dict[str, int] = {}
        self._unreported: set[str] = set()
        self._current = b""

    def control(self, **frame: object) -> None:
        self._control.append(encode_frame(frame))

    def last(self, **frame: object) -> None:
        """The frame after which there is nothing more to say."""
        self._last = encode_frame(frame)

    def refuse(self, reason: str) -> None:
        """Count; frames that wait are one per reason, whatever the other side sends."""
        self._refusals[reason] = self._refusals.get(reason, 0) + 1
        self._unreported.add(reason)

    def head(self) -> bytes:
        """What to write next, empty when there is nothing; a begun frame is always finished."""
        if not self._current:
            self._current = self._next()
        return self._current

    def wrote(self, size_bytes: int) -> None:
        self._current = self._current[size_bytes:]

    def _next(self) -> bytes:
        if self._control:
            return self._control.popleft()
        if self._unreported:
            reason = self._unreported.pop()
            count = self._refusals[reason]
            return encode_frame({"type": "refused", "reason": reason, "count": count})
        frame = self.logs.pop() or self._last
        if frame is self._last:
            self._last = b""
        return frame


# --- the process -------------------------------------------------------------------------------


def now_ms() -> int:
    """CLOCK_BOOTTIME: counts suspend, ignores the wall clock's steps (protocol.md, Lease)."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class Unsafe(Exception):  # noqa: N818
    """This process must not hold a key or start an agent."""


def close_strays() -> None:
    """Close what the container runtime may have leaked: nothing but 0, 1 and 2 is ours."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(name))
    for fd in (0, 1, 2):
        os.fstat(fd)


def harden() -> None:
    """Shut out processes of the same user, before there is a secret to read.

    Undumpable (prctl(2); ptrace(2), "access mode checking"): no ptrace, no /proc/1/mem, environ
    or fd.  A forked child is as closed until its exec, which opens it again.

    :raises Unsafe: not PID 1 (``kill(-1)`` would reach the whole machine), or the kernel did not
        do what was asked.
    """
    if os.getpid() != 1:
        raise Unsafe("cannot supervise: not PID 1 of a PID namespace; run it as a container's init")
    set_dumpable, get_dumpable, set_no_new_privs, get_no_new_privs = 4, 3, 38, 39
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    prctl(set_dumpable, 0, 0, 0, 0)
    prctl(set_no_new_privs, 1, 0, 0, 0)
    if prctl(get_dumpable, 0, 0, 0, 0) != 0 or prctl(get_no_new_privs, 0, 0, 0, 0) != 1:
        raise Unsafe("cannot supervise: the kernel refuses to close this process to its own user")


# By machine, for each of its ways to call the kernel: the audit architecture, setpriority, and
# what takes a pid first: sched_setparam, _setscheduler, _setaffinity, _setattr, and prlimit64.
GUARDED_CALLS = {
    "x86_64": (
        (0xC000003E, 141, 142, 144, 203, 314, 302),
        (0x40000003, 97, 154, 156, 241, 351, 340),
    ),
    "aarch64": (
        (0xC00000B7, 140, 118, 119, 122, 274, 261),
        (0x40000028, 97, 154, 156, 241, 380, 369),
    ),
}


def guards(machine: str) -> list[bytes]:
    """Seccomp filters (seccomp(2), classic BPF) that keep the agent's hands off PID 1's priority,
    CPUs and limits; none for a machine that is not listed.

    One user's processes may do that to one another.  A PID 1 that gets no CPU outlives its
    deadlines, SIGKILL from outside too: it has to run in order to die.
    """
    load, equal, mask, answer = 0x20, 0x15, 0x54, 0x06
    allow, deny = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x50000 | errno.EPERM)
    found = []
    for architecture, priority, *by_pid in GUARDED_CALLS.get(machine, ()):
        program = [(load, 0, 0, 4), (equal, 1, 0, architecture), allow]
        # setpriority of process or group 1, or of all of the user's (PRIO_USER is 2).
        for call, place, value in (priority, 1, 1), (priority, 0, 2), *((n, 0, 1) for n in by_pid):
            program += [(load, 0, 0, 0), (mask, 0, 0, 0xBFFFFFFF), (equal, 0, 3, call)]  # and x32's
            program += [(load, 0, 0, 16 + 8 * place), (equal, 0, 1, value), deny]
        found.append(b"".join(struct.pack("=HBBI", *line) for line in (*program, allow)))
    return found


def guard_pid_1(filters: list[bytes]) -> None:
    """Put this process and all that it will start under *filters*, for ever.

    :raises OSError: the kernel has refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    for program in filters:
        content = ctypes.create_string_buffer(program, len(program))
        fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(content))
        set_seccomp, filter_mode, place = 22, 2, ctypes.create_string_buffer(fprog, len(fprog))
        if libc.prctl(set_seccomp, filter_mode, ctypes.addressof(place), 0, 0):
            raise OSError(ctypes.get_errno(), "seccomp")


class OomScore:
    """Makes the agent go first when memory runs out: without PID 1 nobody says what happened.

    Opened before :func:`harden`, which makes the file root's.  Best effort: a kernel that
    forbids it costs a good explanation, no safety.
    """

    def __init__(self) -> None:
        self._fd, self._own = -1, 0
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
            self._own = int(os.read(self._fd, 16))

    def __enter__(self) -> None:
        """What is forked from here on is preferred by the OOM killer."""
        self._write(min(1000, self._own + 500))

    def __exit__(self, *_: object) -> None:
        self._write(self._own)

    def _write(self, value: int) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, b"%d" % value, 0)


def spawn(init: Init) -> tuple[int, dict[int, str]]:
    """Start the agent: own session, null stdin, own output pipes, default signals.

    What fails after the fork is said on the agent's stderr and ends it with 127 (no such
    command) or 126, as in a shell.

    :returns: its pid, and the non-blocking read ends of its two streams.
    """
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_agent(init, out_write, err_write)
    os.close(out_write)
    os.close(err_write)
    for fd in (out_read, err_read):
        # The agent can open its own pipe for reading and empty it between our poll and read.
        os.set_blocking(fd, False)
    return pid, {out_read: "stdout", err_read: "stderr"}


def _become_agent(init: Init, out_write: int, err_write: int) -> None:
    """In the child; ends in exec or _exit.  Every descriptor above 2 is close-on-exec."""
    status, doing = 126, b"enter " + init.cwd
    try:
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(out_write, 1)
        os.dup2(err_write, 2)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(init.cwd)
        doing = b"guard PID 1"
        guard_pid_1(guards(os.uname().machine))
        doing, status = b"run " + init.argv[0], 127
        os.execvpe(init.argv[0], init.argv, init.env)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            status = 126
        why = os.strerror(error.errno or 0).encode()
        os.write(2, b"forge-supervisor: cannot " + doing + b": " + why + b"\n")
    finally:
        os._exit(status)


def complain(sentence: str) -> None:
    """One line on PID 1's own stderr, which is no part of the protocol; lost if nobody reads."""
    with contextlib.suppress(OSError):
        os.set_blocking(2, False)
        os.write(2, f"forge-supervisor: {sentence}\n".encode())


class Phase(enum.Enum):
    """``WAITING → RUNNING → (TERMINATING →) KILLING → FLUSHING``; there is no way back."""

    WAITING = enum.auto()  # for init
    RUNNING = enum.auto()
    TERMINATING = enum.auto()  # SIGTERM sent, the grace runs
    KILLING = enum.auto()  # SIGKILL sent
    FLUSHING = enum.auto()  # all dead; the reader may take the rest


class Supervisor:
    """The event loop: one poll, then everything that is due, nothing of which blocks."""

    harden = staticmethod(harden)

    def __init__(self, oom_score: OomScore) -> None:
        self._oom_score = oom_score
        self._phase = Phase.WAITING
        self._ready_ms = now_ms()
        self._phase_ends_ms = self._ready_ms + INIT_WAIT_MS
        self._code: int | None = None  # the first end decides it
        self._lines = Lines()
        self._outbox = Outbox()
        self._host_open = self._reader_open = True
        self._streams: dict[int, str] = {}
        self._full_since_ms: int | None = None
        self._agent_pid = self._status = self._grace_ms = 0
        self._children = False
        self._deadlines: Deadlines | None = None
        self._wake_read, wake_write = os.pipe()
        for fd in (0, 1, self._wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The kernel keeps signals of default action away from PID 1, but not blocked ones.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def run(self) -> int:
        """Supervise to the end; returns the exit status of the container."""
        self._outbox.control(type="ready", version=1, pid=os.getpid())
        while not self._finished():
            ready = self._wait(now_ms())
            now = now_ms()
            self._reap()
            self._read_agent(ready, now)
            self._advance(now)  # before frames are read: no renewal revives
            self._read_host(ready, now)
            self._look_for_sigterm(now)
            self._advance(now)
            self._write()
        assert self._code is not None
        return self._code

    def _finished(self) -> bool:
        if self._phase is not Phase.FLUSHING:
            return False
        if not self._outbox.head():
            return True
        if self._reader_open and now_ms() < self._phase_ends_ms:
            return False
        if self._code == EXIT_STATUS_WRITTEN:
            self._code = EXIT_STATUS_NOT_READ
        return True

    def _wait(self, now: int) -> set[int]:
        """Sleep until something is due; the descriptors that are ready."""
        due_ms = [now + TICK_MS, self._phase_ends_ms]
        if self._phase is Phase.RUNNING and self._deadlines:
            due_ms[1] = self._deadlines.next()[0]
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._host_open:
            poll.register(0, select.POLLIN)
        if self._reader_open and self._outbox.head():
            poll.register(1, select.POLLOUT)
        if not self._outbox.logs.full:
            self._full_since_ms = None
        elif self._full_since_ms is None:
            self._full_since_ms = now
        if self._full_since_ms is not None and now < self._full_since_ms + HOLD_MS:
            due_ms.append(self._full_since_ms + HOLD_MS)
        else:
            for fd in self._streams:
                poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(max(0, min(due_ms) - now))}

    # What happened

    def _reap(self) -> None:
        _read(self._wake_read, 65_536)
        for _ in range(MAX_REAPED_A_TURN):
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._children = False
                return
            if pid == 0:
                return
            if pid == self._agent_pid:
                self._agent_pid, self._status = 0, status

    def _read_agent(self, ready: set[int], now: int) -> None:
        for fd in [fd for fd in self._streams if fd in ready]:
            data = _read(fd, READ_BYTES)
            if data:
                self._outbox.logs.feed(self._streams[fd], data)
                if self._deadlines:
                    self._deadlines.saw_output(now)
            elif data == b"":
                self._close_stream(fd)

    def _close_stream(self, fd: int) -> None:
        self._outbox.logs.feed(self._streams.pop(fd), b"", final=True)
        os.close(fd)

    def _read_host(self, ready: set[int], now: int) -> None:
        if 0 not in ready:
            return
        data = _read(0, HOST_READ_BYTES)
        if data == b"":
            self._host_open = False  # no end: the lease decides
            if self._phase is Phase.WAITING:
                self._phase_ends_ms = now
        for line in self._lines.feed(data or b""):
            if line == b"" and self._phase is Phase.WAITING:  # the host still prepares
                self._phase_ends_ms = min(now + INIT_WAIT_MS, self._ready_ms + MAX_DURATION_MS)
                self._outbox.control(type="ready", version=1, pid=os.getpid())
                continue
            try:
                self._take(decode_frame(line), now)
            except Refused as refusal:
                self._outbox.refuse(refusal.reason)
                if self._phase is Phase.WAITING:
                    complain(f"cannot accept init: {refusal}")
                    self._code = EXIT_BAD_INIT
                    self._flush(now)

    def _take(self, frame: dict[str, object], now: int) -> None:
        if self._phase is Phase.WAITING:
            self._start(Init(frame), now)
        elif frame["type"] == "lease" and self._deadlines:
            self._deadlines.renew(frame, now)
        elif frame["type"] == "cancel":
            self._cancel(_integer(frame, "graceMs", 0, MAX_DURATION_MS), now)
        else:
            raise Refused("unexpected" if frame["type"] in ("init", "lease") else "unknown_type")

    def _look_for_sigterm(self, now: int) -> None:
        """``docker stop`` and a host that shuts down are a cancel; the agent has no such say."""
        info = signal.sigtimedwait([signal.SIGTERM], 0)
        if info and info.si_pid == 0 <= info.si_code:  # from outside; sigqueue(3) can forge one
            self._cancel(self._grace_ms, now)

    # What follows from it

    def _start(self, init: Init, now: int) -> None:
        self._grace_ms = init.grace_ms
        if now >= self._ready_ms + init.lease_ms:  # init may have been held back on its way
            self._expire("lease", now)
            return
        self._outbox.logs = Logs(init.max_output_bytes)
        with self._oom_score:
            self._agent_pid, self._streams = spawn(init)
        self._children = True
        self._phase = Phase.RUNNING
        self._deadlines = Deadlines(init, self._ready_ms, started_ms=now_ms())
        self._outbox.control(type="started", pid=self._agent_pid)

    def _advance(self, now: int) -> None:
        """Take every step that is due."""
        if self._phase is Phase.WAITING and now >= self._phase_ends_ms:
            self._code = EXIT_NO_INIT
            self._flush(now)
        if self._phase is Phase.RUNNING:
            assert self._deadlines is not None
            which = self._deadlines.expired(now)
            if self._agent_pid == 0:
                self._code = EXIT_STATUS_WRITTEN
                self._kill(now)
            elif which is not None:
                self._expire(which, now)
        if self._phase is Phase.TERMINATING and (not self._children or now >= self._phase_ends_ms):
            self._kill(now)
        if self._phase is Phase.KILLING:
            if now >= self._phase_ends_ms or not (self._children or self._streams):
                self._flush(now)
            elif self._children:
                self._signal_all(signal.SIGKILL)  # also what came in from outside since
        if self._phase is Phase.FLUSHING and now >= self._logs_end_ms:
            self._outbox.logs.abandon()

    def _expire(self, which: str, now: int) -> None:
        self._code = EXIT_EXPIRED[which]
        self._outbox.control(type="expired", which=which)
        self._terminate(self._grace_ms, now)

    def _cancel(self, grace_ms: int, now: int) -> None:
        """End with a grace that the lease does not outlive; a second cancel can only hurry."""
        if self._code is None:
            self._code = EXIT_CANCELLED
            if self._deadlines:
                grace_ms = min(grace_ms, self._deadlines.lease_at_ms - now)
            self._terminate(grace_ms, now)
        elif self._phase is Phase.TERMINATING:
            self._phase_ends_ms = min(self._phase_ends_ms, now + grace_ms)

    def _terminate(self, grace_ms: int, now: int) -> None:
        self._phase, self._phase_ends_ms = Phase.TERMINATING, now + grace_ms
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGCONT)  # a stopped process acts on SIGTERM when it goes on

    def _kill(self, now: int) -> None:
        """Also at once when the agent's main process has ended: what it left has no claim."""
        self._phase, self._phase_ends_ms = Phase.KILLING, now + KILL_WAIT_MS
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        """To every process but this one; :func:`harden` made sure that this is PID 1."""
        with contextlib.suppress(OSError):  # none left, or none of ours: those end with PID 1
            os.kill(-1, number)

    def _flush(self, now: int) -> None:
        for fd in list(self._streams):  # somebody outside of the container holds the other end
            self._close_stream(fd)
        wait_ms = LAST_WORDS_MS
        if self._code == EXIT_STATUS_WRITTEN and self._deadlines:
            wait_ms = max(wait_ms, min(STATUS_FLUSH_MS, self._deadlines.lease_at_ms - now))
            if os.WIFSIGNALED(self._status):
                self._outbox.last(type="exit", signal=os.WTERMSIG(self._status))
            else:
                self._outbox.last(type="exit", code=os.WEXITSTATUS(self._status))
        self._phase, self._phase_ends_ms = Phase.FLUSHING, now + wait_ms
        self._logs_end_ms = now + wait_ms // 2

    def _write(self) -> None:
        try:
            while self._reader_open and self._outbox.head():
                self._outbox.wrote(os.write(1, self._outbox.head()))
        except BlockingIOError:
            pass
        except OSError:  # nobody can read any more; the lease decides
            self._reader_open = False


def _read(fd: int, size_bytes: int) -> bytes | None:
    """What there is; empty at the end; None when there is nothing now."""
    try:
        return os.read(fd, size_bytes)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def main(kind: type[Supervisor] = Supervisor) -> None:
    """Exit with one of the codes above, whatever happens."""
    code = EXIT_INTERNAL
    try:
        close_strays()
        oom_score = OomScore()
        kind.harden()
        code = kind(oom_score).run()
    except Unsafe as error:
        complain(str(error))
    except BaseException as error:  # its message could quote a frame: the place says enough
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        complain(f"internal error: {type(error).__name__}, line {trace and trace.tb_lineno}")
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
