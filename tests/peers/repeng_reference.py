"""What repeng makes of the same pairs, written to files; it runs in repeng's own environment, without steerlab.

Usage: ``python repeng_reference.py PAIRS.json MODEL OURS.gguf OUT [MODEL OURS.gguf OUT …]``

PAIRS.json is ``{"pairs": [[positive, negative], …], "text": …}``, OURS.gguf a control vector that steerlab wrote. In
the folder OUT come ``arrays.npz`` and, as repeng exports them, ``pca_diff.gguf`` and ``pca_center.gguf``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from repeng import ControlModel, ControlVector, DatasetEntry
from repeng.extract import batched_get_hiddens
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(given: dict[str, Any], model_path: str, ours_path: str, out: str) -> None:
    """Writes what the tests compare with."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    dataset = [DatasetEntry(positive, negative) for positive, negative in given["pairs"]]
    arrays = {}
    for method in ("pca_diff", "pca_center"):
        vector = ControlVector.train(model, tokenizer, dataset, method=method, batch_size=12)
        vector.export_gguf(Path(out) / f"{method}.gguf")
        arrays |= {f"{method}.{layer}": row for layer, row in vector.directions.items()}
    texts = [text for pair in given["pairs"] for text in pair]
    layers = list(range(model.config.num_hidden_layers))
    hiddens = batched_get_hiddens(model, tokenizer, texts, layers, 12)
    arrays |= {f"hidden.{layer}": rows for layer, rows in hiddens.items()}
    ours = ControlVector.import_gguf(ours_path)
    arrays |= {f"ours.{layer}": row for layer, row in ours.directions.items()}
    arrays["ours.model_hint"] = np.array(ours.model_type)
    ids = tokenizer(given["text"], return_tensors="pt").input_ids
    with torch.no_grad():
        arrays["logits.plain"] = model(ids).logits[0].numpy()
        steered = ControlModel(model, list(ours.directions))
        steered.set_control(ours, 1.0)
        arrays["logits.steered"] = steered(ids).logits[0].numpy()
    np.savez(Path(out) / "arrays.npz", **arrays)


if __name__ == "__main__":
    pairs = json.loads(Path(sys.argv[1]).read_text())
    for start in range(2, len(sys.argv), 3):
        main(pairs, *sys.argv[start : start + 3])
