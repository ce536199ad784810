"""vLLM's `general_plugins` entry point: loaded in every process of every vLLM on this machine.

It installs the patches, which leave vLLM as it is unless a configuration asks for steering. vLLM only logs a plugin
that fails, so the engine asks every worker whether it is wired and refuses to start otherwise.
"""

import logging

from steerlab.engines.vllm._patches.versions import installed_version, is_supported, unfit_names

_logger = logging.getLogger(__name__)


def register() -> None:
    """Installs the patches once; does nothing on a vLLM whose insides are not known, or not as they must be."""
    version = installed_version()
    if version is None or not is_supported(version):
        _logger.warning("steerlab's vLLM plugin does not know vLLM %s and leaves it alone.", version)
        return
    unfit = unfit_names(version)
    if unfit:
        _logger.warning("steerlab's vLLM plugin leaves vLLM %s alone: %s", version, " ".join(unfit))
        return
    from steerlab.engines.vllm._patches import (
        block_keys,
        cache_hits,
        failed_rows,
        grouped_admission,
        load_model,
        own_process_group,
        shared_prefixes,
        zeroed_blocks,
    )

    load_model.install()
    block_keys.install()
    cache_hits.install()
    shared_prefixes.install()
    grouped_admission.install()
    own_process_group.install()
    zeroed_blocks.install(version)
    failed_rows.install()
