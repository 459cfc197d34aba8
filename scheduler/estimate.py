"""How long a request will take, judged by how fast the scheduler has been: to refuse what cannot end in time."""

from dataclasses import dataclass

SMOOTHING = 0.05
"""Weight of the newest step in the running means."""


@dataclass
class Estimate:
    """Running means over steps: seconds a token of a row while nothing but decoding is done, and tokens a second of all
    work."""

    token_s: float | None = None
    tokens_per_s: float | None = None

    def observe(self, rows: int, prompt_tokens: int, generated_tokens: int, step_s: float) -> None:
        """A step of so many rows has been done."""
        if step_s <= 0:
            return
        rate = (prompt_tokens + generated_tokens) / step_s
        self.tokens_per_s = _mean(self.tokens_per_s, rate)
        if not prompt_tokens and generated_tokens:
            self.token_s = _mean(self.token_s, step_s * rows / generated_tokens)

    def seconds(self, ahead_tokens: int, prompt_tokens: int, budget: int) -> float | None:
        """Until a request ends that has so many tokens of others before it, and uses its whole budget.

        None while nothing has been observed: nobody is refused on a guess.
        """
        if self.tokens_per_s is None or self.token_s is None:
            return None
        return (ahead_tokens + prompt_tokens) / self.tokens_per_s + budget * self.token_s


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)
