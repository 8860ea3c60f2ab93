"""Names that other trainers and servers use for our keys, for the hint at an unknown key.

Of TRL, OpenRLHF, verl and NeMo-Aligner, docs/coming-from.md has the table.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rlhf_triton.user_code import FILE_SPEC, MODULE_SPEC

# A name with a dot stands for paths that end with it, and goes before its last part alone.
_NAMES = {  # our key, "" for none -> its names elsewhere
    "run.dir": "output_dir save_path explicit_log_dir ckpt.path default_local_dir",
    "run.seed": "seed data_seed data_loader_seed",
    "run.run_id": "run_name experiment_name",
    "run.deterministic": "full_determinism full_determinism_enable",
    "server.host": "ip",
    "server.http_port": "port inference.port",
    "reward.model": "reward_model reward_pretrain rm_model_file reward_model.enable",
    "reward.standardization": "normalize_reward reward_standardization reward.normalize_enable",
    "reward.token_budget": "inference.micro_batch_size",
    "reward.pooling": "use_avg_pool",
    "reward.attribute_weights": "merge_attributes",
    "reward.process.separator": "step_separator",
    "rewards.<name>.function": (
        "reward_funcs reward_fn reward_function remote_rm_url reward.remote_url custom_reward_function "
        "custom_reward_function.path custom_reward_function.name"
    ),
    "rewards.<name>.weight": "reward_weights",
    "rewards.<name>.workers": "reward.num_workers",
    "reference.model": "ref_model ref reference_model",
    "critic.model": "value_model critic_pretrain",
    "critic.token_budget": "inference_micro_batch_size",
    "trainer.clip_value": "cliprange_value value_clip loss_clip_val",
    "trainer.optimizer.lr": "critic_learning_rate critic_lr vf_coef",
    "trainer.optimizer.max_steps": "critic.optim.total_training_steps",
    "trainer.publish.keep": "max_critic_ckpt_to_keep",
    "environment.class": ("environment_factory agent_func_path multi_turn.enable tool_config_path function_tool_path"),
    "environment.agent": "rollout_func agent.default_agent_loop agent.agent_loop_config_path",
    "environment.max_turns": "max_tool_calling_iterations max_assistant_turns",
    "environment.workers": "agent.num_workers",
    "actor.ranks": (
        "deepspeed zero_stage fsdp fsdp_config fsdp_config.fsdp_size fsdp.fsdp_size strategy num_gpus_per_node "
        "num_nodes nnodes n_gpus_per_node trainer.nnodes trainer.n_gpus_per_node"
    ),
    "actor.steps": "max_steps num_train_epochs num_episodes total_epochs total_training_steps",
    "actor.rollout_size": (
        "batch_size generation_batch_size rollout_batch_size num_rollout_samples steps_per_generation "
        "rollout.batch_size data.train_batch_size"
    ),
    "actor.checkpoint_every": "save_steps save_interval save_strategy save_freq",
    "actor.keep_checkpoints": "save_total_limit ckpt.max_num max_actor_ckpt_to_keep",
    "actor.max_off_policy_steps": (
        "one_step_off_policy async_train async_enable async_queue_size staleness_threshold max_head_offpolicyness "
        "max_trajectory_age_steps max_async_level"
    ),
    "actor.max_off_policy_steps (of responses) or actor.max_staleness (of the critic)": "max_staleness",
    "actor.trackers": "report_to wandb logger use_wandb create_wandb_logger logger.wandb.key",
    "actor.logged_texts": "log_completions num_completions_to_print rollout_data_dir",
    "actor.policy.model": "model pretrain restore_from_path policy_model model.path",
    "actor.policy.device": "use_cpu",
    "actor.policy.precision": (
        "bf16 fp16 precision dtype torch_dtype ds.param_dtype fsdp_config.model_dtype fsdp.model_dtype "
        "fsdp_config.dtype fsdp.dtype"
    ),
    "actor.policy.token_budget": (
        "micro_train_batch_size micro_batch_size forward_micro_batch_size max_tokens_per_gpu dynamic_batch_enable "
        "use_dynamic_bsz ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu"
    ),
    "actor.policy.lora_rank": "r lora lora_r lora_rank use_peft peft_config peft_scheme adapter_dim lora.rank",
    "actor.policy.lora_alpha": "lora_alpha lora.alpha",
    "actor.policy.lora_targets": "target_modules lora_target_modules lora.target_modules",
    "actor.policy.gradient_checkpointing": (
        "gradient_checkpointing gradient_checkpointing_enable enable_gradient_checkpointing activation_checkpointing"
    ),
    "actor.policy.freeze": "freeze_visual_encoder freeze_vision_tower",
    "actor.prompts.path": (
        "dataset train_dataset dataset_name data_path train_files prompt_data data_prefix prompt_dataset"
    ),
    "actor.prompts.files.weight": "prompt_probs",
    "actor.prompts.max_tokens": "max_prompt_length prompt_max_len data.max_len rollout.prompt_length",
    "actor.prompts.too_long": "truncation filter_overlong_prompts",
    "actor.validation.prompts": "eval_dataset eval.dataset val_files",
    "actor.validation.every": "eval_steps eval_strategy val_check_interval eval.steps test_freq",
    "actor.validation.size": "num_val_samples val_max_samples",
    "actor.validation.greedy": "val_kwargs.do_sample",
    "actor.generation.engine": (
        "use_vllm vllm.num_engines rollout.name use_transformers_continuous_batching use_transformers_paged"
    ),
    "actor.generation.vllm.servers": "vllm_mode vllm_server_base_url vllm_server_host vllm_server_port",
    "actor.generation.vllm.cuda_devices": "rollout.n_gpus_per_node",
    "actor.generation.max_new_tokens": (
        "max_completion_length response_length generate_max_len max_length max_response_length max_tokens"
    ),
    "actor.generation.min_new_tokens": "min_length",
    "actor.generation.batch_size": ("rollout_micro_batch_size vllm_generate_batch_size per_device_eval_batch_size"),
    "actor.generation.stop_strings": "stop stop_token end_strings",
    "actor.algorithm.name": (
        "advantage_estimator normalize_advantages scale_rewards importance_sampling_level algo.advantage.estimator "
        "adv_estimator norm_adv_by_std_in_grpo multi_objective_aggregation"
    ),
    "actor.algorithm.loss": "loss_mode policy_loss_type rollout_correction.loss_type",
    "actor.algorithm.loss_mean": "loss_type loss_agg_mode",
    "actor.algorithm.old_logprobs": "bypass_mode",
    "actor.algorithm.correction": (
        "importance_cap vllm_importance_sampling_mode vllm_importance_sampling_correction is_correction_enable "
        "is_correction_type"
    ),
    "actor.algorithm.correction.level": "is_correction_level rollout_is",
    "actor.algorithm.correction.mode": "is_correction_mode is_correction_gating rollout_rs",
    "actor.algorithm.correction.low": "vllm_importance_sampling_clip_min",
    "actor.algorithm.correction.high": (
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_is_threshold rollout_rs_threshold "
        "is_correction_threshold tis_binary_kl_threshold"
    ),
    "actor.algorithm.max_resampled": (
        "dynamic_filtering dynamic_filtering_enable dynamic_sampling max_num_gen_batches filter_groups.enable"
    ),
    "actor.algorithm.responses_per_prompt": (
        "num_generations n_samples_per_prompt num_rollouts_per_prompt rollout_n rollout.n"
    ),
    "actor.algorithm.clip_ratio": "epsilon cliprange eps_clip ratio_eps clip_ratio_low",
    "actor.algorithm.clip_ratio_high": "epsilon_high eps_clip_low_high",
    "actor.algorithm.mask_unfinished": "mask_truncated_completions",
    "actor.algorithm.entropy_bonus": "entropy_loss_coef entropy_coef entropy_coeff",
    "actor.algorithm.critic_warmup_steps": "freezing_actor_steps freezing_steps critic_warmup",
    "actor.algorithm.gamma": "discount_factor",
    "actor.algorithm.lam": "lambd gae_lambda",
    "actor.update.epochs": "num_iterations num_ppo_epochs ppo_epochs max_epochs",
    "actor.update.minibatch_size": (
        "mini_batch_size ppo_mini_batch_size global_batch_size per_device_train_batch_size "
        "gradient_accumulation_steps train.batch_size"
    ),
    "actor.update.minibatch_size (OpenRLHF) or actor.rollout_size (verl)": "train_batch_size",
    "actor.kl.coef": "beta kl_coef init_kl_coef init_coef initial_policy_kl_penalty kl_loss_coef",
    "actor.kl.estimator": (
        "kl_estimator use_absolute_kl kl_penalty kl_loss_type use_bias_correction_kl use_unbiased_kl"
    ),
    "actor.kl.penalty_in": "use_kl_loss use_kl_in_reward algo.kl.use_loss",
    "actor.kl.target": "kl_target kl_ctrl.type kl_ctrl.target_kl",
    "actor.rewards.clip": "reward_clip_range reward.clip_range",
    "actor.rewards.overlong_tokens": "overlong_buffer_len overlong_buffer_cfg.enable overlong_buffer_cfg.len",
    "actor.rewards.overlong_penalty": "overlong_penalty_factor overlong_buffer_cfg.penalty_factor",
    "actor.rewards.normalization": "whiten_rewards",
    "actor.rewards.missing_eos_penalty": "stop_properly_penalty_coef",
    "actor.optimizer.kind": "optim optim.optimizer critic.optim.optimizer",
    "actor.optimizer.lr": "lr learning_rate actor_learning_rate actor_lr",
    "actor.optimizer.grad_clip": "max_grad_norm max_norm gradient_clip_val gradient_clipping grad_clip clip_grad",
    "actor.optimizer.weight_decay": "weight_decay l2",
    "actor.optimizer.min_lr": "lr_scheduler_type lr_scheduler warmup_style min_lr min_lr_ratio",
    "actor.optimizer.warmup_steps": ("warmup_steps warmup_ratio lr_warmup_steps lr_warmup_steps_ratio lr_warmup_ratio"),
    "": (
        "min_p repetition_penalty sync_ref_model trt_llm pad_to_length offload_adam_states adam_offload "
        "param_offload optimizer_offload top_entropy_quantile use_adaptive_entropy "
        "entropy_coef_min entropy_coef_max off_policy_mask_threshold num_generations_eval "
        "partial_rollout_enable image_key no_std_norm attn_implementation kl_horizon horizon "
        "betas adam_beta1 adam_beta2 adam_betas adam_epsilon lora_dropout use_liger_kernel torch_compile "
        "use_torch_compile use_fused_kernels use_remove_padding packing_samples balance_batch val_only delta "
        "dual_clip clip_ratio_c aux_loss_coef router_aux_loss_coef callbacks model_init_kwargs do_train do_eval "
        "vllm_enable_sleep_mode enable_jit_checkpoint muon sandbox_fusion v1 use_v1 critic.loss_agg_mode "
        "critic.megatron critic.profiler critic.veomni remove_unused_columns generation_kwargs "
        "dataloader_num_workers optim_args lr_scheduler_kwargs disable_dropout load_best_model_at_end "
        "metric_for_best_model cast_lm_head_to_fp32 lora_modules_to_save use_rslora use_dora "
        "ref_model_mixup_alpha ref_model_sync_steps entropy_target entropy_coef_delta vllm_server_timeout "
        "vllm_group_port free_cache_engine calculate_log_probs gen_batch_size val_batch_size max_samples "
        "train_max_samples log_val_generations return_raw_chat colocate_all enable_sleep enable_ema "
        "optim.total_training_steps rollout.nnodes"
    ),
}
ADVICE = {  # what to do -> names elsewhere of what is no setting here
    "rows are padded on the right, which changes no score": "padding_side",
    "the head is found by config.json and the names of its tensors": "value_head_prefix",
    "it is read from the model's config.json": "num_labels",
    "a model's own code is never run; use an architecture that transformers has": "trust_remote_code",
    "give them as a column of the prompts, or in a request's metadata": (
        "chat_template_kwargs apply_chat_template_kwargs"
    ),
    "give them as a column of the prompts": "tools",
    "rename the column to prompt, text or messages": "input_key prompt_key messages_key",
    "a reward function gets every other column, in sample.metadata": "label_key reward_fn_key",
    "chats are always rendered by the chat template": "apply_chat_template input_template",
    "the tokenizer and its chat template are those in the model's folder; save them there": (
        "tokenizer tokenizer_path tokenizer_name_or_path processing_class reward_processing_classes "
        "custom_chat_template"
    ),
    "weights are float32 or bfloat16 (dtype, precision); lora_rank trains with less memory": (
        "load_in_4bit load_in_8bit quantization quantization_config"
    ),
    "for vLLM, add it to actor.generation.vllm.arguments": (
        "gpu_memory_utilization vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm.tensor_parallel_size "
        "rollout.tensor_model_parallel_size max_num_batched_tokens "
        "max_num_seqs enforce_eager enable_prefix_caching enable_chunked_prefill engine_kwargs vllm_model_impl"
    ),
    "a run starts vLLM with the policy's dtype and lengths": (
        "rollout.dtype rollout.max_model_len vllm_max_model_length"
    ),
    "`hf upload` uploads the folder of the policy (run.dir/policy)": "push_to_hub hub_model_id hub_strategy",
    "the policy is saved as a Hugging Face folder (run.dir/policy)": "save_hf",
    "the critic's versions are in run.dir/weights/critic": "save_value_network",
    "each step is logged": "logging_steps logging_strategy logging_first_step",
    "responses are always sampled, at actor.generation.temperature": "do_sample",
    "with actor.validation.prompts, a validation runs before the first step": "val_before_train eval_on_start",
    "prompts are always shuffled, by run.seed": "data.shuffle shuffle_dataset",
    "TensorBoard's files are always in run.dir/tensorboard": "tensorboard tensorboard_dir logging_dir",
    "a run resumes where it ended; --fresh starts over": (
        "resume_from_checkpoint resume_if_exists resume_mode resume_from_path load_enable"
    ),
    "actor.trackers names the trackers, and each reads its own environment variables, such as WANDB_PROJECT": (
        "project project_name wandb_project wandb_run_name wandb_group wandb_org trackio_space_id "
        "logger.wandb.project logger.wandb.run_name logger.wandb.group logger.wandb.org"
    ),
}
_VALUES = {  # our value, "" for none -> other trainers' values of such a setting, unless they are alike
    "ppo": "gae",
    "grpo": "group_norm grpo_vectorized",
    "rloo": "rloo_vectorized",
    "reinforce++": "reinforce_plus_plus",
    "clipped": "ppo vanilla grpo dapo",
    "token": "token-mean dapo bnpo",
    "sequence": "seq-mean-token-mean grpo",
    "constant": "seq-mean-token-sum-norm dr_grpo",
    "k1": "kl",
    "k2": "mse",
    "k3": "low_var_kl",
    "adamw": "adamw_torch adamw_torch_fused",
    "float32": "fp32",
    "bfloat16": "bf16",
    "": "sapo",
}
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
_ADVICE_ON = {name: advice for advice, names in ADVICE.items() for name in names.split()}
_IN_SECTION = {  # our section, "" for none -> sections elsewhere with keys of these names, or of names in `_NAMES`
    "run": "ckpt exp_manager",
    "server": "remote_critic_rm.critic",
    "reward": "reward_model reward_model.model",
    "critic": "critic.model",
    "reference": "ref.model",
    "environment": "multi_turn",
    "trainer.optimizer": "critic.optim critic.adam",
    "actor": "async_training train trainer.ppo trainer.reinforce logger logger.wandb pretrained_checkpoint",
    "actor.policy": "model model.peft lora_tuning ref ds",
    "actor.prompts": "data model.data",
    "actor.generation": "rollout vllm sampling_params length_params",
    "actor.algorithm": "actor algorithm algo algo.advantage model.ppo policy_loss filter_groups",
    "actor.algorithm.correction": "rollout_correction",
    "actor.kl": "algo.kl kl_ctrl",
    "actor.optimizer": "optim adam optim.sched",
    "": (
        "actor_rollout_ref eval skip checkpoint custom_reward_function distillation transfer_queue global_profiler "
        "ray_kwargs reward_model.rollout reward_manager reward_kwargs"
    ),
}
_SECTIONS = {name: ours for ours, names in _IN_SECTION.items() for name in names.split()}
GENERIC = ("enable", "format", "level", "mode", "name", "path", "size", "type")  # in many sections, with many meanings
_PARENTS = {  # sections of other trainers
    ".".join(parts[:i])
    for path in (*OTHER_NAMES, *_ADVICE_ON, *(f"{section}." for section in _SECTIONS))
    for parts in [path.split(".")]
    for i in range(1, len(parts))
}
_CRITICS = {  # start of our key of the policy -> of the critic, for a name under `trainer` or `critic`
    "actor.optimizer.": "trainer.optimizer.",
    "actor.policy.model": "critic.model",
    "actor.policy.": "trainer.",
    "actor.ranks": "trainer.ranks",
    "actor.rollout_size": "trainer.global_batch_size",
    "actor.update.minibatch_size": "trainer.global_batch_size",
    "actor.update.epochs": "trainer.epochs",
    "actor.algorithm.clip_ratio": "trainer.clip_value",  # clips the value; there is no upper bound
}
_OF_MODEL = {  # names elsewhere -> key in a section of a served model
    "batch_size": "token_budget",
    "micro_batch_size": "token_budget",
    "forward_micro_batch_size": "token_budget",
    "forward_micro_batch_size_per_gpu": "token_budget",
    "forward_max_token_len_per_gpu": "token_budget",
    "precision": "dtype",
    "torch_dtype": "dtype",
    "bf16": "dtype",
    "fp16": "dtype",
    "max_model_len": "max_length",
    "max_seq_len": "max_length",
    "tensor_parallel_size": "tensor_parallel",
    "tensor_model_parallel_size": "tensor_parallel",
}
_OF_TRAINING = ("actor.optimizer.", "actor.policy.", "actor.ranks", "actor.update.")
_MODEL = ("model", "checkpoint", "pretrain", "pretrained", "model_name_or_path", "model_path", "model_name")
_FUNCTION = ("fn", "file", "func", "name", "path", "spec", "class", "module")
_TEXT_MEANS = {  # section -> its key that a text in place of the section stands for
    "run": "run.dir",
    "server": "server.host",
    "reward": "reward.model",
    "critic": "critic.model",
    "reference": "reference.model",
    "environment": "environment.class",
    "actor.policy": "actor.policy.model",
    "actor.prompts": "actor.prompts.path",
    "actor.validation": "actor.validation.prompts",
    "actor.generation": "actor.generation.engine",
    "actor.algorithm": "actor.algorithm.name",
    "actor.optimizer": "actor.optimizer.kind",
}
_NUMBER_MEANS = {"actor.kl": "actor.kl.coef", "actor.optimizer": "actor.optimizer.lr"}
_FOLDERS = {  # section -> the key that a name of a model's folder stands for
    "": "reward.model (to serve it) or actor.policy.model (to train it)",
    "actor": "actor.policy.model",
    "actor.policy": "actor.policy.model",
    "trainer": "critic.model",
}


def hint_at(path: str, valid: Collection[str]) -> str | None:
    """Return a hint if `path` is another trainer's name, or in one of its sections; otherwise None.

    Args:
        path: dotted path of an unknown key.
        valid: all our keys and sections.
    """
    section, _, name = path.rpartition(".")
    root = section.partition(".")[0]
    is_theirs = _is_theirs(section, valid)
    end = next((end for end in _ends(section) if end in _SECTIONS), "") if is_theirs else ""
    ours = _SECTIONS.get(end, "")
    names = _names_in(ours or (section if root in valid else _SECTIONS.get(root, "")))
    their_name = next((other for other in _ends(path) if other.rfind(".") >= max(1, len(end)) and other in names), None)
    if their_name is None and f"{ours}.{name}" in valid:
        return f"did you mean {ours}.{name}?"
    if their_name is None and name in names and (ours or not is_theirs):
        their_name = name
    if their_name is not None:
        return _sentence(their_name, names[their_name])
    return _sentence("", "") if is_theirs else None


def hint_near(path: str) -> str | None:
    """Return a hint if the last part of `path` is a misspelt name of another trainer; otherwise None."""
    section, _, name = path.rpartition(".")
    names = _names_in(section)
    closest_name = closest(name, names)
    return None if closest_name is None else _sentence(closest_name, names[closest_name])


def hint_at_value(section: str, value: Any, keys: Collection[str]) -> str:
    """Return a hint at a value in place of a section, whose `keys` are valid."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_function = isinstance(value, str) and bool(FILE_SPEC.match(f"{value}:f") or MODULE_SPEC.fullmatch(value))
    root, _, term = section.partition(".")
    if root == "rewards" and (is_number or isinstance(value, str)):
        named = "rewards.<name>" if term in keys else section  # `rewards: {function: …}`, without a term's name
        meant = f"{named}.weight" if is_number else f"{named}.function" if is_function else "reward.model"
    elif section == "reward" and is_function:
        meant = "rewards.<name>.function"
    else:
        meant = (_NUMBER_MEANS if is_number else _TEXT_MEANS if isinstance(value, str) else {}).get(section, "")
    return f"did you mean {meant}?" if meant else f"its keys are {', '.join(keys)}"


