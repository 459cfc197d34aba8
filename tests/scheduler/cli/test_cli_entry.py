"""The entry point: help, and errors of one line."""

import itertools
import socket
from pathlib import Path

import pytest

from tests.checkpoints import edit_config, llama, random_model, save
from tests.processes import CLI, run_python

QUIET = ("--log-level", "error")
COMMANDS = ("demo", "serve", "submit", "generate", "bench", "verify", "ledger", "journal")
OPTIONS = {
    "demo": ("--model", "--rows", "--precision", "--backend", "--threads"),
    "serve": (
        *("--model", "--broker", "--embedded-broker", "--rows", "--step-tokens", "--window", "--precision"),
        *("--backend", "--metrics", "--threads"),
    ),
    "submit": ("--broker", "--client"),
    "generate": ("--model", "--input", "--output", "--backend"),
    "bench": (
        *("--model", "--rows", "--sampling", "--json", "--seed", "--step-tokens", "--reuse", "--window", "--precision"),
        *("--backend", "--threads"),
    ),
    "verify": (
        *("--model", "--rows", "--step-tokens", "--sampling", "--seed", "--json", "--preempt-every", "--precision"),
        *("--backend", "--threads"),
    ),
    "ledger": ("--model", "--rows", "--json"),
    "journal": ("list", "show", "requeue", "export", "prune", "check"),
}


def complaint(run) -> str:
    """The one line of a command that failed."""
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("drumline: ")
    assert run.err.endswith("\n")
    assert run.err.count("\n") == 1
    return run.err.removeprefix("drumline: ").rstrip()


