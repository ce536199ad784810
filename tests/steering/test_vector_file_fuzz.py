"""Corrupted and hostile vector files: each raises our error or gives finite vectors; none runs code or fills memory."""

import io
import json
import os
import random
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_safetensors

from steerlab.core.errors import VectorFileError
from steerlab.steering.files import load_vectors, save_vectors
from steerlab.steering.formats.gguf import export_gguf, import_gguf
from steerlab.steering.formats.loreft import import_loreft
from steerlab.steering.formats.sae import import_sae
from steerlab.steering.formats.torch_files import export_torch, import_torch
from steerlab.steering.vectors import SteeringVector, VectorSet

PER_FAMILY = 1000
MEMORY = 1 << 30  # bytes of address space a reader may take beyond what the process has
LAYERS = VectorSet(tuple(SteeringVector.from_tensor(torch.arange(6.0) - n, layer=n) for n in (1, 4)))


class Attack:
    """Runs a command when a pickle of it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.trace}",))


# --- families: how a good file is made, and how it is read --------------------------------------------------------


def read_steerlab(path: Path) -> list[SteeringVector]:
    return load_vectors(path)


def read_gguf(path: Path) -> list[SteeringVector]:
    return list(import_gguf(path).by_layer)


def read_torch(path: Path) -> list[SteeringVector]:
    return list(import_torch(path).by_layer)


def read_npz(path: Path) -> list[SteeringVector]:
    return import_sae(path.rename(path.with_suffix(".npz")), [0, 3], hook_point="blocks.2.hook_resid_post")


def read_saelens(path: Path) -> list[SteeringVector]:
    folder = path.with_name("sae")
    folder.mkdir(exist_ok=True)
    path.rename(folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text('{"hook_name": "blocks.2.hook_resid_post", "d_sae": 5, "d_in": 6}')
    return import_sae(folder, [0, 3])


def read_saelens_config(path: Path) -> list[SteeringVector]:
    folder = path.with_name("sae")
    folder.mkdir(exist_ok=True)
    path.rename(folder / "cfg.json")
    (folder / "sae_weights.safetensors").write_bytes(save_safetensors({"W_dec": torch.arange(30.0).reshape(5, 6)}))
    return import_sae(folder, [0, 3])


def read_loreft(path: Path) -> list[SteeringVector]:
    found = import_loreft(path, layer=1)
    assert np.isfinite(found.values).all()
    return list(found.directions)


def torch_bytes(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def npz_bytes(arrays: dict[str, Any], save: Callable[..., None] = np.savez) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


INTERVENTION = {"R": torch.eye(2, 6), "b": torch.tensor([1.0, 2.0])}
FAMILIES: dict[str, tuple[Callable[[Path], bytes], Callable[[Path], list[SteeringVector]]]] = {
    "steerlab": (lambda path: save_vectors(path, list(LAYERS.by_layer)).read_bytes(), read_steerlab),
    "gguf": (lambda path: export_gguf(path, LAYERS, model_hint="llama").read_bytes(), read_gguf),
    "torch": (lambda path: export_torch(path, LAYERS).read_bytes(), read_torch),
    "npz": (lambda _: npz_bytes({"W_dec": np.arange(30.0).reshape(5, 6)}), read_npz),
    "npz, compressed": (lambda _: npz_bytes({"W_dec": np.arange(30.0).reshape(5, 6)}, np.savez_compressed), read_npz),
    "saelens weights": (lambda _: save_safetensors({"W_dec": torch.arange(30.0).reshape(5, 6)}), read_saelens),
    "saelens config": (
        lambda _: json.dumps({"hook_name": "blocks.2.hook_resid_post", "d_sae": 5, "d_in": 6}).encode(),
        read_saelens_config,
    ),
    "loreft, safetensors": (lambda _: save_safetensors(INTERVENTION), read_loreft),
    "loreft, torch": (lambda _: torch_bytes(INTERVENTION), read_loreft),
}


# --- corruption ----------------------------------------------------------------------------------------------------


def truncated(good: bytes, rng: random.Random) -> bytes:
    return good[: rng.randrange(len(good))]


def flipped(good: bytes, rng: random.Random) -> bytes:
    bad = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 8])):
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    return bytes(bad)


def flipped_early(good: bytes, rng: random.Random) -> bytes:
    bad = bytearray(good)
    bad[rng.randrange(min(128, len(bad)))] = rng.randrange(256)
    return bytes(bad)


def huge_number(good: bytes, rng: random.Random) -> bytes:
    """An absurd count, length or offset somewhere."""
    at = rng.randrange(max(1, len(good) - 8))
    number = rng.choice([1 << 31, 1 << 40, (1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1])
    return good[:at] + struct.pack("<Q", number) + good[at + 8 :]


def cut_out(good: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(good))
    return good[:start] + good[start + rng.randrange(1, 40) :]


def doubled(good: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(good))
    end = start + rng.randrange(1, 40)
    return good[:end] + good[start:]


def noise(good: bytes, rng: random.Random) -> bytes:
    return good[: rng.choice([0, 2, 4, 8])] + rng.randbytes(rng.randrange(200))


CORRUPTIONS = [truncated, flipped, flipped_early, huge_number, cut_out, doubled, noise]


@contextmanager
def little_memory() -> Iterator[None]:
    """An allocation of gigabytes fails inside, even one that would never be written to (on Linux)."""
    if not Path("/proc/self/statm").exists():
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def wanted_memory(cause: BaseException | None) -> bool:
    """Nothing huge may be asked for, even where the machine refuses it and the reader takes that well."""
    return isinstance(cause, MemoryError) or "alloc" in str(cause)


def outcome(read: Callable[[Path], list[SteeringVector]], path: Path, data: bytes) -> str:
    """`refused`, or `loaded` for finite vectors; anything else fails the test."""
    path.write_bytes(data)
    try:
        vectors = read(path)
    except VectorFileError as error:
        return "asked for too much memory" if wanted_memory(error.__cause__) else "refused"
    assert vectors
    for vector in vectors:
        assert torch.isfinite(vector.values).all()
        assert vector.values.ndim == 1
    return "loaded"


@pytest.mark.filterwarnings("ignore:.*where a control vector states:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_corrupted_files(tmp_path, family):
    make, read = FAMILIES[family]
    good = make(tmp_path / "good")
    assert outcome(read, tmp_path / "file", good) == "loaded"
    rng = random.Random(family)
    with little_memory():
        outcomes = [outcome(read, tmp_path / "file", rng.choice(CORRUPTIONS)(good, rng)) for _ in range(PER_FAMILY)]
    assert set(outcomes) <= {"refused", "loaded"}
    assert outcomes.count("refused") > PER_FAMILY / 2


# --- hostility -----------------------------------------------------------------------------------------------------


def hostile_torch(trace: Path, rng: random.Random) -> bytes:
    """A file with code in it, in a random place."""
    content: dict[Any, Any] = {f"blocks.{n}.hook_resid_post": torch.ones(rng.randrange(2, 6)) for n in range(3)}
    attack = Attack(trace)
    place = rng.choice(["value", "key", "nested", "attribute", "alone"])
    if place == "value":
        content[rng.choice(list(content))] = attack
    elif place == "key":
        content[attack] = torch.ones(2)
    elif place == "nested":
        content["more"] = [{"deep": (attack,)}]
    elif place == "attribute":
        content["more"] = torch.nn.Parameter(torch.ones(3))
        content["more"].note = attack
    options = {"pickle_protocol": rng.choice([2, 3, 4, 5])}
    if rng.random() < 0.2:
        options["_use_new_zipfile_serialization"] = False
    return torch_bytes(attack if place == "alone" else content, **options)


def hostile_npz(trace: Path, rng: random.Random) -> bytes:
    objects = np.empty((5, 6), dtype=object)
    objects[rng.randrange(5), rng.randrange(6)] = Attack(trace)
    return npz_bytes({"W_dec": objects}, rng.choice([np.savez, np.savez_compressed]))


@pytest.mark.parametrize(
    ("make", "read"),
    [(hostile_torch, read_torch), (hostile_torch, read_loreft), (hostile_npz, read_npz)],
    ids=["torch", "loreft", "npz"],
)
def test_code_in_files_is_not_run(tmp_path, make, read):
    trace = tmp_path / "trace"
    rng = random.Random(1)
    assert {outcome(read, tmp_path / "file", make(trace, rng)) for _ in range(100)} == {"refused"}
    assert not trace.exists()


def test_the_attack_is_a_real_one(tmp_path):
    (tmp_path / "file").write_bytes(torch_bytes({1: Attack(tmp_path / "trace")}))
    torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "trace").exists()


def pickled(instructions: bytes) -> bytes:
    """A .pt archive around a pickle of one's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("v/data.pkl", b"\x80\x02" + instructions + b".")
        archive.writestr("v/byteorder", b"little")
        archive.writestr("v/version", b"3\n")
        archive.writestr("v/data/0", bytes(64))
    return buffer.getvalue()


