"""What the tries of a preflight come to: shown, failed, or not seen this time (B-51)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge_core.errors import ForgeError, RetryableError


@dataclass(frozen=True, slots=True)
class Proofs:
    """What parts have shown of themselves, by check id.

    :param shown: evidence of what works.
    :param failed: why something could not be shown, though it is configured.
    :param unseen: why something could not be tried, which another try may see; no verdict.
    """

    shown: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def ended_by(cls, error: ForgeError, *checks: str) -> Proofs:
        """What a try of these checks says that ended with an error."""
        why = dict.fromkeys(checks, str(error))
        return cls(unseen=why) if isinstance(error, RetryableError) else cls(failed=why)

    def __or__(self, other: Proofs) -> Proofs:
        """Both."""
        return Proofs(
            {**self.shown, **other.shown},
            {**self.failed, **other.failed},
            {**self.unseen, **other.unseen},
        )
