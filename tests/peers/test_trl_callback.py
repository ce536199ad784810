"""The callback in a real GRPO run of a tiny model, to be run by `make test-peers` in its own environment."""

import importlib.util
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steerlab.core.errors import InputError
from steerlab.sequences.trainers.trl import PolicyEntropyCallback

missing = importlib.util.find_spec("trl") is None
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError("not installed: trl")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(missing, reason="trl not in this environment; `make test-peers` makes one with it"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def trained(tiny_llama_path, tmp_path):
    """Runs the trainer with the callback, and gives its log."""

    def train(callback_options=None, **options):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(tiny_llama_path)
        config = GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            **options,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["The ferry leaves", "Two plus two"] * 8}),
            processing_class=tokenizer,
        )
        trainer.add_callback(PolicyEntropyCallback(trainer, **(callback_options or {})))
        trainer.train()
        return [entry for entry in trainer.state.log_history if "policy/rb_entropy" in entry]

    return train


def test_it_logs_what_the_trainer_computes_itself(trained):
    rows = trained(max_steps=2, temperature=0.8, steps_per_generation=1, learning_rate=1e-3)
    assert len(rows) == 2
    for row in rows:
        assert row["policy/rb_entropy"] == pytest.approx(row["entropy"], rel=1e-3)
        assert row["policy/naive_entropy"] > 0
        assert row["policy/outside_nucleus"] == 0
        assert row["policy/ratio_outside"] == 0  # drawn by these very parameters
        assert row["policy/ratio_ess"] == pytest.approx(1)


def test_responses_grow_old(trained):
    rows = trained(max_steps=4, steps_per_generation=2, num_iterations=2, learning_rate=3e-2, top_p=0.9)
    first, *later = rows
    assert first["policy/ratio_ess"] == pytest.approx(1)
    assert later[-1]["policy/ratio_ess"] < 0.999
    assert later[-1]["policy/ratio_outside"] > 0
    assert first["policy/support_size"] < 512


def test_every_other_step(trained):
    rows = trained({"every": 2, "tf_batch_size": 1}, max_steps=3, steps_per_generation=1)
    assert len(rows) == 2


def test_other_cuts_are_refused(trained):
    with pytest.raises(InputError, match="samples with top_k=5"):
        trained(max_steps=1, top_k=5)
