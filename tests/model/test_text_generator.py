import pytest
import torch

from drumline.model.detokenize import decode
from drumline.model.errors import InvalidRequest
from drumline.model.reference import generate_uncached
from drumline.model.sampling_params import SamplingParams
from drumline.model.text_generator import TextGenerator
from drumline.model.transformer_lm import CourseConfig, TransformerLM, to_language_model
from drumline.model.word_tokenizer import WordTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 10
FREE = SamplingParams(banned_ids=(0, 1, 2, 3))


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    vocabulary = WordTokenizer.from_text("rain falls on the green hill, and the sheep look up.")
    torch.manual_seed(1)
    model = TransformerLM(CourseConfig(vocabulary.vocab_size, width=16, layers=1, heads=2, block_size=WINDOW))
    return TextGenerator(to_language_model(model, vocabulary))


def test_text_streams_and_the_result_is_the_whole(generator, capsys):
    result = generator.generate("the sheep", max_tokens=20, ignore_eos=True, sampling=FREE)
    assert capsys.readouterr().out == result.text
    assert len(result.text.split()) == 20
    assert (result.stop_reason, result.run.window_recomputes) == ("budget", 20 - (WINDOW - 3 + 1))
    prompt_ids = [0, *generator.model.tokenizer.encode("the sheep")]
    reference = generate_uncached(generator.model, prompt_ids, max_tokens=20, ignore_eos=True, sampling=FREE)
    assert result.run.token_ids == reference.token_ids
    assert result.text == decode(generator.model.tokenizer, reference.token_ids)


def test_pieces_come_one_by_one(generator):
    pieces = generator.stream("the hill", max_tokens=4, ignore_eos=True, sampling=FREE)
    first = [next(pieces), next(pieces)]
    assert all(first)
    rest = list(pieces)
    assert len(rest) == 2
    seen: list[str] = []
    result = generator.generate("the hill", seen.append, max_tokens=4, ignore_eos=True, sampling=FREE)
    assert seen == [*first, *rest]
    assert result.text == "".join(seen)


def test_bos_comes_first_and_once(generator):
    assert generator.model.encode_prompt("") == [0]
    assert generator.model.encode_prompt("the") == [0, *generator.model.tokenizer.encode("the")]
    assert generator.generate("", max_tokens=1, ignore_eos=True).run.prompt_tokens == 1


def test_eos_leaves_no_text(generator):
    result = generator.generate("rain", max_tokens=5, sampling=SamplingParams(allowed_ids=(1,)))
    assert (result.text, result.stop_reason, result.run.token_ids) == ("", "eos", (1,))


def test_bad_input_is_refused_before_the_first_piece(generator):
    with pytest.raises(InvalidRequest, match="above the window"):
        generator.stream("rain " * WINDOW, max_tokens=1, overflow="stop")
