from dataclasses import replace

import pytest

from drumline.model.chat import ChatTemplate
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.admission import Admission, Admitted
from drumline.scheduler.request import Message, Request
from tests.tiny import ByteTokenizer, tiny_model

WINDOW = 32


def model_with(window: int = WINDOW, slides: bool = False, **tokenizer: object) -> LanguageModel:
    bytes_ = ByteTokenizer()
    for name, value in tokenizer.items():
        setattr(bytes_, name, value)
    return replace(tiny_model(window=window), tokenizer=bytes_, slides=slides)


def admit(request: Request, model: LanguageModel | None = None, rows: int = 4) -> Admitted:
    return Admission(model or model_with(), rows).admit(request)


def refused(request: Request, model: LanguageModel | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        admit(request, model)
    return caught.value


class TestPrompt:
    def test_text(self):
        assert admit(Request(prompt="AB")).prompt_ids == (68, 69)

    def test_bos_where_the_tokenizer_says_so_and_never_twice(self):
        model = model_with(adds_bos=True)
        assert admit(Request(prompt="AB"), model).prompt_ids == (0, 68, 69)
        assert admit(Request(prompt_ids=[0, 68]), model).prompt_ids == (0, 68)
        assert admit(Request(prompt_ids=[68]), model).prompt_ids == (68,)  # ids are taken as they are

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize("empty", [{"prompt": ""}, {"prompt_ids": ()}])
    def test_empty_prompt_is_bos_alone(self, empty: dict, adds_bos: bool):
        assert admit(Request(**empty), model_with(adds_bos=adds_bos)).prompt_ids == (0,)

    @pytest.mark.parametrize("empty", [{"prompt": ""}, {"prompt_ids": ()}])
    def test_empty_prompt_without_a_bos(self, empty: dict):
        error = refused(Request(**empty), model_with(bos_id=None))
        assert error.field in empty
        assert "no BOS" in error.limit

    @pytest.mark.parametrize("bad", [-1, 259, 2**63 - 1])
    def test_ids_outside_the_vocabulary(self, bad: int):
        error = refused(Request(prompt_ids=(5, bad)))
        assert error.field == "prompt_ids"
        assert error.limit == f"id {bad} is outside 0 … 258"

    def test_messages_need_a_template(self):
        error = refused(Request(messages=[Message(role="user", content="hi")]))
        assert error.field == "messages"
        assert "no chat template" in error.limit

    def test_messages_go_through_the_template(self):
        model = model_with()
        source = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
        model = replace(model, chat_template=ChatTemplate(source, TemplateTokenizer()))
        request = Request(messages=[Message(role="system", content="a"), Message(role="user", content="b")])
        assert admit(request, model).prompt_ids == tuple(ByteTokenizer().encode("s:a;u:b;"))


class TemplateTokenizer(ByteTokenizer):
    def encode_template(self, text: str, restore: dict[int, str] | None = None) -> list[int]:
        return self.encode(text.translate(restore or {}))


class TestWindow:
    def test_room_counts_what_the_window_still_holds(self):
        # A prompt of P tokens may generate C - P + 1: the last one need not be fed.
        assert admit(Request(prompt_ids=[5] * 10)).rules.room == 23
        assert admit(Request(prompt_ids=[5] * WINDOW)).rules.room == 1
        assert admit(Request(prompt_ids=[5] * WINDOW, max_tokens=10_000)).rules.max_tokens == 10_000

    def test_longer_than_the_window(self):
        error = refused(Request(prompt_ids=[5] * (WINDOW + 1)))
        assert error.field == "prompt_ids"
        assert "33 tokens" in error.limit
        assert "the window holds 32" in error.limit

    @pytest.mark.parametrize(
        ("slides", "overflow", "room"),
        [(False, None, 23), (False, "slide", None), (True, None, None), (True, "stop", 23)],
    )
    def test_overflow_is_the_requests_or_the_models(self, slides: bool, overflow: str | None, room: int | None):
        request = Request(prompt_ids=[5] * 10, overflow=overflow)
        assert admit(request, model_with(slides=slides)).rules.room == room

    def test_sliding_keeps_the_whole_prompt_for_the_penalties(self):
        assert len(admit(Request(prompt_ids=[5] * 100, overflow="slide")).prompt_ids) == 100


class TestRules:
    def test_ignoring_eos(self):
        assert admit(Request(prompt="a")).rules.eos_ids == {1}
        assert admit(Request(prompt="a", ignore_eos=True)).rules.eos_ids == set()

    @pytest.mark.parametrize("bad", [-1, 259])
    def test_stop_ids_outside_the_vocabulary(self, bad: int):
        assert refused(Request(prompt="a", stop_ids=[4, bad])).field == "stop_ids"

    @pytest.mark.parametrize("name", ["banned_ids", "allowed_ids", "exempt_ids"])
    def test_sampling_ids_outside_the_vocabulary(self, name: str):
        request = Request(prompt="a", sampling=SamplingParams(**{name: (259,)}))
        assert refused(request).field == f"sampling.{name}"

    def test_more_choices_than_rows(self):
        assert len(admit(Request(prompt="a", n=4)).prompt_ids) == 1
        error = refused(Request(prompt="a", n=5))
        assert error.field == "n"
        assert "rows (4)" in error.limit

    def test_seed_is_the_requests_or_drawn(self):
        for seed in (0, 2**64 - 1):
            assert admit(Request(prompt="a", sampling=SamplingParams(seed=seed))).seed == seed
        drawn = {admit(Request(prompt="a")).seed for _ in range(8)}
        assert len(drawn) == 8
        assert all(0 <= seed < 2**64 for seed in drawn)