def hint_at_choice(value: Any, names: Collection[str]) -> str:
    """Return the end of a message about a value that is not in `names`: the nearest name, advice, or ""."""
    if not isinstance(value, str):
        return ""
    if advice := _ADVICE_ON.get(value):
        return f"; {advice}"
    near = [ours for ours, theirs in _VALUES.items() if ours in (*names, "") and value in theirs.split()]
    if not near:
        near = difflib.get_close_matches(value.lower(), names, cutoff=0.7)
        # Names with the same letters first: grpo for gpro.
        near.sort(key=lambda name: sorted(name) != sorted(value.lower()))
    return f"; did you mean {near[0]}?" if any(near) else ""


def has_keys(path: str, valid: Collection[str]) -> bool:
    """Return whether the unknown `path`, which has a mapping as its value, is a section of another trainer."""
    section, _, name = path.rpartition(".")
    is_named = name in OTHER_NAMES or name in _ADVICE_ON
    return any(end in _PARENTS for end in _ends(path)) or (_is_theirs(section, valid) and not is_named)


def closest(name: str, others: Iterable[str]) -> str | None:
    """Return the name in `others` that `name` misspells; None if there is none.

    Names with a word more, less or different are not alike: `entropy_coef_min` is not `entropy_coef`.
    """
    alike = [other for other in others if _is_misspelt(name, other.removesuffix("_s"))]  # a unit may be missing
    return max(alike, key=lambda other: _likeness(name, other), default=None)