def test_a_process_of_its_own_says_what_is_wrong_in_one_line():
    run = run_python(*CLI, "generate", "--model", "/nowhere", "hello")
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "drumline: /nowhere: no such file or folder\n")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_the_commands(cli, arguments):
    run = cli(*arguments)
    assert (run.code, run.err) == (0, "")
    assert "Usage: drumline" in run.out
    assert [command for command in COMMANDS if f" {command} " not in run.out] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(cli, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run = cli(command, "--help")
    assert (run.code, run.err) == (0, "")
    assert f"Usage: drumline {command}" in run.out
    assert [option for option in OPTIONS[command] if f"{option} " not in run.out] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("solo",), "No such command 'solo'."),
        (("generate", "--nonsense", "1", "hello"), "No such option: --nonsense"),
        (("generate", "--max-tokens", "many", "hello"), "Invalid value for '--max-tokens'"),
        (("generate", "--precision", "float8", "hello"), "Invalid value for '--precision'"),
        (("generate", "--backend", "cuda", "hello"), "Invalid value for '--backend'"),
        (("bench", "x.jsonl", "--sampling", "wild"), "Invalid value for '--sampling'"),
        (("bench", "x.jsonl", "--reuse", "perhaps"), "Invalid value for '--reuse'"),
        (("bench", "x.jsonl", "--draft-tokens", "many"), "Invalid value for '--draft-tokens'"),
        (("verify", "x.jsonl", "--preempt-every", "-1"), "Invalid value for '--preempt-every'"),
        (("bench", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
        (("bench",), "Missing argument 'workload'."),
        (("generate", "--threads", "0", "hello"), "--threads: must be at least 1"),
        (("serve",), "--broker: give either --broker mqtt://HOST:PORT or --embedded-broker"),
        (("serve", "--broker", "mqtt://h:1", "--embedded-broker"), "--broker: give either"),
        (("serve", "--broker", "tcp://h:1"), "broker: must read mqtt://host:port"),
        (("serve", "--broker", "mqtt://h:99999"), "broker: "),
        (("serve", "--broker", "mqtt://a:b@h:1"), "broker: must not hold a password"),
        (("serve", "--broker", "mqtt://h:1", "--tls-ca", "ca.pem"), "broker: must be mqtts://"),
        (("serve", "--broker", "mqtts://h:1", "--tls-ca", "/no/ca.pem"), "--tls-ca: cannot read /no/ca.pem: No such"),
        (("serve", "--broker", "mqtts://h:1", "--tls-key", "key.pem"), "--tls-key: needs the certificate"),
        (("serve", "--broker", "mqtt://me@h", "--password-file", "/no"), "--password-file: cannot read /no: No such"),
        (("serve", "--embedded-broker", "--tls-ca", "ca.pem"), "--broker: is missing"),
        (
            ("serve", "--embedded-broker", "--home-assistant", "--home-assistant-prefix", "a/#"),
            "--home-assistant-prefix: must not contain",
        ),
        (("serve", "--embedded-broker", "--metrics", "9464"), "--metrics: address '9464': the port is missing"),
        (("serve", "--embedded-broker", "--http", "9464"), "--http: address '9464': the port is missing"),
        (("serve", "--embedded-broker", "--metrics", "h:x"), "--metrics: address 'h:x'"),
        (
            ("serve", "--embedded-broker", "--log-level", "loud"),
            "Invalid value for '--log-level': Value error, 'loud' is not one of",
        ),
        (
            ("serve", "--embedded-broker", "--log-format", "xml"),
            "Invalid value for '--log-format': Value error, 'xml' is not",
        ),
        (("serve", "--embedded-broker", "--drain", "-1"), "Invalid value for '--drain'"),
        (("submit", "hello"), "Missing option '--broker'."),
        (("submit", "hello", "--broker", "h:1"), "broker: must read mqtt://host:port"),
        (("submit", "hello", "--broker", "mqtt://127.0.0.1:1"), "cannot connect to 127.0.0.1:1"),
        (("submit", "hello", "--broker", "mqtt://h:1", "--id", "a/b"), "id: "),
        (("submit", "hello", "--broker", "mqtt://h:1", "--client", "a+b"), "client"),
        (("submit", "hello", "--broker", "mqtt://h:1", "--temperature", "nan"), "temperature: "),
        (("submit", "hello", "--broker", "mqtt://h:1", "--prefix", "a/#"), "topic_prefix: "),
    ],
)
def test_mistakes_that_need_no_model(cli, arguments, message):
    assert complaint(cli(*arguments)).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "PROMPT: give a prompt, or --input and --output"),
        (("generate", "--input", "x.jsonl"), "--input: goes with --output, and without a prompt"),
        (("generate", "--input", "x.jsonl", "--output", "y.jsonl", "hello"), "--input: goes with --output"),
        (("generate", "--output", "y.jsonl", "hello"), "PROMPT: give a prompt, or --input and --output"),
        (("generate", "--max-tokens", "-1", "hello"), "max_tokens: "),
        (("generate", "--temperature", "nan", "hello"), "temperature: "),
        (("generate", "--temperature", "-0.5", "hello"), "temperature: "),
        (("generate", "--top-p", "0", "hello"), "top_p: "),
        (("generate", "--top-k", "-1", "hello"), "top_k: "),
        (("generate", "--repetition-penalty", "0", "hello"), "repetition_penalty: "),
        (("generate", "--seed", "-1", "hello"), "seed: "),
        (("generate", "--backend", "cpu", "--precision", "float32", "hello"), "backend: 'cpu' computes int8 models on"),
        (("generate", "--window", "0", "hello"), "{model}: window 0 must be a whole number from 1"),
        (("generate", "--window", "4096", "hello"), "{model}: window 4096 must be a whole number from 1"),
        (("generate", "--window", "8", "a prompt that is longer"), "prompt: has 23 tokens, the window holds 8"),
        (("generate", "--step-tokens", "1", "hello"), "step_tokens: "),
        (("ledger", "--rows", "0"), "--rows: must be at least 1"),
        (("ledger", "--tokens", "0"), "--tokens: must be at least 1"),
        (("serve", "--embedded-broker", "--metrics", "127.0.0.1:0", *QUIET, "--name", "a/b"), "worker: "),
        (("serve", "--embedded-broker", "--metrics", "127.0.0.1:0", *QUIET, "--rows", "0"), "rows: "),
        (
            ("serve", "--embedded-broker", "--metrics", "127.0.0.1:0", *QUIET, "--stall", "0"),
            "--stall: must be a number of seconds above 0",
        ),
        (("serve", "--embedded-broker", "--metrics", "256.0.0.1:0"), "cannot serve HTTP on 256.0.0.1:0"),
    ],
)
def test_mistakes_on_a_model(cli, checkpoint: Path, arguments, message):
    command, *rest = arguments
    assert complaint(cli(command, "--model", checkpoint, *rest)).startswith(message.format(model=checkpoint))


@pytest.mark.parametrize("rows", ["0", "-3", "5000"])
@pytest.mark.parametrize("command", ["bench", "verify"])
def test_rows_out_of_range(cli, checkpoint: Path, workload, command, rows):
    path = workload([{"prompt": "a", "max_tokens": 1}])
    assert complaint(cli(command, path, "--model", checkpoint, "--rows", rows)).startswith("rows: ")


def test_rows_that_memory_cannot_hold_are_refused_with_the_ledger(cli, tmp_path: Path, workload):
    wide = save(tmp_path / "wide", random_model(llama(num_key_value_heads=4)))
    edit_config(wide, max_position_embeddings=2**21)
    path = workload([{"prompt": "a", "max_tokens": 1}])
    line = complaint(cli("bench", path, "--model", wide, "--window", 2**21, "--rows", 1024))
    assert line.startswith("rows: 1024 rows of 2097152 tokens take 549.76 GB of keys and values, ")


@pytest.mark.parametrize("option", ["--metrics", "--http"])
def test_a_port_in_use(cli, checkpoint: Path, option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        addresses = {"--metrics": "127.0.0.1:0", option: where}
        run = cli("serve", "--model", checkpoint, "--embedded-broker", *itertools.chain(*addresses.items()))
    assert complaint(run).startswith(f"cannot serve HTTP on {where}: Address already in use")


def test_a_broken_checkpoint_names_its_file(cli, tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    assert complaint(cli("generate", "--model", tmp_path, "hello")).startswith(str(tmp_path))
