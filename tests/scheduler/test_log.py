"""An event is one line and can be read back, whatever its fields hold."""

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.scheduler.cli.logs import JsonFormatter, TextFormatter
from drumline.scheduler.log import LONGEST_TEXT, Event
from tests.log_lines import Logged, read_json, read_text
from tests.processes import run_python

FORMATS = [(TextFormatter(), read_text), (JsonFormatter(), read_json)]


def record(message: object, *args: object, level: int = logging.INFO, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("drumline.mqtt", level, __file__, 1, message, args, exc_info)


def test_an_event_as_text():
    event = Event("job ended", job="a-1", error=None, tokens=5, total_s=0.123456, kept=True, text='say "hi"')
    assert str(event) == 'job ended job=a-1 tokens=5 total_s=0.1235 kept=true text="say \\"hi\\""'


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a/b_c-1.5:9@h+", "a/b_c-1.5:9@h+"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ("grüße", '"grüße"'),
        ("x\n2026-01-01T00:00:00Z error engine failed", '"x\\n2026-01-01T00:00:00Z error engine failed"'),
        ("\x1b[2J\x9b\x7f\u2028\u202e\ud800", '"\\u001b[2J\\u009b\\u007f\\u2028\\u202e\\ud800"'),
    ],
)
def test_what_is_not_a_plain_word_is_quoted_and_what_is_not_printable_escaped(value: str, shown: str):
    assert str(Event("e", f=value)) == f"e f={shown}"


def test_a_long_value_is_cut():
    assert Event("e", f="x" * 10_000).fields["f"] == "x" * (LONGEST_TEXT - 1) + "…"


@pytest.mark.parametrize(("formatter", "read"), FORMATS)
@given(text=st.text(st.characters(), max_size=40), number=st.floats(0, 1e6), whole=st.integers(-(2**70), 2**70))
def test_any_value_makes_one_line_that_reads_back(formatter: logging.Formatter, read, text, number, whole):
    line = formatter.format(record(Event("job ended", text=f"~{text}", number=number, whole=whole, nothing=None)))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    logged = read(line)
    assert (logged.level, logged.event) == ("info", "job ended")
    assert logged.fields == {"text": f"~{text}", "number": round(number, 4), "whole": whole}


@pytest.mark.parametrize(("formatter", "read"), FORMATS)
def test_a_traceback_is_a_field(formatter: logging.Formatter, read):
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = formatter.format(record(Event("engine failed"), level=logging.ERROR, exc_info=sys.exc_info()))
    logged = read(line)
    assert (logged.level, logged.event) == ("error", "engine failed")
    assert logged.fields["exception"].startswith("Traceback (most recent call last):\n")
    assert logged.fields["exception"].endswith("\nValueError: two\nlines")


@pytest.mark.parametrize(("formatter", "read"), FORMATS)
def test_what_others_log_is_an_event_too(formatter: logging.Formatter, read):
    logged = read(formatter.format(record("%s\nerror %d", "x", 3, level=logging.WARNING)))
    assert logged == Logged("warning", "message", logged.fields)
    assert logged.fields["text"] == "x\nerror 3"


def test_the_keys_of_a_json_line():
    line = json.loads(JsonFormatter().format(record(Event("e", job="a"))))
    assert list(line) == ["time", "level", "logger", "event", "job"]
    assert line["logger"] == "drumline.mqtt"


def test_a_program_that_configures_no_logging_sees_nothing_of_ours():
    run = run_python("-c", "import drumline, logging; logging.getLogger('drumline.mqtt').error('lost')")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
