"""Tiny random models of the families in the shipped table, large enough for vLLM's attention on a CPU."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM

from tests.tiny_models import save_tiny

LAYERS = 3
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
LACKING = object()
"""Of a value that a family's configuration does not have."""

_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 64}
_LINEAR = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
N_EXPERTS = 4
_EXPERTS = {"num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "gpt2": ("GPT2Config", {"num_key_value_heads": LACKING, "intermediate_size": LACKING}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "tie_word_embeddings": True}),
    "gemma3_text": ("Gemma3TextConfig", {**_GEMMA, **_TWO_KINDS}),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": 64}),
    "olmo2": ("Olmo2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": LACKING}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": N_EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **_EXPERTS}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 32, "num_local_experts": N_EXPERTS, "num_experts_per_tok": 2, **_TWO_KINDS},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            "head_dim": 32,
            "global_head_dim": 32,
            **_TWO_KINDS,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_next": ("Qwen3NextConfig", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": N_EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",  # of real ones, read by vLLM
            "scoring_func": "sigmoid",
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "olmo3": ("Olmo3Config", _TWO_KINDS),
    "smollm3": ("SmolLM3Config", {}),
    "cohere2": ("Cohere2Config", {**_TWO_KINDS, "tie_word_embeddings": True}),
    "granite": ("GraniteConfig", {}),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 256, "word_embed_proj_dim": 128, "num_key_value_heads": LACKING}),
    "bloom": ("BloomConfig", {"n_head": 4, "num_key_value_heads": LACKING, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2Config", {}),
}
"""By Hugging Face's `model_type`: the configuration's class, and values beside the shared ones."""


REAL_HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "deepseek_v3": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
"""Sizes of real models, for which alone some of vLLM's kernels are made."""


def build_family(directory: Path, family: str, *, real_heads: bool = False, **values: Any) -> Path:
    """Saves a model of a family with a tokenizer, and returns its directory.

    Args:
        directory: for it.
        family: one of `MODELS`.
        real_heads: whether its heads have the sizes of real models where vLLM's kernels take no others.
        values: of the configuration, in place of those of `MODELS`.
    """
    kind, options = MODELS[family]
    options = {**options, **(REAL_HEADS.get(family, {}) if real_heads else {}), **values}
    return save_tiny(
        AutoModelForCausalLM.from_config,
        getattr(transformers, kind),
        directory,
        context=256,
        **{name: value for name, value in {**_SIZES, **options}.items() if value is not LACKING},
    )
