"""The cache directory: prepared models and hashes, all of which can be made again."""

import os
from pathlib import Path


def cache_root() -> Path:
    """The cache directory; it need not exist yet.

    Returns:
        The directory that the environment variable `STEERLAB_CACHE` names, else the user's cache directory.
    """
    named = os.environ.get("STEERLAB_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("steerlab"))
