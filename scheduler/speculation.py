"""Prompt-lookup speculation: draft the next tokens of a lone row from what it has said; its own draws decide.

A step's time at one row is the reading of the weights, so a few drafts behind the newest token are computed almost for
nothing. Each is compared with the token that the row draws at its place: while they agree, the next draw counts too.
Logits and draws are those of ordinary steps, so a draft changes no bit (the idea: A. Saxena, "Prompt Lookup Decoding",
2023).
"""

from collections.abc import Sequence

TILE_TOKENS = 6
"""Tokens of all rows that one step computes for little more than one: the tile of the integer product."""
MOST_READ = 1_000
"""Ids that one look takes in: half a millisecond of the event loop. A long prompt takes several."""
_GRAMS = (3, 2)
"""So many of the last tokens must have stood together before; the longer match is the better guess."""


def most_drafts(decoding_rows: int, limit: int) -> int:
    """Drafts that each decoding row may bring along: none where the rows fill the step by themselves."""
    return min(limit, TILE_TOKENS // decoding_rows - 1) if 0 < decoding_rows <= TILE_TOKENS else 0


class PromptLookup:
    """The places of one row's ids by the ids before them; grows with the row."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._read = 0
        self._trust = 1

    def drafts(self, ids: Sequence[int], most: int) -> list[int]:
        """At most `most` ids that may follow `ids`: what followed the latest earlier place that reads the same."""
        most = min(most, self._trust)
        if most < 1:
            return []
        newly_read = min(len(ids), self._read + MOST_READ)
        for end in range(self._read, newly_read):  # not yet the end of `ids`, which would find itself
            for length in _GRAMS:
                if end >= length:
                    self._places[tuple(ids[end - length : end])] = end
        self._read = newly_read
        if newly_read < len(ids):
            return []
        for length in _GRAMS:
            place = self._places.get(tuple(ids[-length:])) if len(ids) >= length else None
            if place is not None:
                period = len(ids) - place  # beyond the end it goes on as it began: a loop
                return [ids[place + i % period] for i in range(most)]
        return []

    def told(self, drafted: int, accepted: int) -> None:
        """How the drafts of a step went: more after all were right, one after none was."""
        self._trust = max(self._trust, 2 * drafted) if accepted == drafted else max(1, accepted)
