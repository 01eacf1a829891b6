"""What a check found, in the one form that people, programs and the advertisement share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

EXIT_READY: Final = 0
EXIT_BLOCKED: Final = 1
EXIT_COULD_NOT_LOOK: Final = 2


class Verdict(StrEnum):
    """What a finding means for the runner."""

    PASS = "pass"  # noqa: S105 - a verdict, not a secret
    WARN = "warn"
    BLOCK_REQUIRED = "block_required"
    """``sandbox_required`` cannot be met; other policies can."""

    BLOCK_ALL = "block_all"
    """No attempt may run in a container here."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One finding.

    :param id: stable; also the blocker's code when the verdict blocks (B-51).
    :param looked_at: where the evidence was read.
    :param evidence: what was seen there, in one sentence.
    :param remedy: a command or a setting that mends it; None where there is nothing to mend.
    :param looked: False where the evidence could not be had, so that the verdict is a caution.
    """

    id: str
    title: str
    looked_at: str
    verdict: Verdict
    evidence: str
    remedy: str | None = None
    looked: bool = True

    @property
    def blocks(self) -> bool:
        """Whether it stands in the way of ``sandbox_required``."""
        return self.verdict in {Verdict.BLOCK_REQUIRED, Verdict.BLOCK_ALL}

    @property
    def blocks_all(self) -> bool:
        """Whether it stands in the way of every container."""
        return self.verdict is Verdict.BLOCK_ALL


@dataclass(frozen=True, slots=True)
class Check:
    """What is looked at, before it has been looked at."""

    id: str
    title: str
    looked_at: str

    def passed(self, evidence: str) -> CheckResult:
        """Seen, and good."""
        return self._result(Verdict.PASS, evidence)

    def warns(self, evidence: str, remedy: str) -> CheckResult:
        """Seen, and worth knowing."""
        return self._result(Verdict.WARN, evidence, remedy)

    def _result(self, verdict: Verdict, evidence: str, remedy: str | None = None) -> CheckResult:
        return CheckResult(self.id, self.title, self.looked_at, verdict, evidence, remedy)


@dataclass(frozen=True, slots=True)
class Gate(Check):
    """A check that may stand in the way; those of a runner are :class:`Blocker`s."""

    def blocks_required(self, evidence: str, remedy: str) -> CheckResult:
        """Seen: ``sandbox_required`` cannot be met."""
        return self._result(Verdict.BLOCK_REQUIRED, evidence, remedy)

    def blocks_all(self, evidence: str, remedy: str) -> CheckResult:
        """Seen: no attempt may run in a container here."""
        return self._result(Verdict.BLOCK_ALL, evidence, remedy)

    def unseen(self, why: str, remedy: str) -> CheckResult:
        """It could not be looked at, so nothing runs on the strength of it."""
        return CheckResult(
            self.id, self.title, self.looked_at, Verdict.BLOCK_ALL, why, remedy, looked=False
        )


def exit_code(results: tuple[CheckResult, ...]) -> int:
    """0: nothing blocks; 1: something does; 2: the evidence could not be had."""
    if not all(result.looked for result in results):
        return EXIT_COULD_NOT_LOOK
    return EXIT_BLOCKED if any(result.blocks for result in results) else EXIT_READY
