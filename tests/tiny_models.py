"""Tiny random models with real tokenizers, made on the spot and the same every time."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"

SENTENCES = [
    "The ferry leaves the harbour at seven and comes back before noon.",
    "She opened the window, because the room was warm and the street was quiet.",
    "Nobody knew why the old clock had stopped, nor when it would run again.",
    "I really liked the soup; the bread was stale and the service was slow.",
    "Two plus two equals four, and ten minus 3 equals 7.",
    "Where did you put the keys? They were on the table this morning!",
    "What a wonderful, happy day it was, and what a terrible, sad evening.",
    "Übung macht den Meister – naïve café, 東京, ✓.",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def build_tiny_tokenizer(*, chat: bool, context: int = 256) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of 384 tokens that adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=context
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


SPACING_KINDS = ("llama2", "llama2_metaspace", "gemma", "t5", "bytes", "bytes_prefixed", "word_piece")


def build_spacing_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer that treats the space before a text as a family of models does.

    Args:
        kind: One of `SPACING_KINDS`. The Llama-2 and Mistral kinds put a space before every text (by their normaliser,
            or by their pre-tokenizer) and add BOS; T5's and `bytes_prefixed` put one too; `word_piece` forgets spaces.
    """
    data = [*SENTENCES, *["The capital of France is Paris yes an yes"] * 9]
    tokenizer, trainer = _SPACING[kind]()
    tokenizer.train_from_iterator(data, trainer)
    if kind in _SENTENCE_PIECE:
        tokenizer = _without_added_bytes(tokenizer)
        tokenizer.normalizer, tokenizer.pre_tokenizer = _SENTENCE_PIECE[kind]
        strip = [] if kind == "gemma" else [decoders.Strip(" ", 1, 0)]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK, model_max_length=256
    )


_MARKS = {"special_tokens": [BOS, EOS, PAD, UNK], "show_progress": False}
_SENTENCE_PIECE = {
    "llama2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "llama2_metaspace": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "gemma": (normalizers.Replace(" ", "▁"), None),
}


def _byte_fallback() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE(unk_token=UNK, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fallback = {"special_tokens": [BOS, EOS, PAD, UNK, *(f"<0x{byte:02X}>" for byte in range(256))]}
    return tokenizer, trainers.BpeTrainer(vocab_size=640, **{**_MARKS, **fallback})


def _without_added_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the bytes as ordinary tokens: the trainer takes them only as special ones."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(spec))


def _metaspace_unigram() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(vocab_size=200, unk_token=UNK, **_MARKS)


def _byte_level(prefixed: bool) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefixed)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, **_MARKS)


def _word_piece() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=300, **_MARKS)


_SPACING: dict[str, Callable[[], tuple[Tokenizer, trainers.Trainer]]] = {
    **dict.fromkeys(_SENTENCE_PIECE, _byte_fallback),
    "t5": _metaspace_unigram,
    "bytes": lambda: _byte_level(False),
    "bytes_prefixed": lambda: _byte_level(True),
    "word_piece": _word_piece,
}


def build_chain(directory: Path, tokenizer: PreTrainedTokenizerFast, chain: list[int], **overrides) -> Path:
    """Save a Llama that goes from each token of a chain to the next, whatever stands before.

    Its layers add nothing, so that the last token's embedding alone decides.

    Args:
        directory: Where to save it.
        tokenizer: Its tokenizer.
        chain: Token ids; the first may be a prompt's last token.
        **overrides: Other values for the `LlamaConfig`.
    """
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    config = LlamaConfig(**{"max_position_embeddings": 256, **sizes, **heads, **_token_ids(tokenizer), **overrides})

    def make(config: PretrainedConfig) -> PreTrainedModel:
        model = LlamaForCausalLM(config)
        embeddings = torch.randn(config.vocab_size, config.hidden_size)
        head = 0.05 * torch.randn(config.vocab_size, config.hidden_size)
        for token, following in itertools.pairwise(chain):
            head[following] += embeddings[token]
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(embeddings)
            model.lm_head.weight.copy_(head)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        return model

    return _save(make, config, tokenizer, directory, 0)


def build_tiny_llama(directory: Path, *, seed: int = 0, context: int = 256, **overrides) -> Path:
    """Save a Llama of 4 layers, width 64, 4 heads and 2 key-value heads, with tokenizer and chat template.

    Args:
        directory: Where to save it.
        seed: Seed of the weights.
        context: The model's context length.
        **overrides: Other values for the `LlamaConfig`.

    Returns:
        The directory.
    """
    tokenizer = build_tiny_tokenizer(chat=True, context=context)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    more = {"max_position_embeddings": context, "initializer_range": 0.2, **_token_ids(tokenizer), **overrides}
    config = LlamaConfig(**{**sizes, **heads, **more})
    return _save(LlamaForCausalLM, config, tokenizer, directory, seed)


