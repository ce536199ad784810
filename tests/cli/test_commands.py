import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import steerlab as sl
from tests.cli.conftest import command

ENTRY_POINT = Path(sys.executable).parent / "steerlab"
HEAVY = ["torch", "transformers", "matplotlib", "pandas", "numpy", "yaml"]


def real(*arguments: object, cwd: Path) -> str:
    """Standard output of the installed command in a process of its own, which must succeed and say nothing else."""
    done = subprocess.run(
        [ENTRY_POINT, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.fixture(scope="module")
def extracted(tmp_path_factory, data, tiny_llama_path) -> tuple[Path, str]:
    """A vector file made by the command, and what it printed."""
    path = tmp_path_factory.mktemp("extracted") / "vector.safetensors"
    files = ("--pairs", data / "pairs.jsonl", "--out", path, "--model", tiny_llama_path)
    done = command("extract", *files, "--layer", 2, "--group", "group", "--split", "train")
    assert done.code == 0, (done.err, done.exception)
    return path, done.out


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom steerlab._cli.app import app\n"
        "for line in (['--help'], ['run', '--help'], ['demo', '--help'], ['--version']):\n"
        "    assert CliRunner().invoke(app, line).exit_code == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_version(steerlab):
    assert steerlab("--version").out == f"steerlab {sl.__version__}\n"


@pytest.mark.slow
def test_extract_writes_what_the_library_makes(extracted, data, tiny_llama_engine):
    path, printed = extracted
    pairs = sl.ContrastPairs.from_jsonl(data / "pairs.jsonl", group="group", split="train")
    vector = sl.SteeringVector.load(path)
    assert vector == sl.extract(tiny_llama_engine, pairs, layers=[2])[2]
    assert vector.card.name == "vector"
    for figure in (f"{vector.norm:.4f}", f"{vector.card.median_norm:.4f}", vector.hash, "blocks.2.hook_resid_post"):
        assert figure in printed


@pytest.mark.slow
def test_extract_takes_several_layers(steerlab, data, tiny_llama_path, tiny_llama_engine, tmp_path):
    given = ("extract", "--pairs", data / "pairs.jsonl", "--model", tiny_llama_path, "--split", "train")
    for name, layers, found in [("a", ["--layer", "1,2"], [1, 2]), ("b", ["--layer", 2, "--layer", -1], [2, 3])]:
        done = steerlab(*given, "--out", tmp_path / f"{name}.safetensors", *layers)
        assert done.code == 0, done
        assert list(sl.VectorSet.load(tmp_path / f"{name}.safetensors")) == found
    everything = steerlab(*given, "--out", tmp_path / "all.safetensors", "--layers", "all")
    assert everything.out.count("hash ") == tiny_llama_engine.info.n_layers
    refused = steerlab(*given, "--out", tmp_path / "x.safetensors", "--layer", "two")
    assert "got two" in refused.err


def test_generate(steerlab, extracted, tiny_llama_path, tiny_llama_engine):
    prompts = ("The soup was", "She opened [the window]")
    base = ("generate", "--model", tiny_llama_path, "--prompt", prompts[0], "--prompt", prompts[1], "--seed", 3)
    base = (*base, "-n", 2, "--max-new-tokens", 5, "--temperature", 0.8, "--top-k", 20)
    steering = ("--vector", extracted[0], "--dose", 1.5, "--where", "generated")
    plain, steered = (json.loads(steerlab(*base, *more, "--json").out) for more in ((), steering))
    policy = sl.SamplingPolicy(temperature=0.8, top_k=20)
    plan = sl.Plan(sl.add(sl.SteeringVector.load(extracted[0]), dose=1.5, where=sl.where.generated()))
    for found, used in ((plain, None), (steered, plan)):
        made = tiny_llama_engine.generate(list(prompts), plan=used, policy=policy, max_new_tokens=5, n=2, seed=3)
        assert [row["text"] for row in found] == made.texts
        assert [row["prompt"] for row in found] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [row["text"] for row in plain] != [row["text"] for row in steered]
    shown = steerlab(*base).out
    assert prompts[1] in shown
    assert "[2, " in shown


@pytest.mark.slow
def test_score(steerlab, extracted, data, tiny_llama_path, tiny_llama_engine):
    given = ("score", "--model", tiny_llama_path, "--prompt", "The soup was", "--target", " good", "--target", "ly [x]")
    rows = json.loads(steerlab(*given, "--boundary", "separate", "--json").out)
    scores = tiny_llama_engine.score(["The soup was"], [[" good", "ly [x]"]], boundary="separate")
    assert [row["log_prob"] for row in rows] == pytest.approx(scores.log_prob, abs=1e-5)
    assert [row["num_tokens"] for row in rows] == scores.num_tokens.tolist()
    table = steerlab(*given).out
    assert '" good"' in table
    assert '"ly [x]"' in table
    assert "boundary" in table
    assert table.endswith("log-probs in nats, computed in float32\n")
    assert "computed in bfloat16" in steerlab(*given, "--dtype", "bfloat16").out
    assert {row["dtype"] for row in rows} == {"float32"}
    variants = ("--variant", "", "--variant", "  ")
    both = json.loads(steerlab(*given[:7], *variants, "--json").out)
    scores = tiny_llama_engine.score(["The soup was"], [[" good"]], variants=("", "  "))
    assert [(row["target"], row["variant"]) for row in both] == [(" good", ""), (" good", "  ")]
    for name in ("log_prob", "bits_per_byte"):
        assert [row[name] for row in both] == pytest.approx(getattr(scores, name), abs=1e-5)
    assert '"   good"' in steerlab(*given[:7], *variants).out
    from_file = ("score", "--model", tiny_llama_path, "--file", data / "targets.jsonl", "--json")
    plain, steered = (
        json.loads(steerlab(*from_file, *more).out) for more in ((), ("--vector", extracted[0], "--dose", "1"))
    )
    assert [row["target"] for row in plain] == [" happy", " sad"] * 4
    assert all(a["log_prob"] != b["log_prob"] for a, b in zip(plain, steered, strict=True))


@pytest.mark.slow
def test_doctor(steerlab, tiny_llama_path, tiny_gpt2_path):
    shown = steerlab("doctor", tiny_llama_path).out
    assert "Llama 1–3, SmolLM2 (llama)" in shown
    assert "no on fast: quantised weights run on the bridge" in shown
    assert "streams, steered" in shown
    assert "differs" not in shown
    found = json.loads(steerlab("doctor", tiny_gpt2_path, "--json").out)
    assert found["family"] == "gpt2"
    assert found["table"]["bridge"]["edit"] == {"state": "checked", "note": "lens, gpu"}
    assert {one["state"] for one in found["findings"]} == {"same"}
    assert [one["engine"] for one in found["findings"]] == ["bridge"] * 5 + ["fast", "graph"]


@pytest.mark.slow
def test_perplexity(steerlab, extracted, tmp_path, tiny_llama_path, tiny_llama_engine):
    text = "The ferry leaves the harbour at seven, and the bread was stale.\n"
    (tmp_path / "a.txt").write_text(text)
    windows = ("--context-length", 12, "--stride", 6)
    base = ("perplexity", "--model", tiny_llama_path, "--file", tmp_path / "a.txt", *windows)
    found = json.loads(steerlab(*base, "--json").out)
    wanted = sl.perplexity(tiny_llama_engine, text, context_length=12, stride=6)
    assert found["nll"] == pytest.approx(wanted.nll, abs=1e-5)
    assert found["num_tokens"] == wanted.num_tokens
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    same_vector = ("--vector", extracted[0], "--coef", "0")
    assert json.loads(steerlab(*base, *same_vector, "--json").out) == found
    table = steerlab(*base, "--dtype", "bfloat16").out
    assert f"tokens          {wanted.num_tokens}\n" in table
    assert "dtype           bfloat16\n" in table
    assert found["dtype"] == wanted.dtype == "float32"


@pytest.mark.slow
def test_run_from_yaml_to_report(tmp_path, data, tiny_llama_path):
    experiment = {
        "name": "tiny",
        "model": str(tiny_llama_path),
        "root": "out",
        "pairs": {"path": str(data / "pairs.jsonl"), "group": "group", "split": "train"},
        "vector": {"layer": 2},
        "targets": {"path": str(data / "targets.jsonl"), "split": "test"},
        "doses": [-0.1, 0, 0.1],
        "controls": {"random": 19, "wrong_layer": True},
        "max_ppl_ratio": 3,
        "neutral": str(data / "neutral.txt"),
        "entropy": True,
        "generations": {"prompts": str(data / "prompts.txt"), "max_new_tokens": 4},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    printed = real("run", "../tiny.yaml", cwd=elsewhere)
    for word in ("slope", "anti-steerable", "null rank", "wrong layer", "verdict", "entropy", "report.html", "seconds"):
        assert word in printed
    assert "She opened [the window] …" in printed
    folder = tmp_path / "out" / "tiny"
    loaded = sl.Experiment.load(folder)
    assert loaded.effects[0].doses == [-0.1, 0, 0.1]
    assert f"{loaded.effects[0].slope:+.2f} per unit dose" in printed
    assert len(loaded.results.generations[0]) == 2 * 3
    assert (folder / "report.html").stat().st_size > 10_000
