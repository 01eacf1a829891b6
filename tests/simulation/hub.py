"""The simulated hub: keeps protocol.md's word, forgets nothing, and checks what it is told.

It dispatches attempts under growing fences, renews leases with real MACs, cancels, supersedes,
drains and reaps, and settles what was silent for too long.  Everything replayed is taken in once
per id; a second arrival must be the same message.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from forge_core.errors import HubError, RefusedError
from forge_core.wire.base import parse
from forge_core.wire.codes import FailureCode, Outcome
from forge_core.wire.from_bridge import HUB_METHODS
from forge_core.wire.lease_mac import lease_message, sign_lease
from forge_core.wire.limits import MAX_MESSAGE_BYTES, measured_size_bytes

from .network import HUB, SimulatedConnection
from .remote import URL
from .work import Attempt, Dispatch, Key, offer_of, start_of
from .world import World

KILL_GRACE_MS: Final = 2_000
HEARTBEAT_MS: Final = 10_000
TICK_S: Final = 0.5
MAX_STARTS: Final = 4
MAX_OFFERS: Final = 40
RETRY_S: Final = (2.0, 20.0)
LIVE: Final = frozenset({"offered", "running", "cancelling"})
REPLAYED: Final = {
    "SubmitDispatchEvent",
    "SubmitDispatchResult",
    "SubmitCleanupReport",
    "SubmitPublication",
    "SubmitReapOutcome",
}


class SimulatedHub:
    """See the module.

    :ivar seen: every replayed message that arrived, by method and id, with its first payload.
    :ivar rejected: the ids among them that were rejected.
    :ivar working: whether it still hands out work.
    """

    def __init__(
        self,
        world: World,
        canary: Callable[[str], str],
        branches: Callable[[], Mapping[str, str]],
    ) -> None:
        """``canary`` takes a secret that may be found nowhere, and gives it back.

        :param branches: what the remote is at, when the hub looks.
        """
        self.world = world
        self.rng = world.rng("hub")
        self.attempts: list[Attempt] = []
        self.dispatches: dict[Key, Dispatch] = {}
        self.seen: dict[tuple[str, str], dict[str, Any]] = {}
        self.rejected: set[tuple[str, str]] = set()
        self.settings = {"draining": False, "hostFallbackEnabled": False}
        self.working = True
        self.online: SimulatedConnection | None = None
        self.connections: list[SimulatedConnection] = []
        self._canary = canary
        self._branches = branches
        self._redeemed: set[str] = set()
        self._heard_ms = 0
        self._offers = 0
        world.later(HUB, TICK_S, self._tick)

    # -- what it is asked ------------------------------------------------------------------------

    def connected(self, connection: SimulatedConnection) -> None:
        """A bridge has connected; nothing is said before it has registered."""
        self.connections.append(connection)

    def disconnected(self, connection: SimulatedConnection) -> None:
        """Its attempts live on their leases."""
        if connection in self.connections:
            self.connections.remove(connection)
        if self.online is connection:
            self.online = None

    def call(
        self, connection: SimulatedConnection, method: str, payload: dict[str, Any]
    ) -> dict[str, Any]:
        """Exactly what its model says, or it is a bug of the bridge."""
        try:
            model = parse(HUB_METHODS[method].request, payload, what=method)
        except RefusedError as error:
            self.world.violate("protocol", str(error))
            raise HubError(str(error)) from error
        same = model.to_wire() == payload
        self.world.require(same, "protocol", f"{method} is not what its model says: {payload}")
        size = measured_size_bytes(payload)
        self.world.require(size <= MAX_MESSAGE_BYTES, "protocol", f"{method} has {size} bytes")
        if method != "Heartbeat":
            self.world.note(HUB, f"hears {method} {_brief(payload)}")
        if method != "RegisterRunner" and connection is not self.online:
            raise HubError("register first")
        if method in REPLAYED:
            return self._take_replayed(method, payload)
        answer: dict[str, Any] = getattr(self, f"_on_{method}")(connection, payload)
        return answer

    def _on_RegisterRunner(  # noqa: N802 - named like the method
        self, connection: SimulatedConnection, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        connection.registered_instance = payload["runnerInstanceId"]
        self.online = connection
        self._heard_ms = self.world.now_ms
        return {
            "accepted": True,
            "heartbeatIntervalMs": HEARTBEAT_MS,
            "settings": dict(self.settings),
        }

    def _on_Heartbeat(  # noqa: N802
        self, _connection: SimulatedConnection, _payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._heard_ms = self.world.now_ms
        return {"accepted": True, "settings": dict(self.settings)}

    def _on_ReadAttemptSnapshot(  # noqa: N802
        self, connection: SimulatedConnection, _payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        attempts = [
            {"attemptId": d.attempt.id, "fence": d.fence, "state": d.state}
            for d in self.dispatches.values()
            if d.state in LIVE
            and d.instance_id == connection.registered_instance
            and d.fence == d.attempt.fence
        ]
        return {"accepted": True, "attempts": attempts, "parts": 1}

    def _on_SubmitOfferDecision(  # noqa: N802
        self, _connection: SimulatedConnection, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        dispatch = self.dispatches.get((payload["attemptId"], payload["fence"]))
        assert dispatch is not None, payload
        if payload["decision"] == "rejected":
            if dispatch.state in LIVE and not dispatch.accepted:
                self._end(dispatch, "rejected")
            return {"accepted": True}
        dispatch.accepted = True
        if dispatch.state == "offered":
            self._start(dispatch)
        elif dispatch.state == "ended" and not dispatch.results:
            self._push("Cancel", {**_named(dispatch), "reason": "too late"}, dispatch)
        return {"accepted": True}

    def _on_RedeemSecretGrant(  # noqa: N802
        self, _connection: SimulatedConnection, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        handle = payload["handle"]
        if handle in self._redeemed:
            return {"accepted": False, "reason": "spent"}
        self._redeemed.add(handle)
        return {
            "accepted": True,
            "secrets": {"DEPLOY_KEY": self._canary(f"canary-{self.rng.getrandbits(96):x}")},
        }

    def _on_RedeemPublishGrant(  # noqa: N802
        self, _connection: SimulatedConnection, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        dispatch = self.dispatches[payload["attemptId"], payload["fence"]]
        handle = payload["handle"]
        stale = dispatch.fence < dispatch.attempt.fence or dispatch.state != "running"
        if stale or handle in self._redeemed or payload["branch"] != dispatch.attempt.branch:
            return {"accepted": False, "reason": "spent"}
        self._redeemed.add(handle)
        dispatch.redeemed = payload["resultCommit"]
        return {
            "accepted": True,
            "repositoryUrl": URL,
            "username": "forge",
            "credential": self._canary(f"canary-{self.rng.getrandbits(96):x}"),
            "expiresAt": "2099-11-29T14:00:00.000Z",
        }

    def _take_replayed(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        identity, body = _identity(method, payload)
        earlier = self.seen.get((method, identity))
        if earlier is not None:
            same = {**earlier, **_varying(body)} == {**body, **_varying(body)}
            self.world.require(same, "exactly once", f"{method} {identity} came in two versions")
            rejected = (method, identity) in self.rejected
            return _ack("rejected" if rejected else "duplicate")
        self.seen[method, identity] = body
        reason = self._judge(method, payload)
        if reason is not None:
            self.rejected.add((method, identity))
            return _ack("rejected", reason)
        return _ack("persisted")

    def _judge(self, method: str, payload: dict[str, Any]) -> str | None:
        """Why it is rejected; None: it is taken in."""
        if method == "SubmitReapOutcome":
            return None
        dispatch = self.dispatches.get((payload["attemptId"], payload["fence"]))
        assert dispatch is not None, payload
        mine = dispatch.instance_id == payload["resourceRunnerInstanceId"]
        self.world.require(mine, "protocol", f"{method} of another instance: {payload}")
        if method == "SubmitCleanupReport":
            return None
        if dispatch.fence < dispatch.attempt.fence:
            return "stale_fence"
        if method == "SubmitPublication":
            self._take_publication(dispatch, payload)
            return None
        if method == "SubmitDispatchEvent":
            if "sequence" in payload:
                known = dispatch.events.setdefault(payload["sequence"], payload["eventId"])
                once = known == payload["eventId"]
                self.world.require(once, "exactly once", f"two events of one sequence: {payload}")
            return None
        self._take_result(dispatch, payload)
        return None

    def _take_publication(self, dispatch: Dispatch, payload: dict[str, Any]) -> None:
        require = self.world.require
        same = payload["resultCommit"] == dispatch.redeemed
        require(same, "published", f"{dispatch.id}: no credential was given out for {payload}")
        require(not dispatch.results, "published", f"{dispatch.id} is told after its result")
        dispatch.publication = payload["outcome"]

    def _take_result(self, dispatch: Dispatch, payload: dict[str, Any]) -> None:
        verdict = (payload["outcome"], payload.get("failureCode"))
        for earlier in dispatch.results.values():
            kept = (earlier["outcome"], earlier.get("failureCode")) == verdict
            self.world.require(
                kept, "outcome", f"{dispatch.id} was {earlier['outcome']}, is {verdict} now"
            )
        summary = payload.get("summary", "")
        known = payload.get("failureCode") != FailureCode.INTERNAL_ERROR or "is full" in summary
        self.world.require(known, "outcome", f"{dispatch.id}: {summary}")
        owes = dispatch.attempt.publishes and "resultCommit" in payload
        paid = dispatch.publication in ("pushed", "already_published")
        self.world.require(paid or not owes, "published", f"{dispatch.id} succeeds unpublished")
        dispatch.results[payload["revision"]] = payload
        if dispatch.state != "ended":
            self._end(dispatch, payload["outcome"])
            if payload["outcome"] in (Outcome.SUCCEEDED, Outcome.EXPIRED) or (
                payload["outcome"] == Outcome.CANCELLED and dispatch.cancelled
            ):
                dispatch.attempt.done = True

    # -- what it does by itself ------------------------------------------------------------------

    def _tick(self) -> None:
        self.world.later(HUB, TICK_S, self._tick)
        now = self.world.now_ms
        for dispatch in tuple(self.dispatches.values()):
            if dispatch.state == "offered":
                if now >= dispatch.offered_ms + dispatch.offer["expiresInMs"]:
                    self._end(dispatch, "unanswered")
            elif dispatch.state in LIVE:
                silent_ms = dispatch.sent_ms + 2 * dispatch.attempt.ttl_ms + KILL_GRACE_MS
                if now >= silent_ms:
                    self._end(dispatch, "silent")
                    dispatch.attempt.done = dispatch.cancelled
                elif now >= dispatch.sent_ms + dispatch.attempt.ttl_ms // 3:
                    self._renew(dispatch, now)
        if self.working and self.online is not None:
            for attempt in self.attempts:
                if not attempt.done and self.world.now_s >= attempt.next_offer_s:
                    self.offer(attempt)

    def offer(self, attempt: Attempt) -> None:
        """Dispatch it under the next fence, to whoever is online."""
        assert self.online is not None
        assert self.online.registered_instance is not None
        if attempt.starts >= MAX_STARTS or attempt.fence >= MAX_OFFERS:
            attempt.done = True
            return
        given_out = {d.redeemed for d in self.dispatches.values() if d.attempt is attempt}
        if self._branches().get(attempt.branch) in given_out - {None}:
            # The hub looks at the remote itself before it sends an attempt out again.
            attempt.done = True
            return
        attempt.fence += 1
        attempt.next_offer_s = math.inf
        self._offers += 1
        offer = offer_of(
            attempt,
            f"offer-{self._offers}",
            self.online.registered_instance,
            self.rng.choice((5_000, 20_000, 60_000)),
        )
        dispatch = Dispatch(
            attempt, attempt.fence, self.online.registered_instance, offer, self.world.now_ms
        )
        self.dispatches[dispatch.id] = dispatch
        self._push("Offer", offer, dispatch)

    def cancel(self, dispatch: Dispatch) -> None:
        """A person wants it to end."""
        dispatch.cancelled = True
        if dispatch.state == "running":
            dispatch.state = "cancelling"
        elif dispatch.state == "offered":
            self._end(dispatch, "cancelled")
            dispatch.attempt.done = True
        self._push("Cancel", {**_named(dispatch), "reason": "cancelled"}, dispatch)

    def supersede(self, dispatch: Dispatch) -> None:
        """Raise the fence while the older run lives: the runner must end that."""
        if self.online is not None:
            self._end(dispatch, "superseded")
            self.offer(dispatch.attempt)

    def forget(self, dispatch: Dispatch) -> None:
        """It is in no snapshot any more, and nobody tells the runner."""
        self._end(dispatch, "forgotten")
        dispatch.attempt.done = True

    def start_unasked(self, dispatch: Dispatch) -> None:
        """A start that does not wait for the decision."""
        if dispatch.state == "offered":
            self._start(dispatch)

    def drain(self, draining: bool) -> None:
        """Profile Settings."""
        self._set("draining", draining)

    def allow_host(self, allowed: bool) -> None:
        """Likewise: Host fallback."""
        self._set("hostFallbackEnabled", allowed)

    def _set(self, name: str, value: bool) -> None:
        self.settings[name] = value
        self.world.note(HUB, f"{name}: {value}")
        if self.online is not None:
            self.online.push("RunnerSettings", {"settings": dict(self.settings)})

    def reap(self, number: int, runner_id: str, dispatch: Dispatch | None) -> None:
        """The Reap action, of everything or of one dispatch."""
        if self.online is None:
            return
        scope = (
            {"scope": "orphans"} if dispatch is None else {**_named(dispatch), "scope": "attempt"}
        )
        self.online.push(
            "Reap",
            {
                "requestId": f"reap-{number}",
                "runnerId": runner_id,
                "runnerInstanceId": self.online.registered_instance,
                **scope,
            },
        )

    def live(self) -> list[Dispatch]:
        """What it believes to be offered or running."""
        return [d for d in self.dispatches.values() if d.state in LIVE]

    def _start(self, dispatch: Dispatch) -> None:
        attempt = dispatch.attempt
        dispatch.state, dispatch.sent_ms = "running", self.world.now_ms
        attempt.starts += 1
        dispatch.key = self.rng.randbytes(32)
        key = self._canary(base64.b64encode(dispatch.key).decode())
        dispatch.start = start_of(dispatch, key)
        self._push("Start", dispatch.start, dispatch)

    def _renew(self, dispatch: Dispatch, now: int) -> None:
        heard = now - self._heard_ms < max(dispatch.attempt.ttl_ms, 2 * HEARTBEAT_MS)
        if dispatch.cancelled or not dispatch.accepted or not heard or self.online is None:
            return
        if self.online.registered_instance != dispatch.instance_id:
            return
        dispatch.lease_sequence += 1
        dispatch.sent_ms = now
        ttl_ms, at = dispatch.attempt.ttl_ms, self.world.utc()
        message = lease_message(*dispatch.id, dispatch.lease_sequence, ttl_ms, at)
        update = {
            **_named(dispatch),
            "sequence": dispatch.lease_sequence,
            "ttlMs": ttl_ms,
            "issuedAt": at,
            "mac": sign_lease(dispatch.key, message),
        }
        self._push("LeaseUpdate", update, dispatch)

    def _push(self, target: str, payload: dict[str, Any], dispatch: Dispatch) -> None:
        """Only to the instance that it is meant for."""
        online = self.online
        if online is not None and online.registered_instance == dispatch.instance_id:
            online.push(target, payload)

    def _end(self, dispatch: Dispatch, why: str) -> None:
        dispatch.state = "ended"
        if dispatch.fence == dispatch.attempt.fence:
            pause_s = self.rng.uniform(*RETRY_S)
            dispatch.attempt.next_offer_s = self.world.now_s + pause_s
        self.world.note(HUB, f"ends {dispatch.id}: {why}")


def _named(dispatch: Dispatch) -> dict[str, Any]:
    return {"attemptId": dispatch.attempt.id, "fence": dispatch.fence}


def _identity(method: str, payload: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What makes it the same message again, and what of it may not change."""
    match method:
        case "SubmitDispatchEvent":
            return payload["eventId"], payload
        case "SubmitDispatchResult":
            return f"{payload['attemptId']}.{payload['fence']}.r{payload['revision']}", payload
        case "SubmitCleanupReport":
            return f"{payload['reportId']}.{payload['part']}", payload
        case "SubmitPublication":
            return f"{payload['attemptId']}.{payload['fence']}.publication", payload
        case _:
            return payload["requestId"], payload


def _varying(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The reporting instance is stamped at each send; nobody compares what a pass has counted."""
    names = ("runnerInstanceId", "removed", "absent", "failed", "degradedReservationCount")
    return {name: payload[name] for name in names if name in payload}


def _ack(disposition: str, reason: str | None = None) -> dict[str, Any]:
    accepted = disposition != "rejected"
    ack: dict[str, Any] = {"accepted": accepted, "disposition": disposition}
    return ack if reason is None else {**ack, "reason": reason}


def _brief(payload: Mapping[str, Any]) -> str:
    names = ("attemptId", "fence", "decision", "reasonCode", "sequence", "type", "revision")
    more = ("outcome", "failureCode", "trigger", "requestId")
    return " ".join(str(payload[name]) for name in (*names, *more) if name in payload)
