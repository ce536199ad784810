"""What of vLLM is touched: the table against the source of every supported version, read without importing it."""

import ast
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import steerlab
from steerlab.core.errors import BackendMissingError
from steerlab.engines.vllm import _plugin as plugin
from steerlab.engines.vllm._patches import cache_hits, versions
from steerlab.engines.vllm._patches.differences import differences, fits, parameters
from steerlab.engines.vllm._patches.grouped_admission import Groups
from steerlab.engines.vllm._patches.source import Source
from steerlab.engines.vllm._patches.touched import SUPPORTED, TOUCHED, minor, module_of
from steerlab.engines.vllm._wire.request_spec import RequestSpec, ScoreSpec
from steerlab.measures.quantities import TokenLogProb

RECORDED = Path(__file__).parent / "touched"
"""Written by `scripts/vllm_facts.py` from each version's wheel."""


def recorded(version):
    return json.loads((RECORDED / f"{version}.json").read_text())


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_supported_version_has_what_is_touched(version):
    facts = recorded(version)
    assert minor(facts["version"]) == version
    assert set(facts["names"]) == {touched.place for touched in TOUCHED}  # else run scripts/vllm_facts.py again
    assert differences(facts["names"].get, version) == []


def test_nothing_is_recorded_of_other_versions():
    assert sorted(path.stem for path in RECORDED.glob("*.json")) == sorted(SUPPORTED)


@pytest.mark.vllm
def test_the_installed_source_has_what_is_touched():
    version, source = versions.installed_version(), Source.installed()
    assert differences(source, version) == []
    facts = recorded(minor(version))["names"]
    assert {place: source(place) for place in facts} == facts


def test_a_difference_is_one_sentence():
    found = differences(recorded("0.33")["names"].get, "0.32.0")
    hit = "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks"
    assert f"{hit} is (request, max_cache_hit_length=None); it must be callable as (request)." in found
    moved = "vllm.entrypoints.serve.utils.api_utils:cli_env_setup"
    assert f"{moved} is not there; it must be callable as ()." in found
    assert len(found) == 6


def test_a_version_that_is_not_known_is_compared_with_the_newest():
    assert differences(recorded(SUPPORTED[-1])["names"].get, "99.1.0") == []


@pytest.mark.parametrize(
    ("found", "shape", "does_fit"),
    [
        ("(request, wave=0)", "(request, wave)", True),
        ("(request, wave=0, more=None)", "(request, wave)", False),
        ("(request, wave=0, more=None)", "(request, ...)", True),
        ("(wave, request)", "(request, ...)", False),
        ("(a, *, b=1, **c)", "(a, ..., b, **c)", True),
        ("(a, *, b=1)", "(a, ..., c)", False),
        ("()", "()", True),
        ("()", "(...)", True),
        ("(a)", "()", False),
        ("attribute: set[str]", "attribute", True),
        ("attribute: dict[str, int]", "attribute: set[str]", False),
        ("property", "attribute", False),
        ("class", "(a)", False),
    ],
)
def test_shapes(found, shape, does_fit):
    assert fits(found, shape) is does_fit


def test_parameters_by_hand():
    assert parameters("(a, /, b=1, *rest, c, d=2, **more)") == ["a", "b", "*rest", "c", "d", "**more"]


def test_what_is_read_of_a_source(tmp_path):
    package = tmp_path / "vllm" / "inner"
    package.mkdir(parents=True)
    (package / "base.py").write_text("class Base:\n    def run(self, x: int, *, y: str = 'a') -> None: ...\n")
    (package / "__init__.py").write_text(
        "from vllm.inner.base import Base\n"
        "LIMIT = 3\n"
        "if LIMIT:\n    from vllm.other import far\n"
        "class Own(Base):\n"
        "    stated: int = 1\n"
        "    @property\n    def shown(self): ...\n"
        "    @staticmethod\n    def free(a): ...\n"
        "    def __init__(self):\n        self.kept: set[str] = set()\n        self.left, self.right = 1, 2\n"
        "async def go(a, b=2): ...\n"
    )
    source = Source(tmp_path)
    found = {
        "Own": "class",
        "Own.stated": "attribute: int",
        "Own.shown": "property",
        "Own.free": "(a)",
        "Own.kept": "attribute: set[str]",
        "Own.right": "attribute",
        "Own.run": "(x, *, y='a')",
        "Own.missing": None,
        "missing": None,
        "far": "imported from vllm.other",
        "LIMIT": "value",
        "go": "(a, b=2)",
    }
    assert {name: source(f"vllm.inner:{name}") for name in found} == found
    assert source("vllm.nowhere:go") is None


