"""The lease on the host: three deadlines, and renewals that are believed only with their MAC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core import lease as leases
from forge_core.lease import Deadline, Lease, Refusal
from forge_core.wire.codes import FailureCode
from forge_core.wire.from_hub import MAX_WALL_MS, LeaseUpdate
from forge_core.wire.lease_mac import lease_message, sign_lease, verify_lease

KEY = bytes(range(32))
ISSUED_AT = "2026-11-29T14:00:00.000Z"


def granted(**changes: Any) -> Lease:
    arguments = {"ttl_ms": 1_000, "hard_wall_ms": 5_000, "idle_ms": 500, "now_ms": 0, **changes}
    return leases.grant(attempt_id="att-1", fence=7, key=KEY, sequence=0, **arguments)


def renewal(sequence: int, ttl_ms: int = 1_000, **changes: Any) -> LeaseUpdate:
    mac = sign_lease(KEY, lease_message("att-1", 7, sequence, ttl_ms, ISSUED_AT))
    update = LeaseUpdate(
        attempt_id="att-1", fence=7, sequence=sequence, ttl_ms=ttl_ms, issued_at=ISSUED_AT, mac=mac
    )
    return update.model_copy(update=changes)


@pytest.mark.requirement("B-70")
def test_the_vector_of_the_protocol() -> None:
    message = lease_message("att-1", 7, 3, 60_000, ISSUED_AT)
    assert message == b"forge-lease-v1\natt-1\n7\n3\n60000\n2026-11-29T14:00:00.000Z"
    assert sign_lease(KEY, message) == "exwTojfD91XuDgiQ/ojCEYNOuOqiA+whj/Cg3ZPGw48="


@pytest.mark.requirement("B-70")
@given(st.text(max_size=60))
def test_no_other_text_is_the_mac(mac: str) -> None:
    message = lease_message("att-1", 7, 3, 60_000, ISSUED_AT)
    assert verify_lease(KEY, message, mac) == (mac == sign_lease(KEY, message))


@pytest.mark.requirement("B-70")
def test_a_mac_has_one_spelling() -> None:
    message = lease_message("att-1", 7, 3, 60_000, ISSUED_AT)
    mac = sign_lease(KEY, message)
    assert verify_lease(KEY, message, mac)
    # The last base64 digit carries two bits that decode to nothing.
    for other in (mac[:-2] + "9=", mac + "\n", mac + "=", mac[:-1], " " + mac, mac.rstrip("=")):
        assert not verify_lease(KEY, message, other)


@pytest.mark.requirement("B-70")
@pytest.mark.parametrize(
    ("update", "refusal"),
    [
        (renewal(1, attempt_id="att-2"), Refusal.WRONG_ATTEMPT),
        (renewal(1, fence=6), Refusal.WRONG_ATTEMPT),
        (renewal(1, fence=8), Refusal.WRONG_ATTEMPT),
        (renewal(1, mac=renewal(2).mac), Refusal.WRONG_MAC),
        (renewal(1).model_copy(update={"ttl_ms": 2_000}), Refusal.WRONG_MAC),
        (renewal(1, issued_at="2026-11-29T14:00:00Z"), Refusal.WRONG_MAC),
        (renewal(1, mac=""), Refusal.WRONG_MAC),
        (renewal(1, mac="é"), Refusal.WRONG_MAC),
        (renewal(0), Refusal.OLD_SEQUENCE),
    ],
)
def test_a_refused_renewal_changes_nothing(update: LeaseUpdate, refusal: Refusal) -> None:
    lease = granted()
    assert leases.renew(lease, update, 10) == (lease, refusal)


@pytest.mark.requirement("B-70")
def test_no_renewal_revives_an_expired_lease() -> None:
    lease = granted()
    renewed, refusal = leases.renew(lease, renewal(1), 999)
    assert (renewed.deadline_ms, refusal) == (1_999, None)
    assert leases.renew(lease, renewal(1), 1_000) == (lease, Refusal.EXPIRED)


@pytest.mark.requirement("B-70")
def test_a_renewed_lease_runs_from_the_receipt_however_long_the_renewal_waited() -> None:
    renewed, refusal = leases.renew(granted(), renewal(1), 900, received_ms=300)
    assert (renewed.deadline_ms, refusal) == (1_300, None)
    late, refusal = leases.renew(granted(), renewal(1), 1_000, received_ms=999)
    assert (late, refusal) == (granted(), Refusal.EXPIRED)


@pytest.mark.requirement("B-70")
def test_a_sequence_is_accepted_once() -> None:
    lease, refusal = leases.renew(granted(), renewal(5), 10)
    assert refusal is None
    assert leases.renew(lease, renewal(5), 11) == (lease, Refusal.OLD_SEQUENCE)
    assert leases.renew(lease, renewal(4), 11) == (lease, Refusal.OLD_SEQUENCE)
    assert leases.renew(lease, renewal(2**63 - 1), 11)[1] is None


@pytest.mark.requirement("B-36", "B-70")
def test_never_past_the_hard_wall() -> None:
    lease = leases.agent_started(granted(ttl_ms=9_000), 100)
    assert lease.deadline_ms == lease.hard_wall_at_ms == 5_100
    lease = replace(lease, idle_at_ms=None)
    renewed, refusal = leases.renew(lease, renewal(1, ttl_ms=60_000), 5_099)
    assert (renewed.deadline_ms, refusal) == (5_100, None)
    assert renewed.expired(5_100) is Deadline.HARD_WALL


@pytest.mark.requirement("B-36", "B-71")
def test_a_second_start_moves_no_deadline() -> None:
    lease = leases.agent_started(granted(), 100)
    assert leases.agent_started(lease, 200) == lease


@pytest.mark.requirement("B-36")
def test_nothing_runs_longer_than_eight_hours() -> None:
    lease = granted(hard_wall_ms=10 * MAX_WALL_MS, idle_ms=10 * MAX_WALL_MS)
    assert (lease.hard_wall_ms, lease.idle_ms) == (MAX_WALL_MS, MAX_WALL_MS)
    assert MAX_WALL_MS == 8 * 3_600_000


@pytest.mark.requirement("B-71")
def test_each_deadline_has_its_code_and_ties_have_an_order() -> None:
    assert [d.failure_code for d in Deadline] == [
        FailureCode.LEASE_EXPIRED,
        FailureCode.HARD_WALL_EXPIRED,
        FailureCode.IDLE_EXPIRED,
    ]
    tie = replace(granted(), hard_wall_at_ms=1_000, idle_at_ms=1_000)
    assert tie.expired(1_000) is Deadline.HARD_WALL
    assert replace(tie, hard_wall_at_ms=None).expired(1_000) is Deadline.LEASE
    assert tie.expired(999) is None


def test_the_key_does_not_show() -> None:
    assert KEY.hex() not in repr(granted())
    assert repr(KEY) not in repr(granted())


@dataclass
class Timeline:
    """The lease once more, naively: what may still happen is computed from what has happened."""

    deadline_ms: int
    started_ms: int | None = None
    spoke_ms: int = 0
    ended: bool = False
    sequence: int = 0
    dead: Deadline | None = None

    def limits(self) -> list[tuple[int, int, Deadline]]:
        limits = [(self.deadline_ms, 1, Deadline.LEASE)]
        if self.started_ms is not None:
            limits.append((self.started_ms + 5_000, 0, Deadline.HARD_WALL))
            if not self.ended:
                limits.append((self.spoke_ms + 500, 2, Deadline.IDLE))
        return limits

    def look(self, now_ms: int) -> Deadline | None:
        at_ms, _, which = min(self.limits())
        return which if now_ms >= at_ms else None


happenings = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 100, 250, 499, 500, 700]),
        st.sampled_from(["renew", "replay", "forged", "start", "output", "end", "tick"]),
        st.integers(1, 6_000),
    ),
    max_size=25,
)


@pytest.mark.requirement("B-70", "B-71", "B-72")
@given(happenings)
def test_equals_a_naive_timeline(sequence: list[tuple[int, str, int]]) -> None:
    lease, twin, now_ms = granted(), Timeline(deadline_ms=1_000), 0
    for wait_ms, what, ttl_ms in sequence:
        now_ms += wait_ms
        assert lease.expired(now_ms) is twin.look(now_ms)
        if twin.look(now_ms) is not None:
            number = twin.sequence + 1
            assert leases.renew(lease, renewal(number), now_ms) == (lease, Refusal.EXPIRED)
            assert leases.output_seen(lease, now_ms).expired(now_ms) is twin.look(now_ms)
            return
        lease = happen(lease, twin, what, ttl_ms, now_ms)
        assert lease.next_deadline() == (min(twin.limits())[0], min(twin.limits())[2])


def happen(lease: Lease, twin: Timeline, what: str, ttl_ms: int, now_ms: int) -> Lease:
    wall_ms = None if twin.started_ms is None else twin.started_ms + 5_000
    match what:
        case "renew":
            twin.sequence += 1
            twin.deadline_ms = min(now_ms + ttl_ms, wall_ms or now_ms + ttl_ms)
            lease, refusal = leases.renew(lease, renewal(twin.sequence, ttl_ms), now_ms)
            assert refusal is None
        case "replay" | "forged":
            number = twin.sequence if what == "replay" else twin.sequence + 1
            update = renewal(number, ttl_ms)
            if what == "forged":
                update = update.model_copy(update={"ttl_ms": ttl_ms + 1})
            refused, refusal = leases.renew(lease, update, now_ms)
            assert (refused, refusal is None) == (lease, False)
        case "start" if not twin.ended:
            lease = leases.agent_started(lease, now_ms)
            if twin.started_ms is None:
                twin.started_ms = twin.spoke_ms = now_ms
                twin.deadline_ms = min(twin.deadline_ms, now_ms + 5_000)
        case "output":
            lease = leases.output_seen(lease, now_ms)
            twin.spoke_ms = now_ms
        case "end" if twin.started_ms is not None:
            lease = leases.agent_ended(lease)
            twin.ended = True
    return lease
