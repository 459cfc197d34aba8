"""The Grafana dashboard: which panels it has. `python -m drumline.metrics.dashboard --output metrics/dashboards`

Only `drumline_model_info` has the model as a label. All other series are joined with it, so that the variable `model`
selects among them; its value is 1, so a product changes nothing. `job` and `instance` come from Prometheus, and with
`scheduler` they name one scheduler of one process.
"""

import argparse
import json
from pathlib import Path

from drumline.metrics.grafana import (
    SCHEMA_VERSION,
    Graph,
    Heatmap,
    Json,
    Panel,
    Query,
    Section,
    Stat,
    datasource_variable,
    place,
    variable,
)

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, SKY, GREEN, ORANGE, RED, PINK, GREY = (
    *("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"),
    "#999999",
)
OUTCOMES = {"completed": BLUE, "cancelled": GREY, "expired": ORANGE, "rejected": PINK, "failed": RED}
PRIORITIES = {"high": RED, "normal": BLUE, "low": SKY}
QUANTILES = {"p50": SKY, "p90": BLUE, "p99": RED}
PHASES = {"plan": ORANGE, "forward": BLUE, "sample": GREEN, "commit": PINK}

FIRST_TOKEN_OBJECTIVE_S = 5.0
"""What the alerts promise for 95 % of the requests; a bound of `DURATION_BUCKETS`."""

SCHEDULER = "job, instance, scheduler"
_MODEL = 'drumline_model_info{model=~"$model"}'


def selected(vector: str, labels: str = "model") -> str:
    """The series of the chosen models, with labels of the model."""
    return f"{vector} * on ({SCHEDULER}) group_left ({labels}) {_MODEL}"


def level(name: str) -> str:
    """A gauge, or any series as it is."""
    return selected(f'drumline_{name}{{instance=~"$instance"}}')


def rate(name: str, matchers: str = "") -> str:
    """Increase a second."""
    return selected(f'rate(drumline_{name}{{instance=~"$instance"{matchers}}}[$__rate_interval])')


def total(vector: str, by: str = "") -> str:
    """The sum over all that is selected, or by a label."""
    return f"sum by ({by}) ({vector})" if by else f"sum({vector})"


def share(part: str, whole: str) -> str:
    """One sum over another: no number where nothing happened."""
    return f"{total(part)} / {total(whole)}"


def mean(histogram: str) -> str:
    """Of what was observed."""
    return share(rate(f"{histogram}_sum"), rate(f"{histogram}_count"))


def buckets(histogram: str) -> str:
    """Observations a second by bound."""
    return total(rate(f"{histogram}_bucket"), "le")


def quantile(q: float, histogram: str) -> str:
    """Interpolated between the bounds of buckets."""
    return f"histogram_quantile({q:g}, {buckets(histogram)})"


def quantiles(histogram: str, exemplars: bool = False) -> list[Query]:
    """Median, 90th and 99th percentile; exemplars are points that lead to a job's id."""
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return [Query(quantile(q, histogram), name, exemplars and name == "p99") for name, q in named.items()]


def process(vector: str) -> str:
    """Series of the process, which know no scheduler, where a chosen model runs."""
    return f"{vector} and on (job, instance) {_MODEL}"


def _now() -> Section:
    state = {0.0: RED, 1.0: GREEN}
    what = selected('drumline_build_info{instance=~"$instance"}', "model, precision, backend")
    uptime = process('(time() - process_start_time_seconds{instance=~"$instance"})')
    return Section("Now", [
        Stat("Ready", "Whether requests would be taken and answered, as /readyz says: the worst of what is selected.",
             [Query(f"min({level('ready')})")], thresholds=state, words={0: "no", 1: "ready"}),
        Stat("Healthy", "Whether the event loop and the engine make progress, as /healthz says: the worst.",
             [Query(f"min({level('healthy')})")], thresholds=state, words={0: "no", 1: "healthy"}),
        Stat("Uptime", "Of the process that started last.", [Query(f"min({uptime})")], "s"),
        Stat("Requests", "Requests that ended, whatever the outcome.", [Query(total(rate("requests_total")))], "reqps"),
        Stat("Waiting", "Requests without a row.", [Query(total(level("requests_queued")))]),
        Stat("Tokens", "Tokens generated a second.", [Query(total(rate("generated_tokens_total")))], "suffix: /s"),
        Stat("Runs", "Version, model, precision and backend.",
             [Query(what, "drumline {{version}} · {{model}} · {{precision}} on {{backend}}")], width=6, names=True),
    ])  # fmt: skip


