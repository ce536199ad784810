"""The mask of one token per row: the one that transformers makes, in fewer operations."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface, LlamaConfig, StaticCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

from steerlab.engines.lens._decode_attention import decode_mask


class Counting(TorchDispatchMode):
    """Counts operations that compute."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket.__name__ not in ("unsqueeze", "slice", "expand", "view", "detach", "select")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_it_is_sdpas_mask(make, n_tokens):
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, sliding_window=2)
    cache = StaticCache(config=LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1), max_cache_len=9)
    cache.update(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), 0)
    seen = torch.ones(2, 9, dtype=torch.long)
    seen[1, :2] = 0
    found, counts = [], []
    for name, function in (("plain", sdpa_mask), ("ours", decode_mask)):
        AttentionMaskInterface.register(name, function)
        config._attn_implementation = name
        with Counting() as counting:
            found.append(make(config, torch.zeros(2, n_tokens, 8), seen, past_key_values=cache))
        counts.append(counting.n)
    assert found[0].shape == (2, 1, n_tokens, 9)
    assert torch.equal(*found)
    assert 0 < found[0].sum() < found[0].numel()
    assert (counts[1] <= counts[0] // 2) == (make is create_causal_mask and n_tokens == 1), counts
