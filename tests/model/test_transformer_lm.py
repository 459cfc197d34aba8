import functools
import json
import math

import pytest
import torch

from drumline.model.errors import ModelLoadError
from drumline.model.layers import causal_attention
from drumline.model.reference import uncached_logits
from drumline.model.registry import load_model
from drumline.model.transformer_lm import (
    CourseConfig,
    TransformerLM,
    load_checkpoint,
    read_config,
    save_checkpoint,
    to_language_model,
)
from drumline.model.word_tokenizer import WordTokenizer

load_float32 = functools.partial(load_model, precision="float32")

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, LAYERS, HEADS, BLOCK = 19, 2, 2, 8


@pytest.fixture
def model() -> TransformerLM:
    torch.manual_seed(5)
    return TransformerLM(CourseConfig(VOCAB, width=16, layers=LAYERS, heads=HEADS, block_size=BLOCK)).eval()


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def test_two_new_tokens_over_five_cached_see_six_and_seven_keys():
    # Equal keys share the weight evenly, and the value of key j is the unit vector j: the result lists what is seen.
    query, key = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 7, 4)
    value = torch.eye(7)[None, None]
    seen = causal_attention(query, key, value, query_offset=5)[0, 0]
    assert (seen[0] > 0).tolist() == [True] * 6 + [False]
    assert (seen[1] > 0).tolist() == [True] * 7
    torch.testing.assert_close(seen[0, :6], torch.full((6,), 1 / 6))
    torch.testing.assert_close(seen[1], torch.full((7,), 1 / 7))


def test_attention_refuses_keys_that_do_not_cover_the_queries():
    states = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="need 3 keys, there are 2"):
        causal_attention(states, states, states, query_offset=1)


def test_output_shapes(model):
    output = model(torch.tensor([[1, 2, 3], [4, 5, 6]]), use_cache=True)
    assert output["logits"].shape == (2, 3, VOCAB)
    assert output["loss"] is None
    assert [tuple(tensor.shape) for pair in output["past_key_values"] for tensor in pair] == [(2, HEADS, 3, 8)] * 4
    assert model(ids(1))["past_key_values"] is None


@pytest.mark.parametrize("split", range(1, BLOCK))
def test_cached_logits_equal_uncached(model, split):
    tokens = torch.randint(VOCAB, (3, BLOCK), generator=torch.Generator().manual_seed(split))
    with torch.inference_mode():
        whole = model(tokens)["logits"]
        first = model(tokens[:, :split], use_cache=True)
        past, rest = first["past_key_values"], [first["logits"]]
        for step in range(split, BLOCK):
            output = model(tokens[:, step : step + 1], past_key_values=past, use_cache=True)
            past = output["past_key_values"]
            rest.append(output["logits"])
    torch.testing.assert_close(torch.cat(rest, dim=1), whole, atol=1e-5, rtol=0)


def test_the_served_description_computes_the_same_logits(model):
    vocabulary = WordTokenizer.from_text("a b c")
    served = to_language_model(model, vocabulary)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.inference_mode():
        expected = model(ids(*tokens))["logits"][0]
    torch.testing.assert_close(uncached_logits(served, tokens), expected, atol=1e-5, rtol=0)
    assert served.slides
    assert served.window == BLOCK


def test_a_served_model_does_not_change_with_later_training(model):
    served = to_language_model(model, WordTokenizer.from_text("a b c"))
    before = uncached_logits(served, [1, 2])
    with torch.no_grad():
        model.token_embedding.weight.add_(1.0)
    torch.testing.assert_close(uncached_logits(served, [1, 2]), before, atol=0, rtol=0)
    assert to_language_model(model, WordTokenizer.from_text("a b c")).fingerprint != served.fingerprint


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.tensor([1, 2]), "int64 \\[batch, time\\], non-empty"),
        (torch.zeros(1, 0, dtype=torch.int64), "non-empty"),
        (torch.zeros(0, 3, dtype=torch.int64), "non-empty"),
        (torch.tensor([[1, 2]], dtype=torch.int32), "int32"),
        (torch.tensor([[1.0, 2.0]]), "float32"),
        (torch.tensor([[VOCAB]]), f"0 … {VOCAB - 1}"),
        (torch.tensor([[-1]]), f"0 … {VOCAB - 1}"),
        (torch.zeros(1, BLOCK + 1, dtype=torch.int64), "recompute the window"),
    ],
)
def test_wrong_ids_are_refused(model, wrong, message):
    with pytest.raises(ValueError, match=message):
        model(wrong)


