import importlib
import subprocess
import sys

import pytest

import steerlab
from steerlab._moved import MOVED

HEAVY = ["torch", "transformers", "transformer_lens", "vllm", "matplotlib", "pandas", "numpy", "scipy", "sklearn"]

PUBLIC = """
Activations
BackendMissingError
BatchedSequences
Completion
ContextLengthError
ContrastPairs
Controls
DataError
DiagnosticsPack
DiagnosticsResults
DistributionDiagnostics
Divergence
Effect
Engine
EngineError
Experiment
FeatureActivations
GenerationConfig
Generations
HeadRanking
HookPointError
InputError
LensEngine
LogprobResults
ModelNotFoundError
NonFiniteError
Perplexity
Plan
PlanError
PolicyError
PromptError
Receipt
ReceiptError
RemoteEngine
Responses
RewardError
RunError
SamplingPolicy
Scores
SequenceDiagnostics
SequenceProcessor
SparseAutoencoder
SteeringVector
SteerlabError
TargetError
Targets
TokenStepDiagnostics
UnknownOperatorError
VLLMEngine
VectorFileError
VectorMismatchError
VectorSet
VectorShapeError
VectorValueError
__version__
ablate
add
clamp
compare
create_steering_hook
current_step
display
divergence
dose_slider
explain
export_gguf
extract
extract_unpaired
feature
few_shot
generate_steered_response
head_vector
hooked_generate
import_loreft
import_sae
judge
load
logit_lens
loreft
perplexity
plot_diagnostics
plots
project_pairs
project_text
prompting
protocols
rank_heads
read_distributions
register_dataset
register_operator
rotate
schedule
shipped
show_tokens
side_by_side
vllm_config
when
where
""".split()


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_light():
    assert run(f"import sys, steerlab; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_listing_names_loads_nothing():
    assert run(f"import sys, steerlab; dir(steerlab); print([m for m in {HEAVY} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("name", ["display", "protocols"])
def test_a_package_of_its_own_loads_in_a_fresh_process(name):
    assert run(f"import steerlab; print(steerlab.{name}.__name__)") == f"steerlab.{name}"


def test_resolver_is_light():
    assert run(f"import sys, steerlab.models; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_public_names_are_pinned():
    assert sorted(steerlab.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(steerlab))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_loads(name):
    assert getattr(steerlab, name) is not None


def test_names_stay_what_they_are_after_their_modules_are_imported():
    for module in set(steerlab._MODULES.values()):
        importlib.import_module(module)
    assert callable(steerlab.perplexity)
    assert callable(steerlab.extract)
    assert steerlab.where.__name__ == "steerlab.steering.positions.where"
    assert steerlab.schedule.__name__ == "steerlab.steering.positions.schedule"


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_modules_that_moved_are_found_by_their_old_path(old, new):
    assert importlib.import_module(old) is importlib.import_module(new)


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "steerlab.core.pairs": "balanced_flips",
        "steerlab.experiment.entropies": "entropy_summary",
        "steerlab.steering.edit": "Edit",
        "steerlab.steering.extract": "read_pairs",
        "steerlab.steering.operator": "Direction Operator",
    }.items(),
)
def test_names_that_the_documentation_imported_are_there(module, names):
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in names.split())


def test_importing_all_names_leaves_pythons_own_set_alone():
    assert run("from steerlab import *; print(set([1, 1]))") == "{1}"
    assert steerlab.set is not set


def test_version_is_the_distributions():
    from importlib.metadata import version

    assert steerlab.__version__ == version("steerlab")


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="steer_everything"):
        _ = steerlab.steer_everything
