"""Warming: every product of a model or list is launched once in each form, and what is none is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from w4a16 import inputs, random_weight

from repro.kernels import linear, w4a16_gemm, w8a8, warm


def test_warming_launches_every_form_once_at_every_number_of_tokens(monkeypatch):
    called = []
    real = linear.wna16
    monkeypatch.setattr(linear, "wna16", lambda x, packed: called.append((x.shape[0], packed.rows)) or real(x, packed))
    one, other = (
        inputs(1)[1],
        w4a16_gemm.random_weight({"N": 32, "K": 256, "bits": 4, "group": 64, "symmetric": False, "seed": 0}),
    )
    warm.warm([one, inputs(1)[1], other], (1, 20))
    assert called == [(1, one.rows), (20, one.rows), (1, 32), (20, 32)]
    called.clear()
    warm.warm(one)
    assert [count for count, _ in called] == list(warm.COUNTS)
    with pytest.raises(ValueError, match="wna16: x must be a contiguous float16 or bfloat16"):
        warm.warm(one, dtype=torch.float32)


@pytest.fixture
def launched(monkeypatch):
    """What `warm` launches: rows, columns and bits of a weight, and the number of tokens."""
    called, products = [], (linear.wna16, w8a8.w8a8)

    def packed_product(x, packed):
        called.append((packed.rows, packed.columns, packed.bits, packed.group, packed.symmetric, len(x)))
        return products[0](x, packed)

    def int8_product(x, codes, scales):
        called.append((*codes.shape, "w8a8", len(x)))
        return products[1](x, codes, scales)

    monkeypatch.setattr(linear, "wna16", packed_product)
    monkeypatch.setattr(w8a8, "w8a8", int8_product)
    return called


def test_bare_shapes_are_warmed_in_the_form_that_is_named(launched):
    warm.warm([(48, 256), (48, 256), (32, 128)], (1, 20), device="cpu")
    form = (4, 128, False)
    assert launched == [(48, 256, *form, 1), (48, 256, *form, 20), (32, 128, *form, 1), (32, 128, *form, 20)]
    launched.clear()
    for form in ("w8a8", "w8-pc", "w2-g64-sym"):
        warm.warm([(48, 256)], (3,), form=form, device="cpu")
    assert launched == [(48, 256, "w8a8", 3), (48, 256, 8, 0, False, 3), (48, 256, 2, 64, True, 3)]
    for form, wrong in (("w3-g128", "unknown form 'w3-g128'"), ("w4-g128", "128")):
        with pytest.raises(ValueError, match=wrong):
            warm.warm([(48, 200)], form=form, device="cpu")


def test_one_product_needs_no_list(launched):
    for one in ((48, 256), [(48, 256)], ((48, 256),)):
        warm.warm(one, (3,), device="cpu")
        assert launched == [(48, 256, 4, 128, False, 3)]
        launched.clear()
    pair = w8a8.quantize_weight(torch.randn(32, 64))
    for one in (pair, [pair], (pair,)):
        warm.warm(one, (3,))
        assert launched == [(32, 64, "w8a8", 3)]
        launched.clear()


def test_weights_in_lists_and_dicts_of_a_module_are_found(launched):
    model = torch.nn.Module()
    model.experts, model.by_name = [inputs(1)[1]], {"up": random_weight(48, 512, 4, 64, seed=1)}
    warm.warm(model, (3,))
    assert [(columns, count) for _, columns, *_, count in launched] == [(256, 3), (512, 3)]


@pytest.mark.parametrize("nothing", [torch.nn.Linear(8, 8), [], ()], ids=["dense", "list", "tuple"])
def test_nothing_to_warm_is_said(nothing):
    with pytest.raises(
        ValueError, match="^warm: no packed weight and no int8 codes with scales; give weights, or shapes"
    ):
        warm.warm(nothing)


def test_an_engine_and_its_decoder_are_models(launched):
    """Neither is a module: products are in the decoder's blocks, and its head is one."""
    product, head = torch.nn.Module(), torch.nn.Module()
    product.packed, head.packed = inputs(1)[1], random_weight(48, 512, 4, 64, seed=1)
    decoder = SimpleNamespace(blocks=(SimpleNamespace(qkv=product, eps=1e-5),), head=head)
    for model in (decoder, SimpleNamespace(model=decoder)):
        warm.warm(model, (3,))
        assert [(columns, count) for _, columns, *_, count in launched] == [(256, 3), (512, 3)]
        launched.clear()


@pytest.mark.parametrize("wrong", ["pocket-10m", None, 7, (48, 256, 3), [(48.0, 256)], (-48, 256), ["48x256"]])
def test_what_is_no_product_is_refused_by_name(wrong, launched):
    with pytest.raises(ValueError, match="^warm: .* is no (product; give a model|shape; give rows and columns)"):
        warm.warm(wrong, device="cpu")
    assert not launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_shape_is_not_warmed_on_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match=r"^warm: this machine has no CUDA device, where \(48, 256\) is to be warmed"):
        warm.warm((48, 256))


@pytest.mark.parametrize("counts", [(), (0,), (1, -1), "8", 8, (1.5,)])
def test_numbers_of_tokens_are_at_least_one(counts, launched):
    with pytest.raises(ValueError, match="^warm: counts of tokens are "):
        warm.warm((48, 256), counts, device="cpu")
    assert not launched


def test_a_model_is_warmed_with_packed_and_int8_weights(launched):
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Module(), torch.nn.Module()])
    model[1].packed = inputs(1)[1]
    codes, scales = w8a8.quantize_weight(torch.randn(32, 64))
    model[2].register_buffer("codes", codes)
    model[2].register_buffer("scales", scales)
    warm.warm(model, (2,))
    assert launched == [(48, 256, 4, 64, False, 2), (32, 64, "w8a8", 2)]
    launched.clear()
    warm.warm([(codes, scales), (codes.clone(), scales), model[1].packed], (2,))
    assert launched == [(32, 64, "w8a8", 2), (48, 256, 4, 64, False, 2)]