def test_the_table_has_all_that_the_package_imports_of_vllm():
    modules = {touched.place.partition(":")[0] for touched in TOUCHED}
    owners = {f"{touched.place.partition(':')[0]}:{touched.name.partition('.')[0]}" for touched in TOUCHED}
    missing = []
    for file in Path(steerlab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm"):
                continue
            for alias in node.names:
                place = f"{node.module}:{alias.name}"
                is_module = f"{node.module}.{alias.name}" in modules
                if not is_module and place not in owners and place not in TOP_LEVEL:
                    missing.append(f"{file.name}: {place}")
    assert missing == []


TOP_LEVEL = {"vllm:LLM", "vllm:SamplingParams", "vllm:envs", "vllm.config:set_current_vllm_config"}
"""Names that vLLM exports from where it documents them; the table has where they lie."""


def test_a_name_that_has_moved_is_found_in_either_version():
    assert module_of("cli_env_setup", "0.32.1") == "vllm.entrypoints.serve.utils.api_utils"
    assert module_of("cli_env_setup", "0.33.0+cu130") == "vllm.entrypoints.common.startup"


@pytest.fixture
def altered(monkeypatch):
    """A vLLM 0.33 in which a method takes another argument."""
    names = {**recorded("0.33")["names"], "vllm.v1.engine.core:EngineCore.add_request": "(request, wave, lane)"}

    class Altered(Source):
        def __call__(self, place):
            return names[place]

    monkeypatch.setattr(versions, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(Source, "installed", classmethod(lambda cls: Altered(Path("/altered"))))
    monkeypatch.delenv(versions.FITS, raising=False)


SENTENCE = (
    "vllm.v1.engine.core:EngineCore.add_request is (request, wave, lane); it must be callable as "
    "(request, request_wave)."
)


def test_an_altered_vllm_is_refused_in_one_sentence(altered):
    with pytest.raises(BackendMissingError) as caught:
        versions.require_vllm()
    assert f"1 of the names that steering depends on differ from what they must be: {SENTENCE}" in str(caught.value)
    assert versions.FITS not in os.environ


def test_the_plugin_leaves_an_altered_vllm_alone(altered, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "installed_version", versions.installed_version)
    plugin.register()
    assert f"leaves vLLM 0.33.0 alone: {SENTENCE}" in caplog.text


def test_the_processes_of_an_engine_need_not_check_again(monkeypatch):
    names = recorded("0.33")["names"]
    asked = []

    class Counted(Source):
        def __call__(self, place):
            asked.append(place)
            return names[place]

    monkeypatch.setattr(Source, "installed", classmethod(lambda cls: Counted(Path("/somewhere"))))
    monkeypatch.delenv(versions.FITS, raising=False)
    monkeypatch.setenv(versions.FITS, "another")
    assert versions.unfit_names("0.33.0") == []
    first = len(asked)
    assert first > 100
    assert versions.unfit_names("0.33.0") == []
    assert len(asked) == first
    assert versions.unfit_names("0.32.0")  # another version is looked at


def request(spec=None, n_tokens=40, name=""):
    """A request as the scheduler has it, as far as it is looked at."""
    params = SimpleNamespace(extra_args=None if spec is None else spec.to_args())
    return SimpleNamespace(sampling_params=params, num_tokens=n_tokens, request_id=name)


SCORED = RequestSpec("0", None, score=ScoreSpec(20, (5, 6), (TokenLogProb(),)))


def test_a_hit_ends_before_what_is_scored_in_both_versions():
    earlier = cache_hits._as_if_shorter(lambda manager, request: request.num_tokens - 1)
    later = cache_hits._with_limit(lambda manager, request, max_cache_hit_length=None: max_cache_hit_length)
    assert earlier(None, request()) == 39
    assert later(None, request()) is None  # vLLM's own limit
    assert later(None, request(), 12) == 12
    assert earlier(None, request(SCORED)) == later(None, request(SCORED)) == later(None, request(SCORED), None) == 20
    assert later(None, request(SCORED), 12) == 12
    assert later(None, request(SCORED), 30) == 20


@pytest.fixture
def core():
    """An engine that notes what reaches its scheduler, with the replaced methods of one that can be paused."""
    arrived, groups = [], Groups(lambda core, request, wave=0: arrived.append(request.request_id))
    refuses = SimpleNamespace(now=False)
    own = SimpleNamespace()
    add, abort = groups.adding(), groups.aborting(lambda core, ids: None)
    pause, reject = groups.pausing(lambda core, mode: mode), groups.rejecting(lambda core, request: refuses.now)

    def submit(name, group):
        one = request(RequestSpec(name, None, group=group), name=name)
        if not reject(own, one):
            add(own, one)

    return SimpleNamespace(
        arrived=arrived,
        refuses=refuses,
        submit=submit,
        abort=lambda *names: abort(own, list(names)),
        pause=lambda mode="abort": pause(own, mode),
        left=lambda: own.__dict__["_steerlab_groups"],
    )


def test_a_group_of_which_some_are_refused_does_not_wait_for_them(core):
    core.refuses.now = True
    core.submit("a", ("g", 3))
    core.refuses.now = False
    core.submit("b", ("g", 3))
    assert core.arrived == []
    core.submit("c", ("g", 3))
    assert core.arrived == ["b", "c"]
    assert not core.left()


def test_a_refusal_that_completes_a_group_releases_it(core):
    core.submit("a", ("g", 2))
    core.refuses.now = True
    core.submit("b", ("g", 2))
    assert core.arrived == ["a"]


def test_a_pause_meets_what_has_arrived_of_a_group(core):
    core.submit("a", ("g", 3))
    assert core.pause("keep") == "keep"
    assert core.arrived == ["a"]
    core.submit("b", ("g", 3))
    assert core.arrived == ["a", "b"]  # the others are not waited for
    core.submit("c", ("g", 3))
    assert core.arrived == ["a", "b", "c"]
    assert not core.left()


def test_the_rest_of_an_aborted_group_does_not_wait(core):
    core.submit("a", ("g", 3))
    core.abort("a")
    core.submit("b", ("g", 3))
    assert core.arrived == ["a", "b"]
