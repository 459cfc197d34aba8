"""A judge of trace files, written from the description of the Trace Event Format and not from our writer."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

NUMBER = {"type": "number", "minimum": 0}
PHASES: dict[str, dict[str, Any]] = {
    "X": {"required": ["name", "ts", "dur", "pid", "tid"], "properties": {"dur": NUMBER}},
    "i": {"required": ["name", "ts", "pid", "tid", "s"], "properties": {"s": {"enum": ["t", "p", "g"]}}},
    "C": {
        "required": ["name", "ts", "pid", "args"],
        "properties": {"args": {"additionalProperties": {"type": "number"}, "minProperties": 1}},
    },
    "b": {"required": ["name", "ts", "pid", "id", "cat"]},
    "e": {"required": ["name", "ts", "pid", "id", "cat"]},
    "M": {
        "required": ["name", "pid", "args"],
        "properties": {"name": {"enum": ["process_name", "thread_name", "thread_sort_index"]}},
    },
}
EVENT = {
    "type": "object",
    "required": ["ph"],
    "properties": {
        "ph": {"enum": list(PHASES)},
        "ts": NUMBER,
        "pid": {"type": "integer"},
        "tid": {"type": "integer"},
        "name": {"type": "string", "minLength": 1},
        "cat": {"type": "string"},
        "args": {"type": "object"},
    },
    "allOf": [{"if": {"properties": {"ph": {"const": phase}}}, "then": schema} for phase, schema in PHASES.items()],
}


class TraceChecked:
    """The events of a valid file; raises `AssertionError` for what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
        Draft202012Validator({"type": "array", "items": EVENT}).validate(self.events)
        self._check_tracks_are_named()
        self._check_slices_nest()
        self._check_spans_pair()

    def named(self, phase: str, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if (event["ph"], event["name"]) == (phase, name)]

    def terminal(self) -> Counter[str]:
        """How many terminal events each job has."""
        return Counter(event["args"]["job"] for event in self.events if event.get("cat") == "terminal")

    def tracks(self) -> dict[int, str]:
        return {event["tid"]: event["args"]["name"] for event in self.named("M", "thread_name")}

    def slices(self, track: str) -> list[dict[str, Any]]:
        """Of one track, by time, those that hold others before them."""
        tids = [tid for tid, name in self.tracks().items() if name == track]
        found = [event for event in self.events if event["ph"] == "X" and event["tid"] in tids]
        return sorted(found, key=lambda event: (event["ts"], -event["dur"]))

    def _check_tracks_are_named(self) -> None:
        used = {event["tid"] for event in self.events if event["ph"] in ("X", "i")}
        assert used <= set(self.tracks())

    def _check_slices_nest(self) -> None:
        """A slice lies within another of its track, or apart from it: viewers drop what overlaps by half."""
        for track in set(self.tracks().values()):
            open_until: list[float] = []
            for event in self.slices(track):
                begins, ends = event["ts"], event["ts"] + event["dur"]
                while open_until and open_until[-1] <= begins + 0.2:
                    open_until.pop()
                assert not open_until or ends <= open_until[-1] + 0.2, f"{event} overlaps the end of another slice"
                open_until.append(ends)

    def _check_spans_pair(self) -> None:
        begun: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event in self.events:
            if event["ph"] == "b":
                begun[event["id"], event["name"]].append(event["ts"])
        for event in self.events:
            if event["ph"] == "e":
                assert any(began <= event["ts"] for began in begun[event["id"], event["name"]]), event
        ended = Counter((event["id"], event["name"]) for event in self.events if event["ph"] == "e")
        assert ended == {key: len(times) for key, times in begun.items()}
