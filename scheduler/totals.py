"""Running totals of all steps, as `Scheduler.statistics()` reports them."""

from dataclasses import asdict, dataclass
from typing import Any

from drumline.scheduler.step import StepReport


@dataclass
class StepTotals:
    """Sums since the scheduler started; times in seconds."""

    finished: int = 0
    steps: int = 0
    row_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    padded_cells: int = 0
    real_cells: int = 0
    forward_s: float = 0.0
    sample_s: float = 0.0
    step_s: float = 0.0

    def add(self, report: StepReport, generated: int, step_s: float) -> None:
        """Count one step."""
        self.steps += 1
        self.row_steps += len(report.outcomes)
        self.prompt_tokens += report.prompt_tokens
        self.generated_tokens += generated
        self.padded_cells += report.padded_cells
        self.real_cells += report.real_cells
        self.forward_s += report.forward_s
        self.sample_s += report.sample_s
        self.step_s += step_s

    def as_dict(self) -> dict[str, Any]:
        """The sums by name."""
        return asdict(self)
