"""When a row ends. Decided on ids, row by row; only a user's stop strings look at text."""

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.model.stop_reason import StopReason


@dataclass(frozen=True)
class StopRules:
    """The rules of one request on one model. `room` is how many tokens it may generate before the window is full
    (None: the window slides)."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    max_tokens: int
    min_tokens: int
    room: int | None

    @property
    def budget(self) -> int:
        """The most tokens the row can generate."""
        return self.max_tokens if self.room is None else min(self.max_tokens, self.room)

    def blocked(self, generated: int) -> tuple[int, ...]:
        """Ids that must not be chosen yet, because they would end the row before `min_tokens`."""
        return tuple(self.eos_ids | self.stop_ids) if generated < self.min_tokens else ()

    def goes_on(self, token_id: int) -> bool:
        """Whether a row may go on behind this token."""
        return token_id not in self.eos_ids and token_id not in self.stop_ids

    def decide(self, token_id: int, generated: int) -> StopReason | None:
        """Why the row ends with `token_id`, its `generated`-th token (from 1); None when it goes on.

        A cap is a cap whatever stands there, so `budget` wins over `window`; EOS and stop ids win over both.
        """
        if token_id in self.eos_ids:
            return "eos"
        if token_id in self.stop_ids:
            return "stop"
        if generated >= self.max_tokens:
            return "budget"
        if self.room is not None and generated >= self.room:
            return "window"
        return None


class StopStrings:
    """Watches streamed text for stop strings and holds back what may turn out to be the start of one."""

    def __init__(self, stops: Sequence[str], keep: bool) -> None:
        self._stops, self._keep = stops, keep
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Text that may leave now. Sets `matched` at the match that is complete first (of those that end together, the
        longest), so that the cut does not depend on how the text was divided; nothing behind it ever leaves."""
        if not self._stops or self.matched:
            return "" if self.matched else text
        self._held += text
        matches = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            at, stop = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.matched = True
            leaving, self._held = self._held[: at + len(stop) if self._keep else at], ""
            return leaving
        kept = self._longest_start()
        leaving, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return leaving

    def flush(self) -> str:
        """What was held back, once the row ended without a match."""
        leaving, self._held = self._held, ""
        return leaving

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that is a start of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
