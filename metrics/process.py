"""The process that the scheduler is in: memory, CPU time and files, the garbage collector, and which Python it is."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, Metric, PlatformCollector, ProcessCollector
from prometheus_client.registry import Collector


class _Process(Collector):
    """prometheus_client's own collectors as one that describes itself, so that a page may be asked for its names."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._own)

    def collect(self) -> Iterable[Metric]:
        """`process_*` (where there is a /proc), `python_info` and `python_gc_*`."""
        return self._own.collect()

    def describe(self) -> Iterable[Metric]:
        """The names that the registry holds for us."""
        return self.collect()


def register_process(registry: CollectorRegistry) -> None:
    """Add the metrics of this process, which tell of all that runs in it: for the registry of a program of one's own.

    Raises `ValueError` where the registry has them.
    """
    registry.register(_Process())
