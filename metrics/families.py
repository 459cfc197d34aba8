"""The families of a registry, as one collector, and who uses them."""

import re
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, Metric
from prometheus_client import Histogram as PlainHistogram
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString

from drumline.metrics.definitions import COUNTERS, GAUGES, HISTOGRAMS, INFOS, PREFIX, Definition

EXEMPLAR_LABEL = "job_id"
PLAIN_ID = re.compile(r"[\w./:@-]+")
MAX_EXEMPLAR_CHARACTERS = 128
"""Of the names and values of its labels together, as OpenMetrics 1.0 has it."""


class Histogram(PlainHistogram):
    """A histogram that takes one value many times at the price of once, and is read at a third of the library's.

    Most of a page are buckets: the labels of each are made once, not at each scrape.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._series = dict(zip(self._labelnames, self._labelvalues, strict=True))
        bounds: list[str] = [floatToGoString(bound) for bound in self._upper_bounds]  # type: ignore[no-untyped-call]
        self._bucket_series = [self._series | {"le": bound} for bound in bounds]

    def collect(self) -> Iterable[Metric]:
        """Every series, without `_created`."""
        metric = Metric(self._name, self._documentation, "histogram")
        with self._lock:
            children = cast("list[Histogram]", list(self._metrics.values()))
        metric.samples = [sample for child in children for sample in child._told()]
        return [metric]

    def _told(self) -> Iterator[Sample]:
        name, below = self._name + "_bucket", 0.0
        for bucket, series in zip(self._buckets, self._bucket_series, strict=True):
            below += bucket.get()
            yield Sample(name, series, below, None, bucket.get_exemplar())
        yield Sample(self._name + "_count", self._series, below)
        yield Sample(self._name + "_sum", self._series, self._sum.get())

    def observe_times(self, amount: float, times: int, job_id: str) -> None:
        """Count `amount` so many times; its bucket shows the job from now on."""
        bucket = self._buckets[bisect_left(self._upper_bounds, amount)]
        self._sum.inc(amount * times)
        bucket.inc(times)
        labels = exemplar(job_id)
        if labels is not None:
            bucket.set_exemplar(Exemplar(labels, amount, time.time()))


def exemplar(job_id: str) -> dict[str, str] | None:
    """The labels of an exemplar; None for an id that is too long for one, or would need escapes, which not every reader
    of exemplars takes back."""
    fits = len(EXEMPLAR_LABEL) + len(job_id) <= MAX_EXEMPLAR_CHARACTERS
    return {EXEMPLAR_LABEL: job_id} if fits and PLAIN_ID.fullmatch(job_id) else None


Family = Gauge | Counter | Histogram | Info
_K = TypeVar("_K")
_V = TypeVar("_V")


class Families(Collector):
    """All metric families of one registry, as one collector.

    One collector registers wholly or not at all, and it may do what the registry forbids two collectors: hold both a
    counter `prompt_tokens_total` and a histogram `prompt_tokens`, whose family names in OpenMetrics are the same.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Of the schedulers that use them now."""
        self.gauges = {name: Gauge(PREFIX + name, of.help, _labels(of), registry=None) for name, of in GAUGES.items()}
        self.counters = {
            name: Counter(PREFIX + name, of.help, _labels(of), registry=None) for name, of in COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(PREFIX + name, of.help, _labels(of), buckets=of.buckets, registry=None)
            for name, of in HISTOGRAMS.items()
        }
        # The other labels of an info come with its value.
        self.infos = {name: Info(PREFIX + name, of.help, ("scheduler",), registry=None) for name, of in INFOS.items()}

    def members(self) -> Iterable[Family]:
        """Every family."""
        yield from self.gauges.values()
        yield from self.counters.values()
        yield from self.histograms.values()
        yield from self.infos.values()

    def describe(self) -> Iterable[Metric]:
        """The names that the registry holds for us."""
        for member in self.members():
            yield from member.describe()

    def collect(self) -> Iterable[Metric]:
        """Families that have a series, without `_created`: of two families of one name, both would claim it."""
        for member in self.members():
            for metric in member.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                if metric.samples:
                    yield metric


def _labels(of: Definition) -> tuple[str, ...]:
    return ("scheduler", *of.labels)


lock = threading.Lock()
"""Held while series or names come and go."""
_families: WeakKeyDictionary[CollectorRegistry, Families] = WeakKeyDictionary()


def claim(registry: CollectorRegistry, name: str) -> Families:
    """The families of `registry`, made at the first call, with `name` taken.

    Raises `ValueError` for a name that is empty or taken, and where another collector holds a name of ours.
    """
    if not name:
        raise ValueError("name: a scheduler's metrics need a name that is not empty")
    with lock:
        families = _families.get(registry)
        if families is None:
            families = Families()
            registry.register(families)
            _families[registry] = families
        if name in families.names:
            raise ValueError(f"name: another scheduler {name!r} already exports metrics in this registry")
        families.names.add(name)
        return families


def one_of(children: Mapping[_K, _V], label: str, value: _K) -> _V:
    """The child of a label's value; `ValueError` names the label and what it may be."""
    try:
        return children[value]
    except KeyError:
        allowed = ", ".join(str(key) for key in children)
        raise ValueError(f"{label}: {value!r} is not one of {allowed}") from None
