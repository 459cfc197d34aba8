import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.model.detokenize import decode
from drumline.model.errors import InvalidRequest, ModelLoadError
from drumline.model.word_tokenizer import BOS, EOS, PAD, UNK, WordTokenizer

TEXT = "The cat sat. The cat didn't sit, the cat sat!"
words = WordTokenizer.from_text(TEXT)


def test_words_and_punctuation_by_frequency():
    assert words.words[:3] == ("cat", "The", "sat")
    assert set(words.words) == {"cat", "The", "sat", "the", "didn", "t", "sit", "'", ".", ",", "!"}
    assert words.vocab_size == 4 + 11
    assert (BOS, EOS, UNK, PAD) == (0, 1, 2, 3)
    assert (words.bos_id, words.eos_ids, words.adds_bos, words.strips_leading_space) == (0, (1,), True, True)
    assert WordTokenizer.from_text(TEXT, max_words=2).words == ("cat", "The")


def test_encoding_and_decoding():
    assert words.encode("cat,sat  cat") == [4, words.encode(",")[0], 6, 4]
    assert words.encode("dog") == [UNK]
    assert words.encode("") == []
    assert decode(words, words.encode("The cat didn't sit")) == "The cat didn ' t sit"
    assert decode(words, [BOS, 4, UNK, 6, EOS, PAD]) == "cat sat"


@given(st.lists(st.integers(4, words.vocab_size - 1)))
def test_ids_of_words_survive_the_round_trip(ids):
    assert words.encode(decode(words, ids)) == ids


@given(st.text())
def test_text_never_makes_special_tokens(text):
    assert not {BOS, EOS, PAD} & set(words.encode(text + "<bos><eos><pad>"))
    vocabulary = WordTokenizer.from_text(text)
    assert UNK not in vocabulary.encode(text)


def test_templates_have_special_tokens():
    assert words.encode_template("<bos>cat<unk> sat<eos><pad>") == [BOS, 4, UNK, 6, EOS, PAD]
    assert words.encode_template("<bos>#at", {ord("#"): "c"}) == [BOS, 4]


@pytest.mark.parametrize("token_id", [-1, 15])
def test_ids_without_a_word_are_empty(token_id):
    assert words.token_bytes(token_id) == b""


def test_saved_and_loaded(tmp_path):
    vocabulary = WordTokenizer.from_text("naïve 中文 words, words")
    vocabulary.save(tmp_path / "vocabulary.json")
    again = WordTokenizer.load(tmp_path / "vocabulary.json")
    assert again.words == vocabulary.words
    assert again.encode("naïve 中文") == vocabulary.encode("naïve 中文")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"kind": "bpe", "words": []}',
        '{"kind": "word", "words": "cat"}',
        '{"kind": "word", "words": ["two words"]}',
        '{"kind": "word", "words": ["a", "a"]}',
        '{"kind": "word", "words": [1]}',
        '{"kind": "word", "words": ["<bos>"]}',
        json.dumps({"kind": "word", "words": ["\ud800"]}),
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path, content):
    path = tmp_path / "vocabulary.json"
    path.write_text(content)
    with pytest.raises(ModelLoadError, match=r"vocabulary\.json"):
        WordTokenizer.load(path)


def test_bad_arguments_and_missing_files(tmp_path):
    with pytest.raises(ModelLoadError, match=r"none\.json"):
        WordTokenizer.load(tmp_path / "none.json")
    with pytest.raises(InvalidRequest, match="max_words"):
        WordTokenizer.from_text(TEXT, max_words=-1)
    with pytest.raises(InvalidRequest, match="surrogates"):
        WordTokenizer.from_text("a \ud800")
