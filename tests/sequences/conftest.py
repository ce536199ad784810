import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from steerlab.sequences import BatchedSequences, SequenceProcessor
from tests.forked import CONTEXT
from tests.sequences import two_processes
from tests.sequences.data_parallel import N_PROCESSES
from tests.sequences.helpers import CharTokenizer, enumerable_model


@pytest.fixture(scope="session")
def tokenizer(tiny_llama_path):
    return AutoTokenizer.from_pretrained(tiny_llama_path)


@pytest.fixture(scope="session")
def in_two_processes(tiny_llama_path, tmp_path_factory):
    """What each of two processes found under DistributedDataParallel, and of a sharded model."""
    directory = tmp_path_factory.mktemp("processes")
    options = {"nprocs": N_PROCESSES, "start_method": CONTEXT.get_start_method()}
    torch.multiprocessing.start_processes(two_processes.run, (tiny_llama_path, directory), **options)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(N_PROCESSES)]


@pytest.fixture
def make_model(tiny_llama_path):
    """A fresh tiny Llama in a dtype."""

    def make(dtype=torch.float32):
        return AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=dtype).eval()

    return make


@pytest.fixture
def make_processor(make_model, tokenizer):
    """A processor on a fresh tiny Llama; keywords are generation settings, `precision` is the precision section."""

    def make(dtype=torch.float32, precision=None, model=None, **generation):
        config = {"generation": {"max_new_tokens": 12, **generation}, "precision": precision or {}}
        return SequenceProcessor(make_model(dtype) if model is None else model, tokenizer, config=config)

    return make


@pytest.fixture
def sequences():
    """Two prompts of unequal length, three responses each of unequal length, one of them empty."""
    generator = torch.Generator().manual_seed(3)

    def ids(n):
        return torch.randint(5, 200, (n,), generator=generator).tolist()

    return BatchedSequences.from_ids([ids(4), ids(9)], [[ids(7), ids(1), ids(12)], [ids(5), [], ids(3)]])


@pytest.fixture
def three_tokens():
    """A float64 model of three tokens whose logits depend on the whole prefix; 2 ends a text."""
    return enumerable_model(3, 2), CharTokenizer()
