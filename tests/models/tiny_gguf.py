"""A tiny Llama as a quantised GGUF file, written with the gguf package."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Q8, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32


def write_gguf(model: Path, file: Path) -> dict[str, np.ndarray]:
    """Writes a Llama's directory, with its chat template, as a GGUF file with matrices in Q8_0.

    Returns:
        What the file's tensors are in float32, by their names in the directory.
    """
    config = json.loads((model / "config.json").read_text())
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, model, config)
    values = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        array, place = tensor.float().numpy(), name.removesuffix(".weight")
        kind = Q8 if array.ndim == 2 else F32
        values[name] = dequantize(quantize(array, kind), kind)
        part = place.removeprefix("model.layers.").partition(".")[2]
        if part in heads:  # the format turns the halves of a head's rotary pairs into neighbours
            rows = array.reshape(heads[part], 2, -1, array.shape[1])
            array = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
        theirs = WHOLE.get(place) or f"blk.{place.split('.')[2]}.{PARTS[part]}"
        writer.add_tensor(f"{theirs}.weight", quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _add_tokenizer(writer: GGUFWriter, model: Path, config: dict) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    bpe = tokenizer["model"]
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((model / "chat_template.jinja").read_text())