BOMBS = {
    "a bytearray of a terabyte": b"c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R",
    "a string of gigabytes": b"X\xff\xff\xff\x7fabc",
    "lists within lists": b"(" * 50_000 + b"l" * 50_000,
    "a memo out of reach": b"j\xff\xff\xff\x7f",
    "no end": b"}",
    "an empty stack": b"R",
    "a meta tensor": b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs_are_refused(tmp_path, bomb):
    with little_memory():
        assert outcome(read_torch, tmp_path / "file", pickled(BOMBS[bomb])) == "refused"


@pytest.mark.parametrize("shape", [(1 << 40, 6), (5, 1 << 40), (1 << 31, 1 << 31), (-5, 6), (5, 6, 1)])
def test_npz_headers_that_lie_are_refused(tmp_path, shape):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("W_dec.npy", header.getvalue() + bytes(120))
    with little_memory():
        assert outcome(read_npz, tmp_path / "file", buffer.getvalue()) == "refused"


@pytest.mark.parametrize("family", ["steerlab", "saelens weights", "loreft, safetensors"])
@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_safetensors_headers_of_absurd_length_are_refused(tmp_path, family, length):
    make, read = FAMILIES[family]
    data = struct.pack("<Q", length) + make(tmp_path / "good")[8:]
    with little_memory():
        assert outcome(read, tmp_path / "file", data) == "refused"
