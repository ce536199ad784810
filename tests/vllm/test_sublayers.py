"""Which parts of a layer hold what a site names, told from what one pass showed."""

import pytest
import torch

from steerlab.engines.vllm._worker.sublayers import PartSeen, PartsSeen, Place, adds_up, find_places


def a_layer(dtype, *, scale, share):
    """What a layer shows that adds two outputs to a stream of some size, and rounds each sum.

    Args:
        dtype: of everything.
        scale: of the stream.
        share: of the stream that the MLP takes back, so that large numbers cancel.
    """
    draw = torch.Generator().manual_seed(0)
    before = (scale * torch.randn(8, 64, generator=draw)).to(dtype)
    attention = torch.randn(8, 64, generator=draw).to(dtype)
    middle = before + attention
    mlp = (torch.randn(8, 64, generator=draw) - share * middle.float()).to(dtype)
    parts = [
        PartSeen("norm", {0: before}, torch.nn.functional.normalize(before)),
        PartSeen("attention", {0: before / scale}, attention),
        PartSeen("second_norm", {0: attention, 1: before}, torch.nn.functional.normalize(middle)),
        PartSeen("mlp", {0: middle / scale}, mlp),
    ]
    return PartsSeen(parts), before, middle + mlp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_sites_are_found_whatever_the_size_of_the_stream(dtype, scale, share):
    found = find_places(*a_layer(dtype, scale=scale, share=share))
    assert found == {
        "attn_out": Place("attention"),
        "mlp_out": Place("mlp"),
        "resid_mid": Place("second_norm", (0, 1)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_a_layer_that_adds_something_else_has_no_such_sites(dtype, scale):
    seen, before, after = a_layer(dtype, scale=scale, share=0.0)
    draw = torch.Generator().manual_seed(1)
    more = torch.randn(after.shape, generator=draw).to(dtype)
    assert find_places(seen, before, after + more / 4) == {}  # a fourth of what either part adds
    assert find_places(seen, before, (after + (seen.parts[1].output / 4)).to(dtype)) == {}  # one part comes scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_in_another_order_are_the_same(dtype):
    draw = torch.Generator().manual_seed(0)
    before = (60 * torch.randn(8, 64, generator=draw)).to(dtype)
    attention, mlp = torch.randn(8, 64, generator=draw).to(dtype), (0.3 - before)  # what is left is small
    step = torch.full_like(before, 0.75)
    rounded = (before + (attention + step)) + (mlp + step)
    assert adds_up([before, attention, mlp, 2 * step], rounded)
    assert not adds_up([before, attention, mlp, step], rounded)


def test_what_is_not_finite_adds_up_to_nothing():
    one = torch.ones(2, 3)
    assert adds_up([one, one], 2 * one)
    assert not adds_up([one, one * torch.nan], 2 * one)
    assert not adds_up([one, one * torch.inf], one * torch.inf)
