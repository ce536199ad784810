"""`python -m steerlab.models [NAME]`: makes a model ready and prints its directory."""

import sys

from steerlab.core.errors import SteerlabError
from steerlab.models._resolver import resolve


def main(arguments: list[str]) -> int:
    """Resolves one model, the small default if none is named.

    Args:
        arguments: At most one model name.

    Returns:
        The exit status: 0, or 2 with one sentence on stderr if the model cannot be had.
    """
    try:
        model = resolve(arguments[0] if arguments else "smollm2-135m")
    except SteerlabError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{model.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
