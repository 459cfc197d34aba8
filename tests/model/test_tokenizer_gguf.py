import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from drumline.model.detokenize import decode
from drumline.model.errors import ModelLoadError
from drumline.model.gguf_tokenizer import tokenizer_from_gguf
from tests.tiny_tokenizers import spec_text

texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \nabcthe▁é中👋‍1")), max_size=30)
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6


def llama_metadata() -> dict[str, object]:
    """The trained SentencePiece-like vocabulary as a GGUF file tells it: scores instead of merges."""
    vocab = json.loads(spec_text("prepend"))["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [1] * len(tokens)
    types[:3] = [UNKNOWN, CONTROL, CONTROL]
    types[3:259] = [BYTE] * 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


LLAMA = llama_metadata()
llama = tokenizer_from_gguf(LLAMA)


def sentencepiece(text: str, prefix: bool = True) -> list[int]:
    """The rule itself: while two neighbours join to a piece, join those whose piece scores highest, leftmost first."""
    tokens = LLAMA["tokenizer.ggml.tokens"]
    pieces = {token: index for index, token in enumerate(tokens) if LLAMA["tokenizer.ggml.token_type"][index] == 1}
    symbols = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        joints = [(pieces[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not joints:
            break
        _, at = min(joints)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [pieces[symbol]] if symbol in pieces else [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return ids


@given(text=texts)
def test_the_sentencepiece_kind_follows_its_rule(text):
    ids = llama.encode(text)
    assert ids == sentencepiece(text)
    assert decode(llama, ids) == text.replace("▁", " ")


def test_the_sentencepiece_kind_spells_out_what_it_lacks():
    ids = llama.encode("the 🦊")
    assert [llama.token_bytes(token_id) for token_id in ids][-4:] == [b"\xf0", b"\x9f", b"\xa6", b"\x8a"]
    assert decode(llama, llama.encode("<0x41> <s>")) == "<0x41> <s>"
    assert llama.encode_template("<s>the</s>") == [1, *llama.encode("the"), 2]
    assert 1 not in llama.encode("<s>")


def test_no_space_is_prepended_where_the_file_says_so():
    bare = tokenizer_from_gguf(LLAMA | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("the sun") == sentencepiece("the sun", prefix=False)
    assert (bare.strips_leading_space, llama.strips_leading_space) == (False, True)
    assert decode(bare, bare.encode(" x")) == decode(llama, llama.encode(" x")) == " x"


def gpt2_metadata(pre: str | None, merges: list[str], **more: object) -> dict[str, object]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "<bos>", "<eot>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


MERGES = ["1 2", "3 4", "12 34", "12 3", "L L", "' LL", "l o", "lo W", ". Ċ", "Ġ Ġ", "ĠĠ 1"]


@pytest.mark.parametrize(
    ("pre", "digits", "shouted", "camel", "line_end", "spaces"),
    [
        (None, "1234", "' LL", "loW", ". \n", "_ _ 1"),
        ("gpt-2", "1234", "' LL", "loW", ". \n", "_ _ 1"),
        ("smollm", "1 2 3 4", "' LL", "loW", ". \n", "__ 1"),
        ("starcoder", "1 2 3 4", "' LL", "loW", ". \n", "__ 1"),
        ("llama-bpe", "123 4", "'LL", "loW", ".\n", "_ _ 1"),
        ("qwen2", "1 2 3 4", "'LL", "loW", ".\n", "_ _ 1"),
        ("tekken", "1 2 3 4", "'LL", "lo W", ".\n", "_ _ 1"),
        ("deepseek-llm", "1 2 3 4", "' LL", "loW", ". \n", "__ 1"),
        ("deepseek-coder", "1 2 3 4", "' LL", "loW", ". \n", "__ 1"),
    ],
)
def test_pre_tokenizers(pre, digits, shouted, camel, line_end, spaces):
    tokenizer = tokenizer_from_gguf(gpt2_metadata(pre, MERGES))

    def pieces(text: str) -> str:
        return " ".join(tokenizer.token_bytes(i).decode().replace(" ", "_") for i in tokenizer.encode(text))

    assert pieces("1234") == digits
    assert pieces("'LL") == shouted
    assert pieces("loW") == camel
    assert pieces(".\n") == line_end
    assert pieces("  1") == spaces


def test_settings_of_the_byte_level_kind():
    plain = tokenizer_from_gguf(gpt2_metadata("gpt-2", MERGES, eos_token_id=3, eot_token_id=268, eom_token_id=3))
    assert (plain.eos_ids, plain.adds_bos, plain.strips_leading_space) == ((3, 268), False, False)
    assert tokenizer_from_gguf(gpt2_metadata("llama-bpe", MERGES)).adds_bos
    assert not tokenizer_from_gguf(gpt2_metadata("llama-bpe", MERGES, add_bos_token=False)).adds_bos
    assert tokenizer_from_gguf(gpt2_metadata("gpt-2", MERGES, add_bos_token=True)).adds_bos
    assert llama.adds_bos
    assert plain.special_tokens == ("<bos>", "<eot>", "<tool>")
    assert [plain.token_bytes(plain.vocab_size - back) for back in (3, 2, 1)] == [b"", b"", b"<tool>"]


def test_a_whole_word_of_the_vocabulary_is_one_token_where_merges_are_ignored():
    words = gpt2_metadata("llama-bpe", MERGES)
    words["tokenizer.ggml.tokens"][-1] = "cab"
    words["tokenizer.ggml.token_type"][-1] = 1
    whole = len(words["tokenizer.ggml.tokens"]) - 1
    assert tokenizer_from_gguf(words).encode("cab") == [whole]
    assert len(tokenizer_from_gguf(words | {"tokenizer.ggml.pre": "qwen2"}).encode("cab")) == 3
    # A control token of that spelling stays out of ordinary text all the same.
    words["tokenizer.ggml.token_type"][-1] = CONTROL
    marked = tokenizer_from_gguf(words)
    assert whole not in marked.encode("cab")
    assert marked.encode_template("cab") == [whole]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.tokens is missing"),
        (LLAMA | {"tokenizer.ggml.model": "t5"}, "'t5' is not served"),
        (LLAMA | {"tokenizer.ggml.scores": [0.0]}, r"scores has 1 entries for \d+ tokens"),
        (LLAMA | {"tokenizer.ggml.scores": None}, "scores is missing"),
        (LLAMA | {"tokenizer.ggml.token_type": [1]}, r"token_type has 1 entries for \d+ tokens"),
        (LLAMA | {"tokenizer.ggml.eos_token_id": 99_999}, "99999 is outside"),
        (LLAMA | {"tokenizer.ggml.unknown_token_id": 99_999}, "unknown_token_id 99999"),
        (LLAMA | {"tokenizer.ggml.bos_token_id": "one"}, "bos_token_id 'one'"),
        (gpt2_metadata("never-heard-of", MERGES), "'never-heard-of' is not served"),
        (gpt2_metadata("gpt-2", MERGES) | {"tokenizer.ggml.merges": None}, "merges is missing"),
        (gpt2_metadata("gpt-2", MERGES) | {"tokenizer.ggml.merges": ["q q"]}, "out of vocabulary"),
        (gpt2_metadata("gpt-2", MERGES) | {"tokenizer.ggml.merges": ["qq"]}, "'qq' is not two pieces"),
    ],
)
def test_what_is_not_served_is_refused_by_name(metadata, message):
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_from_gguf(metadata)
