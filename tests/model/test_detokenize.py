import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.model.bpe_tokenizer import BPETokenizer
from drumline.model.detokenize import Detokenizer, decode
from drumline.model.word_tokenizer import WordTokenizer
from tests.tiny_tokenizers import KINDS, spec_text

TOKENIZERS = {kind: BPETokenizer(json.loads(spec_text(kind))) for kind in KINDS}
TOKENIZERS["word"] = WordTokenizer.from_text("the sun, 中文 and 👋 a stone")
FAMILY = "👩‍👩‍👧‍👦"


def chunks_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def of_all(tokenizer):
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_chunks_join_to_the_text_of_all_bytes(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(of_all(tokenizer))
    raw = b"".join(map(tokenizer.token_bytes, ids))
    expected = (raw.removeprefix(b" ") if tokenizer.strips_leading_space else raw).decode("utf-8", "replace")
    assert "".join(chunks_of(tokenizer, ids)) == decode(tokenizer, ids) == expected


@pytest.mark.parametrize("kind", ["byte_level", "prepend"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10))
def test_no_chunk_has_half_a_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    chunks = chunks_of(tokenizer, tokenizer.encode(text))
    assert "".join(chunks) == text.replace("▁", " ") if kind == "prepend" else text
    assert any("\ufffd" in chunk for chunk in chunks) == ("\ufffd" in text)
    assert chunks[-1] == ""


@pytest.mark.parametrize("text", [FAMILY, "中文", "🇫🇷", "é👋🏽é"])
@pytest.mark.parametrize("kind", ["byte_level", "prepend", "metaspace"])
def test_characters_split_over_tokens_come_whole(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    seen, raw = "", b""
    for token_id in ids:
        seen += detokenizer.push(token_id)
        raw += tokenizer.token_bytes(token_id)
        # Exactly the characters that are complete so far.
        assert seen == raw.removeprefix(b" ").decode("utf-8", "ignore")
    assert seen == text
    assert len(ids) > len(text) or kind != "byte_level" or text == "中文"


def test_an_unfinished_character_is_replaced_at_the_end_only():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    assert chunks_of(tokenizer, ids[:-1]) == [""] * (len(ids) - 1) + ["\ufffd"]
    assert chunks_of(tokenizer, [*ids[:-1], *tokenizer.encode("a")])[-2:] == ["\ufffda", ""]


def test_the_first_space_alone_is_dropped():
    tokenizer = TOKENIZERS["prepend"]
    the = tokenizer.encode("the")
    assert decode(tokenizer, [*the, *the]) == "the the"
    # Special tokens are no beginning, and the byte token of a space counts as a space.
    assert decode(tokenizer, [1, *the]) == "the"
    space = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b" ")
    assert decode(tokenizer, [space, space, *the]) == "  the"
    assert decode(TOKENIZERS["byte_level"], TOKENIZERS["byte_level"].encode(" the")) == " the"


def test_an_id_without_a_token_has_no_text():
    """Embeddings may be padded beyond the tokenizer's vocabulary, and a model may choose such an id."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ab")
    assert decode(tokenizer, [ids[0], tokenizer.vocab_size + 7, *ids[1:]]) == "ab"
