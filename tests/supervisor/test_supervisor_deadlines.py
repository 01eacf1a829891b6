"""Lease, hard wall and idle as arithmetic; the MAC against the host's own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pid1 import KEY, init_frame, lease_frame

import forge_supervisor.supervisor
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_supervisor.supervisor import Deadlines, Init, Refused, lease_mac


def deadlines(ready_ms: int = 0, started_ms: int = 0, **changes: Any) -> Deadlines:
    return Deadlines(Init(init_frame(**changes)), ready_ms, started_ms)


@pytest.mark.requirement("B-70")
def test_the_mac_is_the_protocol_s_test_vector() -> None:
    mac = lease_mac(KEY, "att-1", 7, 3, 60_000, "2026-11-29T14:00:00.000Z")
    assert mac == b"exwTojfD91XuDgiQ/ojCEYNOuOqiA+whj/Cg3ZPGw48="


@pytest.mark.requirement("B-70")
@given(
    st.binary(min_size=32, max_size=32),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", fullmatch=True),
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(1, 28_800_000),
)
def test_the_mac_is_the_host_s(key: bytes, attempt: str, fence: int, seq: int, ttl: int) -> None:
    message = lease_message(attempt, fence, seq, ttl, "2026-11-29T14:00:00Z")
    expected = sign_lease(key, message).encode()
    assert lease_mac(key, attempt, fence, seq, ttl, "2026-11-29T14:00:00Z") == expected


@pytest.mark.requirement("B-70")
def test_a_renewal_counts_from_its_receipt_and_stops_at_the_hard_wall() -> None:
    held = deadlines(leaseMs=1_000, hardWallMs=10_000, idleMs=20_000)
    held.renew(lease_frame(3, 5_000), 999)
    assert held.next() == (5_999, "lease")
    held.renew(lease_frame(4, 100), 2_000)  # sets, so it may also shorten
    assert held.next() == (2_100, "lease")
    held.renew(lease_frame(9, 28_800_000), 2_050)
    assert held.next() == (10_000, "hardWall")
    assert held.lease_at_ms == 10_000


@pytest.mark.requirement("B-70")
def test_no_renewal_revives() -> None:
    held = deadlines(leaseMs=1_000)
    with pytest.raises(Refused) as refusal:
        held.renew(lease_frame(3), 1_000)
    assert refusal.value.reason == "lease_expired"
    assert held.expired(1_000) == "lease"


REFUSED = {
    "other fence": (lease_frame(fence=8), "bad_mac"),
    "other attempt": (lease_frame(attempt_id="att-2"), "bad_mac"),
    "same sequence": (lease_frame(2), "stale_sequence"),
    "old sequence": (lease_frame(1), "stale_sequence"),
    "other ttl": ({**lease_frame(), "ttlMs": 60_001}, "bad_mac"),
    "other sequence": ({**lease_frame(), "sequence": 4}, "bad_mac"),
    "other time": ({**lease_frame(), "issuedAt": "2026-11-29T14:00:00Z"}, "bad_mac"),
    "no mac": ({**lease_frame(), "mac": ""}, "malformed"),
    "cut mac": ({**lease_frame(), "mac": lease_frame()["mac"][:-1]}, "bad_mac"),
    "mac and more": ({**lease_frame(), "mac": lease_frame()["mac"] + "\n"}, "bad_mac"),
    "mac not ASCII": ({**lease_frame(), "mac": "é" * 44}, "malformed"),
    "mac half a pair": ({**lease_frame(), "mac": "\ud800" * 44}, "malformed"),
    "time half a pair": ({**lease_frame(), "issuedAt": "\ud800"}, "malformed"),
    "time too long": ({**lease_frame(), "issuedAt": "2" * 65}, "malformed"),
    "sequence true": ({**lease_frame(), "sequence": True}, "malformed"),
    "sequence float": ({**lease_frame(), "sequence": 3.0}, "malformed"),
    "sequence text": ({**lease_frame(), "sequence": "3"}, "malformed"),
    "sequence negative": ({**lease_frame(), "sequence": -3}, "malformed"),
    "sequence huge": (lease_frame(2**63), "malformed"),
    "ttl zero": (lease_frame(ttl_ms=0), "malformed"),
    "ttl negative": (lease_frame(ttl_ms=-1), "malformed"),
    "ttl over eight hours": (lease_frame(ttl_ms=28_800_001), "malformed"),
    "empty": ({"type": "lease"}, "malformed"),
}


@pytest.mark.requirement("B-70")
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_renewal_changes_nothing(case: str) -> None:
    frame, reason = REFUSED[case]
    held = deadlines(leaseMs=1_000)
    with pytest.raises(Refused) as refusal:
        held.renew(frame, 10)
    assert refusal.value.reason == reason
    assert held.next() == (1_000, "lease")
    held.renew(lease_frame(3), 10)  # nor is its sequence taken
    assert held.lease_at_ms == 60_010


@pytest.mark.requirement("B-70", "B-71")
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5_000), st.integers(0, 900)), max_size=30)
)
def test_a_brute_force_twin_agrees(renewals: list[tuple[int, int, int]]) -> None:
    held = deadlines(leaseMs=3_000, hardWallMs=9_000, idleMs=30_000)
    now, sequence, lease_end = 0, 2, 3_000
    for offered, ttl_ms, step_ms in renewals:
        now += step_ms
        alive = now < lease_end
        if alive and offered > sequence:
            sequence, lease_end = offered, min(now + ttl_ms, 9_000)
            held.renew(lease_frame(offered, ttl_ms), now)
        else:
            with pytest.raises(Refused):
                held.renew(lease_frame(offered, ttl_ms), now)
        assert held.lease_at_ms == lease_end <= 9_000
        assert (held.expired(now) is None) == (now < lease_end)


@pytest.mark.requirement("B-71")
def test_the_first_deadline_names_the_end() -> None:
    held = deadlines(ready_ms=0, started_ms=50, leaseMs=1_000, hardWallMs=2_000, idleMs=600)
    assert held.expired(649) is None
    assert held.expired(650) == "idle"
    held.saw_output(649)
    assert held.expired(999) is None
    assert held.expired(1_000) == "lease"  # from the receipt of init
    held.renew(lease_frame(3, 8_000), 999)
    held.saw_output(1_500)
    assert held.expired(2_049) is None
    assert held.expired(2_050) == "hardWall"  # from the start of the agent
    assert held.expired(9_999) == "hardWall"  # the first one, however late it is looked at


def test_time_is_boot_time(namespaces: None) -> None:
    """In a time namespace the two clocks differ by what suspend would make them differ."""
    source = str(Path(forge_supervisor.supervisor.__file__).parents[1])
    program = (
        f"import sys, time; sys.path.insert(0, {source!r})\n"
        "from forge_supervisor.supervisor import now_ms\n"
        "print(now_ms() // 1000 - int(time.monotonic()))"
    )
    offset = ("unshare", "--time", "--boottime", "500000", "--fork")
    command = [*offset, "/usr/bin/python3", "-I", "-S", "-B", "-c", program]
    ahead_s = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert ahead_s >= 499_999