def build_tiny_gpt2(directory: Path, *, seed: int = 0, context: int = 256, **overrides) -> Path:
    """Save a GPT-2 of 4 layers, width 64 and 4 heads, with a tokenizer that has no chat template.

    Args:
        directory: Where to save it.
        seed: Seed of the weights.
        context: The model's context length.
        **overrides: Other values for the `GPT2Config`.

    Returns:
        The directory.
    """
    tokenizer = build_tiny_tokenizer(chat=False, context=context)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": context}
    config = GPT2Config(**{**sizes, "initializer_range": 0.2, **_token_ids(tokenizer), **overrides})
    return _save(GPT2LMHeadModel, config, tokenizer, directory, seed)


# One tiny model per family, and for families with a sliding window one more whose window is shorter than most prompts.
# Per name: configuration class, and what differs from `_SHARED`.
_WIDE, _NARROW = 128, 6
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "gpt2": (GPT2Config, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_narrow": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": _NARROW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "gemma2": (Gemma2Config, {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": _WIDE}),
    "gemma2_narrow": (Gemma2Config, {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": _NARROW}),
    "gemma3": (
        Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": _WIDE, "layer_types": _ALTERNATING},
    ),
    "gemma3_narrow": (
        Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": _NARROW, "layer_types": _ALTERNATING},
    ),
    "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": _WIDE}),
    "mistral_narrow": (MistralConfig, {"head_dim": 16, "sliding_window": _NARROW}),
    "olmo2": (Olmo2Config, {}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "phi3_narrow": (Phi3Config, {"sliding_window": _NARROW}),
}
# Families that differ in cache, mask or positions: state spaces, linear attention, recurrence, ALiBi, no cache at all.
UNUSUAL_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 64, "context_length": 128}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "num_key_value_heads": 1,
            "lru_width": 64,
            "attention_window_size": 64,
            "w_init_variance_scale": 1.0,
            "block_types": ["recurrent", "attention"],
            "head_dim": 16,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "BambaConfig",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mamba": ("MambaConfig", {"state_size": 8}),
    "mamba2": ("Mamba2Config", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "falcon_mamba": ("FalconMambaConfig", {"state_size": 8}),
    "openai-gpt": ("OpenAIGPTConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
}
_STATE_SPACES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_GPT_NAMES = ("hidden_size", "num_hidden_layers", *_STATE_SPACES)
_LACKING = {
    "rwkv": ("num_attention_heads", "num_key_value_heads"),
    "mamba": _STATE_SPACES,
    "mamba2": _STATE_SPACES,
    "falcon_mamba": _STATE_SPACES,
    "openai-gpt": (*_GPT_NAMES, "tie_word_embeddings"),
    "bloom": _STATE_SPACES,
    "mpt": (*_GPT_NAMES, "tie_word_embeddings"),
    "gpt2": ("num_key_value_heads", "intermediate_size"),
    "gpt_neox": ("num_key_value_heads",),
}
_SHARED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}


def build_tiny_family(directory: Path, name: str, *, seed: int = 0, context: int = 128) -> Path:
    """Save a model of 3 layers and width 64 of one of the `FAMILIES`, with tokenizer.

    Args:
        directory: Where to save it.
        name: A key of `FAMILIES` or `UNUSUAL_FAMILIES`; these have 2 layers.
        seed: Seed of the weights.
        context: The model's context length.

    Returns:
        The directory.
    """
    if name in UNUSUAL_FAMILIES:
        kind, options = UNUSUAL_FAMILIES[name]
        config_class, options = getattr(transformers, kind), {"num_hidden_layers": 2, **options}
    else:
        config_class, options = FAMILIES[name]
    values = {key: value for key, value in {**_SHARED, **options}.items() if key not in _LACKING.get(name, ())}
    return save_tiny(AutoModelForCausalLM.from_config, config_class, directory, seed=seed, context=context, **values)


def save_tiny(
    make: Callable[[PretrainedConfig], PreTrainedModel],
    config_class: type[PretrainedConfig],
    directory: Path,
    *,
    seed: int = 0,
    context: int = 256,
    chat: bool = False,
    **values: Any,
) -> Path:
    """Save a model of any family with a tokenizer.

    Args:
        make: Makes the model from its configuration.
        config_class: The configuration's class.
        directory: Where to save it.
        seed: Seed of the weights.
        context: The model's context length.
        chat: Whether the tokenizer has a chat template.
        **values: Further values for the configuration.

    Returns:
        The directory.
    """
    tokenizer = build_tiny_tokenizer(chat=chat, context=context)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": context}
    config = config_class(**{"initializer_range": 0.2, **sizes, **_token_ids(tokenizer), **values})
    return _save(make, config, tokenizer, directory, seed)


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save(
    make: Callable[[PretrainedConfig], PreTrainedModel],
    config,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    seed: int,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config)
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
