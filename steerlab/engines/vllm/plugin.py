"""vLLM's `general_plugins` entry point: loaded in every process of every vLLM on this machine.

It installs the patches, which leave vLLM as it is unless a configuration asks for steering. vLLM only logs a plugin
that fails, so the engine asks every worker whether it is wired and refuses to start otherwise.
"""

import logging

from steerlab.engines.vllm.versions import installed_version, is_supported

_logger = logging.getLogger(__name__)


def register() -> None:
    """Installs the patches once; does nothing on a vLLM whose insides are not known."""
    version = installed_version()
    if version is None or not is_supported(version):
        _logger.warning("steerlab's vLLM plugin does not know vLLM %s and leaves it alone.", version)
        return
    from steerlab.engines.vllm.patches import (
        arrivals,
        block_keys,
        cache_hits,
        failed_rows,
        interrupts,
        shared_prefixes,
        worker,
        zeroed_blocks,
    )

    worker.install()
    block_keys.install()
    cache_hits.install()
    shared_prefixes.install()
    arrivals.install()
    interrupts.install()
    zeroed_blocks.install()
    failed_rows.install()