def _traffic() -> Section:
    return Section("Traffic", [
        Graph("Requests by outcome", "Requests that ended, a second. Every request has exactly one outcome.",
              [Query(total(rate("requests_total"), "outcome"), "{{outcome}}")], "reqps", 12,
              colours=OUTCOMES, axis="requests / s", layout="stacked"),
        Graph("Refusals by reason", "Requests that were refused, a second: what is wrong with them, or with us.",
              [Query(total(rate("rejected_total"), "reason"), "{{reason}}")], "reqps", 12, axis="requests / s"),
        Graph("Queue depth by priority", "Requests that wait for a row.",
              [Query(total(level("requests_queued"), "priority"), "{{priority}}")],
              colours=PRIORITIES, axis="requests", layout="stacked"),
        Graph("Oldest waiting request", "Its age; 0 when none waits. It is told at each step: it stands still while "
              "the engine does.", [Query(f"max by (instance, scheduler) ({level('oldest_queued_seconds')})",
              "{{instance}} {{scheduler}}")], "s", thresholds={60: RED}, axis="age"),
        Graph("Queue wait", "From submit to a row, of requests that ended.",
              quantiles("queue_seconds", exemplars=True), "s", colours=QUANTILES, axis="time"),
    ])  # fmt: skip


def _latency() -> Section:
    first, limit = "time_to_first_token_seconds", FIRST_TOKEN_OBJECTIVE_S
    in_time = share(rate(f"{first}_bucket", f', le="{limit}"'), rate(f"{first}_count"))
    return Section("Latency", [
        Graph("Time to first token", "From submit to the first token, told when the request ends.",
              quantiles(first, exemplars=True), "s", thresholds={limit: RED}, colours=QUANTILES, axis="time"),
        Heatmap("Time to first token: distribution", "Requests a second by time to first token.",
                [Query(buckets(first))], "s"),
        Graph(f"First token within {limit:g} s", "Share of requests; the objective of the burn-rate alerts is 95 %.",
              [Query(in_time, "in time")], "percentunit", thresholds={0.95: GREEN}, axis="share", highest=1),
        Graph("Time between tokens", "As a reader of one row sees it.",
              quantiles("inter_token_seconds", exemplars=True), "s", colours=QUANTILES, axis="time"),
        Heatmap("Time between tokens: distribution", "Gaps a second by their length.",
                [Query(buckets("inter_token_seconds"))], "s"),
        Graph("Request duration", "From submit to the end.",
              quantiles("request_seconds", exemplars=True), "s", colours=QUANTILES, axis="time"),
    ])  # fmt: skip


def _engine() -> Section:
    reused = share(rate("prompt_tokens_total", ', source="reused"'), rate("prompt_tokens_total"))
    accepted = share(rate("draft_tokens_total", ', outcome="accepted"'), rate("draft_tokens_total"))
    by_phase = total(rate("step_seconds_sum"), "phase")
    return Section("Engine", [
        Graph("Rows", "Rows that hold a request, against the pool.",
              [Query(total(level("rows_live")), "live"), Query(total(level("rows_capacity")), "capacity")],
              colours={"live": BLUE, "capacity": GREY}, axis="rows"),
        Graph("Tokens in", "Prompt tokens a second: computed by the model, or reused from the cache.",
              [Query(total(rate("prompt_tokens_total"), "source"), "{{source}}")],
              colours={"computed": BLUE, "reused": GREEN}, axis="tokens / s", layout="stacked"),
        Graph("Tokens out", "Tokens generated a second.",
              [Query(total(rate("generated_tokens_total")), "generated")],
              colours={"generated": BLUE}, axis="tokens / s"),
        Graph("Step time by phase", "Mean of one step.",
              [Query(f"{by_phase} / ignoring (phase) group_left () {total(rate('steps_total'))}", "{{phase}}")],
              "s", colours=PHASES, axis="time / step", layout="stacked"),
        Graph("Share of the step by phase", "What is not forward and sample is our own overhead.",
              [Query(by_phase, "{{phase}}")], "percentunit", colours=PHASES, axis="share", layout="share"),
        Graph("Steps", "Steps of the engine a second; 0 when there is nothing to do.",
              [Query(total(rate("steps_total")), "steps")], colours={"steps": BLUE}, axis="steps / s"),
        Graph("Rows and tokens a step", "Means: how full a step is.",
              [Query(mean("step_rows"), "rows"), Query(mean("step_tokens"), "tokens")],
              colours={"rows": BLUE, "tokens": ORANGE}, axis="rows", right={"tokens": "tokens"}),
        Graph("Padding", "Mean share of a step's positions that were padding; always 0 on the CPU kernels.",
              [Query(mean("padding_ratio"), "padding")], "percentunit", colours={"padding": BLUE}, axis="share"),
        Graph("K/V cache", "Tokens held, over the capacity.",
              [Query(f"avg by (instance, scheduler) ({level('kv_utilization_ratio')})", "{{instance}} {{scheduler}}")],
              "percentunit", axis="share", highest=1),
        Graph("Reuse and drafts", "Share of prompt tokens that a cached prefix spared the model; share of drafted "
              "tokens that were right. No line where there were none.",
              [Query(reused, "prefix reuse"), Query(accepted, "drafts accepted")],
              "percentunit", colours={"prefix reuse": GREEN, "drafts accepted": ORANGE}, axis="share", highest=1),
        Graph("Work done again", "Rows taken from a running request, full windows recomputed, engine restarts.",
              [Query(total(rate("preemptions_total")), "preemptions"),
               Query(total(rate("window_recomputes_total")), "window recomputes"),
               Query(total(rate("restarts_total")), "restarts")],
              "ops", colours={"preemptions": BLUE, "window recomputes": ORANGE, "restarts": RED}, axis="a second"),
        Graph("Length of requests", "Median tokens of prompt and answer.",
              [Query(quantile(0.5, "prompt_tokens"), "prompt"), Query(quantile(0.5, "generated_tokens"), "generated")],
              colours={"prompt": BLUE, "generated": GREEN}, axis="tokens"),
    ])  # fmt: skip