def _is_misspelt(name: str, other: str) -> bool:
    words = name.split("_")
    others = other.split("_")
    if len(words) != len(others) or "." in other:
        return "".join(words) == "".join(others)
    # One wrong letter of four is enough to be alike.
    return all(
        _likeness(*pair) >= (0.75 if min(map(len, pair)) == 4 else 0.8) for pair in zip(words, others, strict=True)
    )


def _likeness(word: str, other: str) -> float:
    return difflib.SequenceMatcher(None, word, other).ratio()


def _sentence(name: str, key: str) -> str:
    if key:
        return f"did you mean {key}?"
    advice = _ADVICE_ON.get(name)
    return "this project has no such setting" + (f": {advice}" if advice else "")


def _is_theirs(section: str, valid: Collection[str]) -> bool:
    if not section or section.startswith("rewards.") or any(key.startswith(f"{section}.") for key in valid):
        return False
    parts = section.split(".")
    return any(end in _PARENTS for i in range(len(parts)) for end in _ends(".".join(parts[: i + 1])))


def _ends(path: str) -> Iterator[str]:
    """Yield the ends of a dotted path, longest first: a.b.c, b.c, c."""
    while path:
        yield path
        path = path.partition(".")[2]


def _names_in(section: str) -> dict[str, str]:
    """Return other trainers' names -> our keys, for an unknown key in our `section`."""
    root = section.partition(".")[0]
    names = OTHER_NAMES | dict.fromkeys(_ADVICE_ON, "")
    if root in ("trainer", "critic"):
        names = {name: _of_critic(name, key) for name, key in names.items()}
    if root in ("reward", "reference"):
        names = {name: "" if key.startswith(_OF_TRAINING) else key for name, key in names.items()}
    if root == "reward":
        names["function"] = "rewards.<name>.function"
    if root == "rewards":
        names = {name: key for name, key in names.items() if "." not in name}
        names |= dict.fromkeys((*_MODEL, *_FUNCTION), "reward.model")
        names |= {} if section == "rewards.model" else dict.fromkeys(_FUNCTION, f"{section}.function")
    if root in ("reward", "critic", "reference"):
        names |= {name: f"{root}.{key}" for name, key in _OF_MODEL.items()}
        names |= dict.fromkeys((*_MODEL, "path", "name"), f"{root}.model")
        if root != "critic":
            names |= dict.fromkeys(("num_gpus_per_node", "n_gpus_per_node"), f"{root}.device")
    elif section in _FOLDERS:
        names |= dict.fromkeys(_MODEL, _FOLDERS[section])
    return names


def _of_critic(name: str, key: str) -> str:
    start = next((start for start in _CRITICS if key.startswith(start)), None)
    if start is None or name.startswith("trainer."):  # verl's own `trainer` is the whole run
        return key
    return key.replace(start, _CRITICS[start]) if start.endswith(".") else _CRITICS[start]
