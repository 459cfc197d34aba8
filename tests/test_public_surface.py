"""The names that users and other services rely on. A change here is a change of the contract, and of the changelog."""

import inspect
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest

import drumline
import drumline.client as client
from drumline import Choice, Chunk, Request, Result, SamplingParams, Scheduler, load_model
from drumline.model import errors
from drumline.model.stop_reason import StopReason
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.engine import Engine, Job, Statistics
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.request import STATUS, Message, StepRecord, Timings, TokenLogprob, Usage


def test_exported_names():
    assert drumline.__all__ == [
        "Choice",
        "Chunk",
        "DeadlineExceeded",
        "DrumlineError",
        "EngineFailed",
        "InvalidRequest",
        "JobCancelled",
        "JsonSchema",
        "Lark",
        "Message",
        "ModelLoadError",
        "QueueFull",
        "Regex",
        "Request",
        "Result",
        "SamplingParams",
        "Scheduler",
        "SchedulerClosed",
        "__version__",
        "load_model",
    ]
    for name in drumline.__all__:
        assert hasattr(drumline, name)


def test_the_client_has_a_home():
    assert set(client.__all__) == {
        *("BrokerAddress", "BrokerError", "Client", "QuotaExceeded", "RemoteJob", "Tls"),
        *("parse_broker_url", "with_credentials"),
    }
    for name in client.__all__:
        assert hasattr(client, name)


DEFAULTS = {
    Request: {
        "id": None,
        "prompt": None,
        "prompt_ids": None,
        "messages": None,
        "max_tokens": 128,
        "min_tokens": 0,
        "stop": (),
        "stop_ids": (),
        "keep_stop": False,
        "ignore_eos": False,
        "sampling": SamplingParams(),
        "n": 1,
        "logprobs": None,
        "prompt_logprobs": None,
        "structured": None,
        "processors": (),
        "priority": "normal",
        "tenant": "default",
        "deadline_s": None,
        "overflow": None,
    },
    SamplingParams: {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "exempt_ids": (),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "banned_ids": (),
        "allowed_ids": None,
        "seed": None,
    },
}


@pytest.mark.parametrize("model", DEFAULTS)
def test_fields_and_defaults_of_what_goes_in(model: type):
    fields = model.model_fields
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    assert list(defaults.items()) == list(DEFAULTS[model].items())


def test_message_has_no_defaults():
    assert {name: field.is_required() for name, field in Message.model_fields.items()} == {
        "role": True,
        "content": True,
    }


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Chunk, ["choice", "first_token", "text_offset", "text", "token_ids", "logprobs"]),
        (Result, ["id", "choices", "usage", "timings", "seed", "prompt_logprobs"]),
        (
            Choice,
            ["choice", "text", "token_ids", "stop_reason", "logprobs", "token_times_s", "steps", "error"],
        ),
        (
            Usage,
            [
                "prompt_tokens",
                "generated_tokens",
                "evaluated_positions",
                "uncached_positions",
                "reused_tokens",
                "resumes",
                "window_recomputes",
                "window_filled_step",
            ],
        ),
        (Timings, ["queued_s", "prefill_s", "decode_s", "first_token_s", "total_s"]),
        (StepRecord, ["input_length", "cache_before", "cache_after"]),
        (TokenLogprob, ["id", "logprob", "top"]),
    ],
)
def test_fields_of_what_comes_out(kind: type, names: list[str]):
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert [field.name for field in fields(kind)] == names


def test_result_speaks_for_choice_zero():
    properties = {name for name, value in vars(Result).items() if isinstance(value, property)}
    assert properties == {"text", "token_ids", "steps", "stop_reason", "error", "status"}


def test_stop_reasons_and_statuses():
    assert get_args(StopReason) == ("eos", "stop", "budget", "window", "cancelled", "deadline", "error")
    assert STATUS == {
        "eos": "completed",
        "stop": "completed",
        "budget": "completed",
        "window": "completed",
        "cancelled": "cancelled",
        "deadline": "expired",
        "error": "failed",
    }


def test_load_model_signature():
    parameters = inspect.signature(load_model).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "path": inspect.Parameter.empty,
        "precision": "auto",
        "device": "cpu",
        "window": None,
        "kv_dtype": None,
    }


def test_scheduler_signature_and_verbs():
    parameters = inspect.signature(Scheduler).parameters
    assert {name: parameter.default for name, parameter in parameters.items() if name not in ("model", "clock")} == {
        "rows": 16,
        "step_tokens": 256,
        "queue_requests": 1024,
        "queue_tokens": 4_000_000,
        "backend": None,
        "require_exact": False,
        "draft_tokens": 5,
        "reuse": True,
        "refuse_late": False,
        "restarts": 0,
        "stall_s": 30.0,
        "registry": None,
        "name": "main",
        "policy": None,
    }
    assert list(SchedulerConfig.model_fields) == [
        name for name in parameters if name not in ("model", "clock", "registry", "policy")
    ]
    verbs = {name for name in vars(Scheduler) if not name.startswith("_")}
    assert verbs == {
        "submit",
        "submit_nowait",
        "check",
        "settle",
        "preempt",
        "pin",
        "drain",
        "close",
        "queue_position",
        "statistics",
        "check_integrity",
        "fingerprint",
        "health",
        "healthy",
        "live",
        "ready",
    }
    for name in ("submit", "check", "settle", "drain", "queue_position", "statistics"):
        engine, scheduler = getattr(Engine, name), getattr(Scheduler, name)
        assert list(inspect.signature(engine).parameters) == list(inspect.signature(scheduler).parameters)


def test_job_verbs():
    for name in ("result", "cancel", "stream", "__aiter__", "state", "generated"):
        assert hasattr(GenerationJob, name)
    assert {name for name in vars(Job) if not name.startswith("_")} == {"id", "state", "generated", "result", "cancel"}


def test_statistics_fields():
    assert [field.name for field in fields(Statistics)] == [
        "model",
        "rows",
        "live",
        "queued",
        "queued_tokens",
        "kv_tokens",
        "kv_capacity_tokens",
        "finished",
        "draining",
        "healthy",
        "steps",
        "row_steps",
        "prompt_tokens",
        "generated_tokens",
        "padded_cells",
        "real_cells",
        "forward_s",
        "sample_s",
        "step_s",
    ]


def test_errors_are_one_tree():
    tree = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name: value.__bases__ for name, value in tree.items()} == {
        "DrumlineError": (Exception,),
        "InvalidRequest": (errors.DrumlineError, ValueError),
        "QueueFull": (errors.DrumlineError,),
        "SchedulerClosed": (errors.DrumlineError,),
        "JobCancelled": (errors.DrumlineError,),
        "DeadlineExceeded": (errors.DrumlineError,),
        "EngineFailed": (errors.DrumlineError,),
        "ModelLoadError": (errors.DrumlineError,),
    }
    invalid = errors.InvalidRequest("field", "limit")
    assert (invalid.field, invalid.limit, str(invalid)) == ("field", "limit", "field: limit")
    full = errors.QueueFull("tokens", 10, 3)
    assert (full.bound, full.limit, full.queued) == ("tokens", 10, 3)
    assert str(full) == "queue is full: 3 requests queued, the bound is 10 tokens"