def wrong_caches() -> dict[str, object]:
    good = torch.zeros(1, HEADS, 3, 8)
    layer = (good, good)
    return {
        "no layer": (),
        "a layer missing": (layer,),
        "a layer too many": (layer,) * 3,
        "no pair": ((good,), layer),
        "layers of two lengths": (layer, (good[:, :, :2], good[:, :, :2])),
        "keys and values of two lengths": ((good, good[:, :, :2]), layer),
        "another batch": ((good.expand(2, -1, -1, -1),) * 2,) * 2,
        "other heads": ((good[:, :1],) * 2,) * 2,
        "another head width": ((good[..., :4],) * 2,) * 2,
        "another device": ((good.to("meta"),) * 2,) * 2,
        "no heads axis": ((good[0],) * 2,) * 2,
    }


@pytest.mark.parametrize("name", wrong_caches())
def test_wrong_caches_are_refused(model, name):
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids(1), past_key_values=wrong_caches()[name])


def test_a_cache_may_fill_the_block_and_not_more(model):
    full = ((torch.zeros(1, HEADS, BLOCK - 1, 8),) * 2,) * LAYERS
    assert model(ids(1), past_key_values=full)["logits"].shape == (1, 1, VOCAB)
    with pytest.raises(ValueError, match=f"{BLOCK - 1} cached and 2 new .* recompute the window"):
        model(ids(1, 2), past_key_values=full)


def test_cache_arguments_in_training_mode_are_refused(model):
    model.train()
    past = ((torch.zeros(1, HEADS, 1, 8),) * 2,) * LAYERS
    for arguments in ({"use_cache": True}, {"past_key_values": past}):
        with pytest.raises(ValueError, match=r"eval\(\)"):
            model(ids(1), **arguments)
    assert model(ids(1, 2), targets=ids(2, 3))["loss"].requires_grad


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([[1, 2, 3]]), "targets must be int64"),
        (torch.tensor([1, 2]), "targets must be int64"),
        (torch.tensor([[1, 2]], dtype=torch.int32), "int32"),
        (torch.tensor([[-100, -100]]), "all -100"),
        (torch.tensor([[1, VOCAB]]), "targets must be -100 or in"),
        (torch.tensor([[1, -1]]), "targets must be -100 or in"),
    ],
)
def test_wrong_targets_are_refused(model, targets, message):
    with pytest.raises(ValueError, match=message):
        model(ids(1, 2), targets=targets)


def test_ignored_targets_do_not_count(model):
    output = model(ids(1, 2, 3), targets=ids(-100, 7, -100))
    expected = -output["logits"][0, 1].log_softmax(-1)[7]
    torch.testing.assert_close(output["loss"], expected)
    assert output["loss"].item() == pytest.approx(math.log(VOCAB), abs=0.5)


def test_training_without_a_cache_reduces_the_loss(model):
    vocabulary = WordTokenizer.from_text("the cat sat on the mat")
    tokens = vocabulary.encode("the cat sat on the mat")
    inputs, targets = ids(*tokens[:-1]), ids(*tokens[1:])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(inputs, targets=targets)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.5)
    assert losses[-1] < 0.3


def test_checkpoint_round_trip(model, tmp_path):
    vocabulary = WordTokenizer.from_text("one two three")
    save_checkpoint(tmp_path, model, vocabulary)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "drumline_course"
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "vocabulary.json"}

    again, words = load_checkpoint(tmp_path)
    again.eval()
    torch.testing.assert_close(again(ids(1, 2))["logits"], model(ids(1, 2))["logits"], atol=0, rtol=0)
    assert again.config == model.config
    assert words.encode("three one") == vocabulary.encode("three one")

    served = load_float32(tmp_path)
    torch.testing.assert_close(
        uncached_logits(served, [1, 2, 3]),
        uncached_logits(to_language_model(model, vocabulary), [1, 2, 3]),
        atol=0,
        rtol=0,
    )
    assert served.slides
    assert served.window == BLOCK
    assert served.tokenizer.encode("three one") == vocabulary.encode("three one")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 15}, "width 15"),
        ({"heads": None}, "heads is missing"),
        ({"layers": 0}, "layers"),
        ({"block_size": "8"}, "block_size"),
    ],
)
def test_wrong_settings_are_named(change, message):
    settings = {"vocab_size": 9, "width": 16, "layers": 1, "heads": 2, "block_size": 8} | change
    with pytest.raises(ModelLoadError, match=message):
        read_config(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"width": 15}, "multiple of heads"), ({"layers": 0}, "layers"), ({"dropout": 1.0}, "dropout")],
)
def test_a_wrong_course_config_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CourseConfig(**({"vocab_size": 9, "width": 16, "layers": 1, "heads": 2, "block_size": 8} | change))