def _edges() -> Section:
    def messages(direction: str) -> list[Query]:
        return [Query(total(rate("mqtt_messages_total", f', direction="{direction}"'), "kind"), "{{kind}}")]

    return Section("MQTT and journal", [
        Graph("Connected, journal up", "1 or 0, the worst: the connection to the broker (0, too, where there is none) "
              "and the journal's writes (1, too, where there is none).",
              [Query(f"min({level('mqtt_connected')})", "broker"), Query(f"min({level('journal_up')})", "journal")],
              colours={"broker": BLUE, "journal": ORANGE}, axis="1: yes", highest=1),
        Graph("Messages in", "What devices published, a second.", messages("in"), "mps", axis="messages / s"),
        Graph("Messages out", "What the worker published, a second.", messages("out"), "mps", axis="messages / s"),
        Graph("Journal: commits and events", "Groups a second that went to the disk, and the events in them.",
              [Query(total(rate("journal_commits_total")), "commits"),
               Query(total(rate("journal_events_total")), "events")],
              colours={"commits": BLUE, "events": ORANGE}, axis="a second"),
        Graph("Journal: time of a commit", "Of one group of events, to the disk.",
              quantiles("journal_commit_seconds"), "s", thresholds={1: RED}, colours=QUANTILES, axis="time"),
    ])  # fmt: skip


def _process() -> Section:
    cpu = process('rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])')
    memory = process('process_resident_memory_bytes{instance=~"$instance"}')
    files = process('process_open_fds{instance=~"$instance"}')
    return Section("Process", [
        Graph("Event loop lag", "How late the loop wakes: what blocks it delays every device.",
              quantiles("event_loop_lag_seconds"), "s", thresholds={0.2: RED}, colours=QUANTILES, axis="time"),
        Graph("Memory", "Resident, with the model and the K/V cache.", [Query(memory, "{{instance}}")],
              "bytes", axis="memory"),
        Graph("CPU", "Cores in use.", [Query(cpu, "{{instance}}")], axis="cores"),
        Graph("Open files", "File descriptors, connections among them.", [Query(files, "{{instance}}")], axis="files"),
    ])  # fmt: skip


def sections() -> list[Section]:
    """All that there is to see, from top to bottom."""
    return [_now(), _traffic(), _latency(), _engine(), _edges(), _process()]


def panels() -> dict[str, Panel]:
    """Every panel by its title."""
    return {panel.title: panel for section in sections() for panel in section.panels}


def dashboard() -> Json:
    """The dashboard, as Grafana imports it."""
    return {
        "title": "drumline",
        "uid": "drumline",
        "description": "Generation schedulers: what is asked of them, how long it takes, and what they are made of.",
        "tags": ["drumline"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [
            datasource_variable(),
            variable("model", "Model", "label_values(drumline_model_info, model)"),
            variable("instance", "Instance", 'label_values(drumline_model_info{model=~"$model"}, instance)'),
        ]},
        "annotations": {"list": []},
        "panels": place(sections()),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Write `drumline.json`."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboard.")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    output = parser.parse_args(arguments).output
    output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
    (output / "drumline.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
