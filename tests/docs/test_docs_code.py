"""The documentation's Python: every block is valid, and in `make docs` the blocks of the quick pages run in order."""

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import steerlab as sl
from steerlab.core import shipped
from steerlab.models._conversion import build_under_lock, prepared_directory
from tests.docs.pages import ROOT, all_pages, blocks

# Pages whose blocks run here, on the small model. The others are tutorials or need vLLM, and their parts are tested
# where the parts are.
RUN = [
    "README.md",
    "docs/index.md",
    "docs/dose.md",
    "docs/positions.md",
    "docs/steering.md",
    "docs/nulls.md",
    "docs/policies.md",
    "docs/extraction.md",
    "docs/generation.md",
    "docs/exploring.md",
    "docs/how-to/heads.md",
    "docs/how-to/sae-features.md",
    "docs/judging.md",
    "docs/protocols.md",
    "docs/how-to/model.md",
    "docs/how-to/vectors.md",
    "docs/how-to/data.md",
    "docs/how-to/method.md",
    "docs/how-to/operator.md",
    "docs/how-to/metric.md",
    "docs/how-to/engine.md",
]
PAGES = all_pages()
MARKER = "steerlab.json"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_is_valid_python(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block.source, filename=name(page))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_left_out_says_why(page: Path) -> None:
    assert [block.line for block in blocks(page) if block.not_run is not None and len(block.not_run) < 8] == []


def public_modules() -> list[str]:
    """The modules that the reference page calls public."""
    return re.findall(r"^\| `(steerlab[\w.*]+)` \|", (ROOT / "docs/reference.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_import_public_modules_only(page: Path) -> None:
    public = public_modules()
    assert "steerlab.vllm" in public
    prefixes = tuple(module.removesuffix("*") for module in public if module.endswith("*"))
    for block in blocks(page):
        found = [node.module or "" for node in ast.walk(ast.parse(block.source)) if isinstance(node, ast.ImportFrom)]
        own = [module for module in found if module.startswith("steerlab.")]
        assert [module for module in own if module not in public and not module.startswith(prefixes)] == []


@pytest.fixture(scope="module")
def narrow_model(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The small model with every 24th neuron of its MLPs, prepared under its name: the same places, half the work."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEERLAB_CACHE", str(cache))
        build_under_lock(prepared_directory("smollm2-135m"), lambda build: narrow(smollm2_path, build))
        yield


def narrow(model: Path, directory: Path) -> dict:
    """Writes a model with fewer neurons; the note of what it was made from."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(MARKER, "*.safetensors"), dirs_exist_ok=True)
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if ".mlp." in name:
            rows = weights[name][:, ::24] if "down_proj" in name else weights[name][::24]
            weights[name] = rows.contiguous()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] //= 24
    (directory / "config.json").write_text(json.dumps(config))
    return json.loads((model / MARKER).read_text())


@pytest.fixture(scope="module")
def engine(narrow_model: None) -> Iterator[sl.LensEngine]:
    with sl.load("smollm2-135m", dtype="float32") as engine:
        assert engine.model.cfg.d_mlp == 64
        yield engine


@pytest.fixture
def loaded_once(engine: sl.LensEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that load the small model as it is share one engine: loading it takes longer than all they do with it."""
    load = sl.load

    def load_once(model, *args, **options):
        plain = model == "smollm2-135m" and not args
        return engine if plain and options in ({}, {"dtype": "float32"}) else load(model, *args, **options)

    monkeypatch.setattr(sl, "load", load_once)


@pytest.fixture(scope="module")
def half_the_pairs(engine: sl.LensEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped vectors, said to be of the narrow model, and every second pair, which is three of each group."""
    folder = tmp_path_factory.mktemp("shipped") / "vectors"
    shutil.copytree(ROOT / "vectors", folder)
    for file in folder.glob("*/pairs.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[::2]))
    for file in folder.glob("*/*.safetensors"):
        vector = sl.SteeringVector.load(file)
        norm = engine.median_norm(vector.layer, vector.site)
        card = replace(vector.card, weights_hash=engine.info.weights_hash, median_norm=norm)
        replace(vector, card=card).save(file)
    return folder


@pytest.mark.slow
@pytest.mark.skipif("STEERLAB_RUN_DOCS" not in os.environ, reason="`make docs` runs the pages' code")
@pytest.mark.usefixtures("loaded_once")
@pytest.mark.parametrize("page", RUN)
def test_page_runs(page: str, half_the_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "shipped_vectors", lambda: half_the_pairs)
    (tmp_path / "vectors").symlink_to(half_the_pairs)
    found = [block for block in blocks(ROOT / page) if block.not_run is None]
    assert found, f"{page} has no block that runs"
    names: dict = {"__name__": "__main__"}
    for block in found:
        exec(compile(block.source, page, "exec"), names)
