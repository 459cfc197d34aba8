import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from drumline.model.bpe_tokenizer import BPETokenizer, load_tokenizer_json
from drumline.model.detokenize import decode
from drumline.model.errors import InvalidRequest, ModelLoadError
from tests.tiny_tokenizers import CORPUS, KINDS, spec_text, write_folder

HAND_PICKED = [
    "",
    " ",
    "   \n\t  x",
    "The capital of France is Paris.",
    " leading space",
    "▁ a mark of its own ▁▁",
    "👩‍👩‍👧‍👦 and 👋🏽",
    "中文字 日本語 한국어",
    "café naïve",
    "<0x41> is no byte",
    "nul \0 and \x7f",
    "for i in range(10):\n\tprint(f'{i:>4}')\r\n",
]
SPECIALS = {
    "byte_level": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"],
    "prepend": ["<unk>", "<s>", "</s>"],
    "metaspace": ["<unk>", "<s>", "</s>"],
}
texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \nabcthe▁é中👋‍1")), max_size=30)


def both(kind: str) -> tuple[BPETokenizer, Tokenizer]:
    return BPETokenizer(json.loads(spec_text(kind))), Tokenizer.from_str(spec_text(kind))


TOKENIZERS = {kind: both(kind) for kind in KINDS}


def plain(reference: Tokenizer, text: str) -> list[int]:
    return reference.encode(text, add_special_tokens=False).ids


