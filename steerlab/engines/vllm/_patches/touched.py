"""Every name of vLLM that is wrapped, replaced, called or read here, with the shape that it must have.

A shape is what `source` reads: parameters without `self`, `class`, `property`, `attribute`, `value` or `imported from
MODULE`. Of parameters, `(a, b)` must be all, with any defaults; in `(a, ..., z)` the ones before the dots come first,
and those after them are among the others. An attribute whose type matters here has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SUPPORTED = ("0.32", "0.33")
"""The minor versions whose source was read and fits the table, and which were run; 0.33 on GPUs, all that it is for."""


@dataclass(frozen=True)
class Touched:
    """A name of vLLM.

    Attributes:
        place: where it lies, `module:Name` or `module:Class.name`.
        shape: what it must be there.
        versions: the minor versions in which it lies there.
    """

    place: str
    shape: str
    versions: tuple[str, ...] = SUPPORTED

    @property
    def name(self) -> str:
        """Its name, without the module."""
        return self.place.partition(":")[2]


def _in(module: str, shapes: Mapping[str, str], versions: tuple[str, ...] = SUPPORTED) -> tuple[Touched, ...]:
    return tuple(Touched(f"vllm.{module}:{name}", shape, versions) for name, shape in shapes.items())


def _members(module: str, owner: str, attributes: str) -> tuple[Touched, ...]:
    return _in(module, {f"{owner}.{name}": "attribute" for name in attributes.split()})


_SCHEDULER = (
    *_in(
        "v1.core.kv_cache_utils",
        {
            "generate_block_hash_extra_keys": "(request, start_token_idx, end_token_idx, start_mm_idx)",
            "get_request_block_hasher": "(hash_block_size, ...)",
        },
    ),
    *_in("v1.core.kv_cache_utils", {"get_kv_cache_configs": "(vllm_config, ...)"}, ("0.32",)),
    *_in("v1.core.kv_cache_planning", {"get_kv_cache_configs": "(vllm_config, ...)"}, ("0.33",)),
    *_in("v1.core.block_pool", {"generate_block_hash_extra_keys": "imported from vllm.v1.core.kv_cache_utils"}),
    *_in(
        "v1.simple_kv_offload.manager",
        {"generate_block_hash_extra_keys": "imported from vllm.v1.core.kv_cache_utils"},
    ),
    *_in("v1.core.kv_cache_manager", {"KVCacheManager.get_computed_blocks": "(request)"}, ("0.32",)),
    *_in(
        "v1.core.kv_cache_manager",
        {"KVCacheManager.get_computed_blocks": "(request, max_cache_hit_length)"},
        ("0.33",),
    ),
    *_in(
        "v1.core.kv_cache_manager",
        {"KVCacheManager.evict_blocks": "(block_ids)", "KVCacheManager.get_block_ids": "(request_id)"},
    ),
    *_in("v1.kv_cache_interface", {"KVCacheConfig.needs_kv_cache_zeroing": "property"}),
    *_in(
        "v1.core.sched.scheduler",
        {
            "Scheduler.update_from_output": "(scheduler_output, model_runner_output)",
            "Scheduler._preempt_request": "(request, timestamp, ..., drop_stale_output)",
        },
    ),
    *_members(
        "v1.core.sched.scheduler",
        "Scheduler",
        "requests running kv_cache_manager vllm_config",
    ),
    *_in(
        "v1.core.sched.scheduler",
        {
            "Scheduler.encoder_cache_mismatch_reqs": "attribute: set[str]",
            "Scheduler.prev_step_scheduled_req_ids": "attribute: set[str]",
        },
    ),
    *_in("v1.request", {"Request.num_tokens": "property", "Request.is_finished": "()"}),
    *_members(
        "v1.request",
        "Request",
        "request_id sampling_params prompt_token_ids cache_salt block_hashes skip_reading_prefix_cache "
        "drop_stale_output num_stale_output_tokens _block_hasher",
    ),
    *_in(
        "v1.outputs",
        {
            "ModelRunnerOutput.num_nans_in_logits": "attribute: dict[str, int] | None",
            "ModelRunnerOutput.sampled_token_ids": "attribute: list[list[int]]",
            "ModelRunnerOutput.req_id_to_index": "attribute: dict[str, int]",
        },
    ),
)

_ENGINE_PROCESS = (
    *_in("v1.engine.core", {"get_request_block_hasher": "imported from vllm.v1.core.kv_cache_utils"}),
    *_in("v1.engine.core", {"get_kv_cache_configs": "imported from vllm.v1.core.kv_cache_utils"}, ("0.32",)),
    *_in("v1.engine.core", {"get_kv_cache_configs": "imported from vllm.v1.core.kv_cache_planning"}, ("0.33",)),
    *_in(
        "v1.engine.core",
        {
            "EngineCore.add_request": "(request, request_wave)",
            "EngineCore.abort_requests": "(request_ids)",
            "EngineCore.pause_scheduler": "(mode, clear_cache)",
            "EngineCoreProc.pause_scheduler": "(mode, clear_cache)",
        },
    ),
    *_in("v1.engine.core", {"EngineCoreProc._reject_add_while_paused": "(request)"}, ("0.33",)),
    *_in("v1.executor.abstract", {"Executor.__init__": "(vllm_config)"}),
)

_WORKERS = (
    *_in("v1.worker.gpu_worker", {"Worker.load_model": "(...)"}),
    *_in(
        "v1.worker.gpu_model_runner",
        {
            "GPUModelRunner._prepare_inputs": "(scheduler_output, num_scheduled_tokens)",
            "GPUModelRunner._bookkeeping_sync": "(...)",
            "GPUModelRunner._get_prompt_logprobs_dict": "(hidden_states, ...)",
            "GPUModelRunner._zero_block_ids": "(block_ids)",
            "GPUModelRunner.sample_tokens": "(...)",
            "GPUModelRunner.get_model": "()",
        },
    ),
    *_members(
        "v1.worker.gpu_model_runner",
        "GPUModelRunner",
        "requests input_batch input_ids sampler discard_request_mask use_async_scheduling compilation_config "
        "model_memory_usage",
    ),
    *_members("v1.worker.gpu_input_batch", "CachedRequestState", "prompt_token_ids output_token_ids"),
    *_members("v1.core.sched.output", "NewRequestData", "prefill_token_ids"),
    *_in("v1.worker.gpu_input_batch", {"InputBatch.req_ids": "property", "InputBatch.num_reqs": "property"}),
    *_members("v1.worker.gpu_input_batch", "InputBatch", "req_id_to_index generators num_computed_tokens_cpu"),
    *_in("v1.sample.sampler", {"Sampler.sample": "(logits, sampling_metadata, ...)"}),
    *_members("v1.sample.sampler", "Sampler", "topk_topp_sampler"),
    *_members("v1.sample.ops.topk_topp_sampler", "TopKTopPSampler", "logprobs_mode"),
    *_members(
        "v1.worker.gpu.model_runner",
        "GPUModelRunner",
        "model_state req_states sampler prompt_logprobs_worker model_memory_usage",
    ),
    *_in(
        "v1.worker.gpu.model_states.interface",
        {
            "ModelState.add_request": "(req_index, new_req_data)",
            "ModelState.remove_request": "(req_id)",
            "ModelState.prepare_inputs": "(input_batch, req_states)",
        },
    ),
    *_members("v1.worker.gpu.states", "RequestState", "req_id_to_index"),
    *_members(
        "v1.worker.gpu.input_batch",
        "InputBatch",
        "req_ids num_reqs idx_mapping_np num_computed_tokens_np num_scheduled_tokens input_ids",
    ),
    *_in(
        "v1.worker.gpu.sample.sampler",
        {
            "Sampler.sample": "(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, ...)",
            "get_num_nans": "imported from vllm.v1.worker.gpu.metrics.logits",
        },
    ),
    *_members("v1.worker.gpu.sample.sampler", "Sampler", "compute_nans"),
    *_in("v1.worker.gpu.async_utils", {"AsyncOutput.get_output": "()"}),
    *_members("v1.worker.gpu.async_utils", "AsyncOutput", "copy_event num_nans"),
    *_in(
        "v1.worker.gpu.sample.prompt_logprob",
        {"PromptLogprobsWorker.compute_prompt_logprobs": "(logits_fn, hidden_states, ...)"},
    ),
    *_in(
        "forward_context",
        {"set_forward_context": "(attn_metadata, vllm_config, ..., num_tokens, skip_compiled)"},
    ),
    *_in("utils.torch_utils", {"async_tensor_h2d": "(data, device, dtype, out)"}),
    *_in("config.vllm", {"set_current_vllm_config": "(vllm_config, ...)"}),
    *_members("config.compilation", "CompilationConfig", "static_forward_context"),
    *_in(
        "distributed.parallel_state",
        {"get_pp_group": "()", "get_tp_group": "()", "cleanup_dist_env_and_memory": "(...)"},
    ),
    *_in("model_executor.models.utils", {"PPMissingLayer": "class"}),
    *_in("model_executor.layers.attention_layer_base", {"AttentionLayerBase": "class"}),
    *_in(
        "model_executor.layers.logits_processor",
        {"LogitsProcessor.forward": "(lm_head, hidden_states, embedding_bias, ...)"},
    ),
    *_members(
        "model_executor.layers.logits_processor", "LogitsProcessor", "scale soft_cap org_vocab_size logits_as_input"
    ),
    *_members(
        "model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbedding",
        "shard_indices num_embeddings_per_partition tp_size quant_method",
    ),
)

_CLIENT = (
    *_in(
        "entrypoints.llm",
        {
            "LLM.enqueue": "(prompts, sampling_params, ..., use_tqdm)",
            "LLM.collective_rpc": "(method, ..., args)",
            "LLM.reset_prefix_cache": "(...)",
            "LLM.llm_engine": "attribute",
            "LLM.model_config": "attribute",
        },
    ),
    *_in(
        "v1.engine.llm_engine",
        {
            "LLMEngine.step": "()",
            "LLMEngine.has_unfinished_requests": "()",
            "LLMEngine.abort_request": "(request_ids, internal)",
            "LLMEngine.reset_prefix_cache": "(...)",
        },
    ),
    *_members("v1.engine.llm_engine", "LLMEngine", "vllm_config engine_core output_processor"),
    *_members("v1.engine.output_processor", "OutputProcessor", "request_states"),
    *_in("v1.engine.core_client", {"InprocClient.shutdown": "(timeout)", "MPClient.shutdown": "(timeout)"}),
    *_members("v1.engine.core_client", "InprocClient", "engine_core"),
    *_members("v1.engine.core_client", "SyncMPClient", "outputs_queue"),
    *_in("v1.engine.exceptions", {"EngineDeadError": "class"}),
    *_members(
        "sampling_params",
        "SamplingParams",
        "n temperature top_p top_k min_p repetition_penalty seed max_tokens stop stop_token_ids ignore_eos logprobs "
        "detokenize skip_clone extra_args output_kind",
    ),
    *_in("sampling_params", {"RequestOutputKind": "class"}),
    *_members("outputs", "RequestOutput", "request_id outputs finished num_cached_tokens"),
    *_members("outputs", "CompletionOutput", "token_ids finish_reason logprobs"),
)

_SERVER = (
    *_in("entrypoints.launchers.cli_args", {"make_arg_parser": "(parser)"}, ("0.32",)),
    *_in("entrypoints.common.cli_args", {"make_arg_parser": "(parser)"}, ("0.33",)),
    *_in("entrypoints.launchers.cli_args", {"validate_parsed_serve_args": "(args)"}, ("0.32",)),
    *_in("entrypoints.common.cli_args", {"validate_parsed_serve_args": "(args)"}, ("0.33",)),
    *_in("entrypoints.serve.utils.api_utils", {"cli_env_setup": "()"}, ("0.32",)),
    *_in("entrypoints.common.startup", {"cli_env_setup": "()"}, ("0.33",)),
    *_in("utils.argparse_utils", {"FlexibleArgumentParser": "class"}),
    *_in("utils.system_utils", {"decorate_logs": "(..., skip_if_decorated)"}),
    *_in("logger", {"configure_logging_from_args": "(args)"}),
    *_in("entrypoints.launchers.api_server.entry", {"build_async_engine_client": "(args, ...)"}),
    *_in(
        "entrypoints.launchers.launcher",
        {
            "setup_server": "(args, ..., reuse_port)",
            "serve_http": "(app, sock, enable_ssl_refresh, ..., **uvicorn_kwargs)",
        },
    ),
    *_in(
        "entrypoints.launchers.api_server.app_state",
        {"init_app_state": "(engine_client, state, args, supported_tasks)"},
    ),
    *_in("entrypoints.launchers.app", {"build_app": "(args, supported_tasks, model_config)"}),
    *_in("entrypoints.launchers.utils.server_utils", {"get_uvicorn_log_config": "(args)"}),
    *_in(
        "entrypoints.serve.middleware.authenticate",
        {"AuthenticationMiddleware.__init__": "(app, tokens)", "AuthenticationMiddleware.verify_token": "(headers)"},
    ),
    *_in("exceptions", {"VLLMValidationError": "class"}),
    *_in(
        "v1.engine.async_llm",
        {
            "AsyncLLM.generate": "(prompt, sampling_params, request_id, ...)",
            "AsyncLLM.collective_rpc": "(method, ..., args)",
            "AsyncLLM.reset_prefix_cache": "(...)",
            "AsyncLLM.get_supported_tasks": "()",
            "AsyncLLM.shutdown": "(timeout)",
        },
    ),
    *_members("v1.engine.async_llm", "AsyncLLM", "vllm_config model_config engine_core"),
    *_in(
        "v1.engine.core_client",
        {"AsyncMPClient.add_request_async": "(request)", "AsyncMPClient.abort_requests_async": "(request_ids)"},
    ),
)

TOUCHED = (*_SCHEDULER, *_ENGINE_PROCESS, *_WORKERS, *_CLIENT, *_SERVER)
"""The table."""


def module_of(name: str, version: str) -> str:
    """The module that has a name which versions keep in different ones.

    Args:
        name: as the table gives it.
        version: of vLLM, such as 0.33.0.
    """
    return next(t.place.partition(":")[0] for t in TOUCHED if t.name == name and minor(version) in t.versions)


def minor(version: str) -> str:
    """The minor version of a version: 0.33 of 0.33.0."""
    return ".".join(version.split(".")[:2])
