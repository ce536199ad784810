"""What a version of vLLM has where the package touches it: written down for the tests, and compared.

    pip download --no-deps --dest DIR vllm==0.33.0
    python scripts/vllm_facts.py DIR/vllm-0.33.0-*.whl

reads the wheel's source, without installing or importing it, writes `tests/vllm/touched/0.33.json`, and prints a
sentence for each name that is otherwise than the table in `steerlab/engines/vllm/_patches/touched.py` says. A version
that the table does not know is compared with the newest that it knows.
"""

import argparse
import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from steerlab.engines.vllm._patches.differences import differences
from steerlab.engines.vllm._patches.source import Source
from steerlab.engines.vllm._patches.touched import TOUCHED, minor

FACTS = Path(__file__).parent.parent / "tests" / "vllm" / "touched"


def facts_of(source: Source, version: str) -> dict[str, object]:
    """Every place of the table and what is there; null where nothing is."""
    places = sorted({touched.place for touched in TOUCHED})
    return {"version": version, "names": {place: source(place) for place in places}}


def main() -> None:
    """Reads a wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    named = re.match(r"vllm(?:_cpu)?-(\d+\.\d+\.\d+[^-]*)-", wheel.name)
    if named is None:
        sys.exit(f"{wheel.name} is not named like a wheel of vLLM.")
    version = named[1]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if name.endswith(".py")])
        source = Source(Path(folder))
        found, facts = differences(source, version), facts_of(source, version)
    FACTS.mkdir(exist_ok=True)
    (FACTS / f"{minor(version)}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print("\n".join(found) or f"vLLM {version} fits the table.")


if __name__ == "__main__":
    main()