def round_trip(kind: str, text: str) -> str:
    """What is left of a text: a mark is a space, and Metaspace prepends none to a text that begins with one."""
    if kind == "byte_level":
        return text
    return text.replace("▁", " ").removeprefix(" " if kind == "metaspace" else "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HAND_PICKED + CORPUS[:4])
def test_hand_picked_text_agrees_with_the_library(kind, text):
    ours, reference = TOKENIZERS[kind]
    ids = ours.encode(text)
    assert ids == plain(reference, text)
    assert decode(ours, ids) == reference.decode(ids) == round_trip(kind, text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_any_text_agrees_with_the_library(kind, text):
    ours, reference = TOKENIZERS[kind]
    ids = ours.encode(text)
    assert ids == plain(reference, text)
    assert decode(ours, ids) == reference.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_templates_agree_with_the_library(kind, data):
    ours, reference = TOKENIZERS[kind]
    text = "".join(data.draw(st.lists(st.one_of(texts, st.sampled_from(SPECIALS[kind])), max_size=6)))
    assert ours.encode_template(text) == plain(reference, text)
    assert list(ours.special_tokens) == SPECIALS[kind]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_special_tokens_in_text_are_text(kind, data):
    ours, reference = TOKENIZERS[kind]
    text = "".join(data.draw(st.lists(st.one_of(texts, st.sampled_from(SPECIALS[kind])), min_size=1, max_size=6)))
    ids = ours.encode(text)
    assert not {reference.token_to_id(special) for special in SPECIALS[kind]} & set(ids)
    assert decode(ours, ids) == round_trip(kind, text)


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_a_special_token_that_merges_could_build_is_not_built(ignore_merges):
    spec = json.loads(spec_text("byte_level"))
    vocab, size = spec["model"]["vocab"], len(spec["model"]["vocab"])
    vocab |= {"zq": size + 1, "zqx": size + 2}
    spec["model"]["merges"] += [["z", "q"], ["zq", "x"]]
    spec["model"]["ignore_merges"] = ignore_merges
    assert BPETokenizer(spec).encode("zqx") == [size + 2]

    markup = dict(spec["added_tokens"][0]) | {"content": "zqx", "id": size + 2}
    guarded = BPETokenizer(spec | {"added_tokens": [*spec["added_tokens"], markup]})
    assert guarded.encode("zqx") == [size + 1, vocab["x"]]
    assert guarded.encode_template("zqx") == [size + 2]

    ordinary = BPETokenizer(spec | {"added_tokens": [*spec["added_tokens"], markup | {"special": False}]})
    assert ordinary.encode("zqx") == [size + 2]  # a word of the vocabulary that was added once more


def test_added_runs_of_white_space_stay_vocabulary():
    reference = Tokenizer.from_str(spec_text("byte_level"))
    reference.add_tokens(["        "])
    ours = BPETokenizer(json.loads(reference.to_str()))
    text = "a        b         c"
    assert ours.encode(text) == plain(reference, text)
    assert reference.token_to_id("        ") in ours.encode(text)
    assert decode(ours, ours.encode(text)) == text
    assert "        " not in ours.special_tokens


@pytest.mark.parametrize(("lstrip", "rstrip"), [(True, False), (False, True), (True, True)])
def test_special_tokens_that_take_white_space_with_them(lstrip, rstrip):
    spec = json.loads(spec_text("byte_level"))
    spec["added_tokens"][2] |= {"lstrip": lstrip, "rstrip": rstrip}
    ours, reference = BPETokenizer(spec), Tokenizer.from_str(json.dumps(spec))
    for text in ("a  <|im_end|> \n b", "<|im_end|>  ", "  <|im_end|>", "<|im_end|> <|im_end|>  <|im_start|> x"):
        assert ours.encode_template(text) == plain(reference, text)


def test_bytes_of_tokens():
    ours, reference = TOKENIZERS["byte_level"]
    assert ours.token_bytes(reference.token_to_id("Ġthe")) == b" the"
    assert ours.token_bytes(2) == b""
    assert ours.token_bytes(reference.token_to_id("<think>")) == b"<think>"  # added, but not a control token
    assert [ours.token_bytes(i) for i in plain(reference, "👋")] == [b"\xf0\x9f", b"\x91\x8b"]
    ours, reference = TOKENIZERS["prepend"]
    assert ours.token_bytes(reference.token_to_id("▁the")) == b" the"
    assert ours.token_bytes(reference.token_to_id("<0xE9>")) == b"\xe9"
    assert (ours.token_bytes(0), ours.token_bytes(1)) == (b"", b"")
    assert ours.strips_leading_space


def test_ids_without_a_token_are_empty():
    spec = json.loads(spec_text("byte_level"))
    tokenizer = BPETokenizer(spec, vocab_size=512)
    assert tokenizer.vocab_size == 512
    assert tokenizer.token_bytes(511) == b""
    assert tokenizer.token_bytes(512) == b""
    assert BPETokenizer(spec).vocab_size == Tokenizer.from_str(spec_text("byte_level")).get_vocab_size()


def test_lone_surrogates_are_refused():
    with pytest.raises(InvalidRequest, match="surrogates"):
        TOKENIZERS["byte_level"][0].encode("a\ud800")


def with_bos_template(kind: str) -> dict:
    spec = json.loads(spec_text(kind))
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return spec


def test_the_settings_beside_the_file(tmp_path):
    folder = write_folder(
        tmp_path,
        with_bos_template("prepend"),
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        generation_config={"eos_token_id": [300, 2]},
        config={"eos_token_id": 301, "bos_token_id": 7, "vocab_size": 500},
    )
    tokenizer = load_tokenizer_json(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (300, 2, 301), 500)
    assert tokenizer.adds_bos
    assert tokenizer.encode("the sun")[0] != 1  # the scheduler puts BOS first, not the tokenizer


@pytest.mark.parametrize(
    ("settings", "bos_id", "adds_bos"),
    [
        ({}, None, False),
        ({"config": {"bos_token_id": 1}}, 1, True),
        ({"generation_config": {"bos_token_id": 2}, "config": {"bos_token_id": 1}}, 2, False),
        ({"special_tokens_map": {"bos_token": "<s>"}}, 1, True),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 1}}, None, False),
        ({"tokenizer_config": {"bos_token": "<s>", "add_bos_token": False}}, 1, False),
        ({"tokenizer_config": {"bos_token": "</s>", "add_bos_token": True}}, 2, True),
    ],
)
def test_bos(tmp_path, settings, bos_id, adds_bos):
    tokenizer = load_tokenizer_json(write_folder(tmp_path, with_bos_template("prepend"), **settings))
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (bos_id, adds_bos)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, {}, "WordPiece"),
        ({"model": {"type": "Unigram", "vocab": []}}, {}, "Unigram"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, {}, "WordPiece"),
        ({"decoder": None}, {}, "none"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 1}}, {}, "strips"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}}, {}, "regular expression"),
        ({"pre_tokenizer": {"type": "Unheard"}}, {}, "tokenizer.json"),
        ({"added_tokens": [{"id": 3}]}, {}, "content"),
        ({}, {"tokenizer_config": {"eos_token": "<none>"}}, "<none>"),
        ({}, {"tokenizer_config": {"add_bos_token": True}}, "no BOS"),
        ({}, {"generation_config": {"eos_token_id": -1}}, "-1 is outside"),
        ({}, {"config": {"bos_token_id": 10_000}}, "10000 is outside"),
        ({}, {"config": []}, "config.json"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, change, settings, message):
    spec = json.loads(spec_text("prepend")) | change
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer_json(write_folder(tmp_path, spec, **settings))


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer.json").write_text(spec_text("prepend")[:-5])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer_json(tmp_path)
    spec = json.loads(spec_text("prepend"))
    spec["model"]["merges"].append(["no such", "piece"])
    with pytest.raises(ModelLoadError, match="out of vocabulary"):
        load_tokenizer_json(write_folder(tmp_path, spec))
