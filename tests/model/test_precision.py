"""Which formats `load_model`'s options ask for, and what `auto` means on different machines."""

import logging

import pytest
import torch

from drumline.model.backends import products
from drumline.model.errors import ModelLoadError
from drumline.model.precision import number_formats

CPU, GPU = torch.device("cpu"), torch.device("cuda")
F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "expected"),
    [
        ("float32", None, ("float32", F32, F32)),
        ("float32", "bfloat16", ("float32", F32, BF16)),
        ("bfloat16", None, ("bfloat16", BF16, BF16)),
        ("bfloat16", "float32", ("bfloat16", BF16, F32)),
        ("int8", None, ("int8", F32, BF16)),
        ("int8", "float32", ("int8", F32, F32)),
        ("int8", "int8", ("int8", F32, INT8)),
    ],
)
@pytest.mark.parametrize("device", [CPU, GPU])
def test_keys_and_values_follow_the_precision_unless_they_are_named(
    precision: str, kv_dtype: str | None, expected: tuple[str, torch.dtype, torch.dtype], device: torch.device
) -> None:
    formats = number_formats(precision, kv_dtype, device)
    assert (formats.precision, formats.dtype, formats.kv_dtype) == expected


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "message"),
    [
        ("float16", None, "precision 'float16' is unknown; known: auto, int8, float32, bfloat16"),
        ("int8", "float16", "kv_dtype 'float16' is unknown; known: float32, bfloat16, int8"),
        ("float32", "int8", "kv_dtype int8 needs precision int8, not float32"),
        ("bfloat16", "int8", "kv_dtype int8 needs precision int8, not bfloat16"),
    ],
)
def test_what_is_not_served_is_named(precision: str, kv_dtype: str | None, message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        number_formats(precision, kv_dtype, CPU)
    assert str(caught.value) == message


@pytest.fixture
def no_exact_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which no integer product passes its check."""

    def choose_product() -> None:
        raise products.NoExactProduct("every product saturates")

    monkeypatch.setattr(products, "choose_product", choose_product)


def test_auto_is_int8_where_a_product_is_exact(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(products, "choose_product", products.PanelProduct)
    assert number_formats("auto", None, CPU) == number_formats("int8", None, CPU)
    assert number_formats("auto", "int8", CPU).kv_dtype == INT8
    assert not caplog.records


def test_auto_is_no_int8_where_exactness_would_cost_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(products, "choose_product", products.FloatProduct)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert number_formats("auto", None, CPU) == number_formats("float32", None, CPU)
    assert "precision int8 would be exact, but slower" in caplog.text
    assert number_formats("int8", None, CPU).precision == "int8"


@pytest.mark.usefixtures("no_exact_product")
@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512_bf16": True, "avx2": True}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16"),
        ({"bf16": True, "neon": True}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": False, "avx2": True}, "float32"),
        ({}, "float32"),
    ],
)
def test_auto_falls_back_and_says_why(
    features: dict[str, bool], expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert number_formats("auto", None, CPU) == number_formats(expected, None, CPU)
    assert caplog.record_tuples == [
        (
            "drumline",
            logging.WARNING,
            f"precision auto is {expected}: int8 is not exact on this CPU (every product saturates)",
        )
    ]
    with pytest.raises(ModelLoadError, match=f"kv_dtype int8 needs precision int8, not {expected}"):
        number_formats("auto", "int8", CPU)


@pytest.mark.parametrize(("native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_on_a_gpu_is_bfloat16_where_it_has_it(
    native: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert number_formats("auto", None, GPU) == number_formats(expected, None, GPU)
