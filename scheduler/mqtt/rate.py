"""How fast something grows."""


class Rate:
    """Growth a second of a running total, over `window_s` or more; for whoever asks at moments of their own."""

    def __init__(self, now_s: float, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._measured_at = now_s
        self._total = 0
        self._value = 0.0

    def measure(self, now_s: float, total: int) -> float:
        """The rate since the last measurement; until a window has passed, what was measured last."""
        elapsed_s = now_s - self._measured_at
        if elapsed_s >= self._window_s:
            self._value = round((total - self._total) / elapsed_s, 1)
            self._measured_at, self._total = now_s, total
        return self._value
