"""What other trainers and servers call our keys, for the hint at an unknown key.

Of TRL, OpenRLHF and NeMo-Aligner, docs/coming-from.md has the table.
"""

import difflib
from typing import Any

_NAMES = {  # our key, "" for none -> its names elsewhere
    "run.dir": "output_dir save_path explicit_log_dir ckpt.output_dir",
    "run.seed": "seed train.seed",
    "run.run_id": "run_name experiment_name",
    "server.host": "ip",
    "server.http_port": "port",
    "reward.model": "reward_model reward_pretrain rm_model_file reward.model_name_or_path",
    "reward.standardization": "normalize_reward reward_standardization reward.normalize_enable",
    "reward.pooling": "use_avg_pool",
    "reward.attribute_weights": "merge_attributes",
    "rewards.<name>.function": "reward_funcs remote_rm_url reward.remote_url",
    "rewards.<name>.weight": "reward_weights",
    "critic.model": "value_model critic_pretrain critic.model_name_or_path",
    "critic.token_budget": "inference_micro_batch_size",
    "trainer.clip_value": "cliprange_value value_clip loss_clip_val critic.value_clip",
    "trainer.optimizer.lr": "critic_learning_rate vf_coef critic.adam.lr",
    "actor.steps": "max_steps num_train_epochs num_episodes train.num_episodes",
    "actor.rollout_size": (
        "batch_size generation_batch_size rollout_batch_size num_rollout_samples rollout.batch_size "
        "steps_per_generation"
    ),
    "actor.checkpoint_every": "save_steps save_interval ckpt.save_steps",
    "actor.keep_checkpoints": "save_total_limit ckpt.max_num",
    "actor.one_step_off_policy": "async_train train.async_enable",
    "actor.trackers": "report_to wandb wandb_project tensorboard logger use_wandb create_wandb_logger logger.wandb.key",
    "actor.logged_texts": "log_completions",
    "actor.policy.model": "model pretrain restore_from_path actor.model_name_or_path policy_model",
    "actor.policy.precision": "bf16 fp16 precision",
    "actor.policy.token_budget": (
        "micro_train_batch_size micro_batch_size forward_micro_batch_size train.micro_batch_size "
        "train.max_tokens_per_gpu"
    ),
    "actor.policy.lora_rank": "r lora_r lora_rank use_peft peft_config peft_scheme adapter_dim ds.lora.rank",
    "actor.policy.lora_alpha": "lora_alpha ds.lora.alpha",
    "actor.policy.lora_targets": "target_modules ds.lora.target_modules",
    "actor.policy.gradient_checkpointing": "gradient_checkpointing actor.gradient_checkpointing_enable",
    "actor.prompts.path": (
        "dataset train_dataset dataset_name data_path train_files prompt_data data_prefix data.prompt_dataset"
    ),
    "actor.prompts.max_tokens": "max_prompt_length prompt_max_len data.max_len",
    "actor.validation.prompts": "eval_dataset eval.dataset",
    "actor.validation.every": "eval_steps val_check_interval eval.steps",
    "actor.validation.size": "num_val_samples",
    "actor.generation.max_new_tokens": (
        "max_completion_length response_length generate_max_len max_length rollout.max_new_tokens"
    ),
    "actor.generation.min_new_tokens": "min_length",
    "actor.generation.batch_size": "rollout_micro_batch_size",
    "actor.generation.stop_strings": "stop_token end_strings",
    "actor.algorithm.name": (
        "advantage_estimator normalize_advantages scale_rewards importance_sampling_level algo.advantage.estimator"
    ),
    "actor.algorithm.loss": "loss_mode actor.policy_loss_type",
    "actor.algorithm.correction": "importance_cap vllm_importance_sampling_mode vllm_importance_sampling_correction",
    "actor.algorithm.correction.high": (
        "vllm_importance_sampling_clip_max rollout_is_threshold algo.advantage.is_correction_threshold"
    ),
    "actor.algorithm.max_resampled": (
        "dynamic_filtering dynamic_sampling max_num_gen_batches algo.dynamic_filtering_enable"
    ),
    "actor.generation.temperature": "rollout.temperature",
    "actor.generation.top_p": "rollout.top_p",
    "actor.algorithm.responses_per_prompt": (
        "num_generations n_samples_per_prompt num_rollouts_per_prompt rollout.n_samples_per_prompt"
    ),
    "actor.algorithm.clip_ratio": "epsilon cliprange eps_clip ratio_eps actor.eps_clip",
    "actor.algorithm.clip_ratio_high": "epsilon_high eps_clip_low_high actor.eps_clip_low_high",
    "actor.algorithm.loss_mean": "loss_type actor.loss_agg_mode",
    "actor.algorithm.mask_unfinished": "mask_truncated_completions",
    "actor.algorithm.entropy_bonus": "entropy_loss_coef entropy_coef actor.entropy_coef",
    "actor.algorithm.critic_warmup_steps": "freezing_actor_steps critic.freezing_steps",
    "actor.algorithm.gamma": "discount_factor algo.advantage.gamma",
    "actor.algorithm.lam": "lambd gae_lambda algo.advantage.lambd",
    "actor.update.epochs": "num_iterations num_ppo_epochs max_epochs train.max_epochs",
    "actor.update.minibatch_size": (
        "mini_batch_size train_batch_size global_batch_size per_device_train_batch_size gradient_accumulation_steps "
        "train.batch_size"
    ),
    "actor.kl.coef": "beta kl_coef init_kl_coef initial_policy_kl_penalty algo.kl.init_coef",
    "actor.kl.estimator": "kl_estimator use_absolute_kl algo.kl.estimator",
    "actor.kl.penalty_in": "use_kl_loss algo.kl.use_loss",
    "actor.kl.target": "kl_target algo.kl.target",
    "actor.rewards.clip": "reward_clip_range reward.clip_range",
    "actor.rewards.overlong_tokens": "overlong_buffer_len reward.overlong_buffer_len",
    "actor.rewards.overlong_penalty": "overlong_penalty_factor reward.overlong_penalty_factor",
    "actor.optimizer.lr": "lr learning_rate actor_learning_rate actor.adam.lr",
    "actor.optimizer.grad_clip": "max_grad_norm max_norm gradient_clip_val actor.max_norm",
    "actor.optimizer.weight_decay": "weight_decay l2 actor.adam.weight_decay",
    "actor.optimizer.min_lr": "lr_scheduler_type min_lr actor.min_lr_ratio",
    "actor.optimizer.warmup_steps": "warmup_steps warmup_ratio lr_warmup_steps_ratio actor.lr_warmup_ratio",
    "run.deterministic": "train.full_determinism_enable",
    "reference.model": "ref_model ref reference_model",
    "reward.process.separator": "step_separator",
    "environment.class": "environment_factory agent_func_path train.agent_func_path",
    "environment.agent": "rollout_func",
    "environment.max_turns": "max_tool_calling_iterations",
    "actor.ranks": "deepspeed zero_stage fsdp actor.num_gpus_per_node",
    "trainer.ranks": "critic.num_gpus_per_node",
    "actor.prompts.files.weight": "data.prompt_probs",
    "actor.generation.engine": "use_vllm vllm.num_engines",
    "actor.generation.vllm.servers": "vllm_mode vllm_server_base_url",
    "actor.algorithm.correction.level": "algo.advantage.is_correction_level",
    "actor.algorithm.correction.mode": "algo.advantage.is_correction_mode",
    "actor.algorithm.correction.low": "vllm_importance_sampling_clip_min",
    "actor.optimizer.kind": "optim actor.optim",
    "actor.rewards.normalization": "whiten_rewards",
    "actor.rewards.missing_eos_penalty": "reward.stop_properly_penalty_coef",
    "": (
        "min_p sync_ref_model trt_llm pad_to_length resume_if_exists resume_from_checkpoint offload_adam_states "
        "multi_objective_aggregation top_entropy_quantile use_adaptive_entropy off_policy_mask_threshold "
        "use_bias_correction_kl num_generations_eval ckpt.load_enable ds.load_in_4bit "
        "train.partial_rollout_enable data.image_key eval.temperature algo.advantage.is_correction_gating "
        "algo.advantage.no_std_norm ds.attn_implementation kl_horizon algo.kl.horizon "
        "betas adam_beta1 adam_beta2 adam_betas actor.adam.betas"
    ),
}
_ADVICE = {  # names elsewhere of what is no setting here -> what to do
    "padding_side": "rows are padded on the right, which changes no score",
    "value_head_prefix": "the head is found by config.json and the names of its tensors",
    "num_labels": "it is read from the model's config.json",
    "trust_remote_code": "a model's own code is never run; use an architecture that transformers has",
    "chat_template_kwargs": "give them as a column of the prompts, or in a request's metadata",
    "tokenizer": "the tokenizer is the one in the model's folder; save it there",
    "load_in_4bit": "weights are float32 or bfloat16 (dtype, precision); lora_rank trains with less memory",
    "gpu_memory_utilization": "for vLLM, add it to actor.generation.vllm.arguments",
    "push_to_hub": "`hf upload` uploads the folder of the policy (run.dir/policy)",
    "logging_steps": "each step is logged",
    "do_sample": "responses are always sampled, at actor.generation.temperature",
}
_SAME_ADVICE = {
    "load_in_8bit": "load_in_4bit",
    "quantization": "load_in_4bit",
    "tokenizer_path": "tokenizer",
    "tokenizer_name_or_path": "tokenizer",
    "hub_model_id": "push_to_hub",
}
OTHER_NAMES = {name: key for key, names in _NAMES.items() for name in names.split()}
_OF_CRITIC = {  # ours for a name under `trainer` or `critic`
    "batch_size": "trainer.global_batch_size",
    "train_batch_size": "trainer.global_batch_size",
    "max_epochs": "trainer.epochs",
    "cliprange": "trainer.clip_value",
}
_FOR_CRITIC = {"actor.optimizer.": "trainer.optimizer.", "actor.policy.": "trainer."}  # sections with the same keys
_OF_MODEL = {  # ours in a section of a served model
    "batch_size": "token_budget",
    "micro_batch_size": "token_budget",
    "precision": "dtype",
    "torch_dtype": "dtype",
    "bf16": "dtype",
    "fp16": "dtype",
    "max_model_len": "max_length",
    "max_seq_len": "max_length",
}
_MODEL = ("checkpoint", "pretrain", "pretrained", "model_name_or_path", "model_path", "model_name", "path", "name")
_FOLDERS = {  # section -> the key that a name of a model's folder stands for
    "": "reward.model (to serve it) or actor.policy.model (to train it)",
    "actor": "actor.policy.model",
    "trainer": "critic.model",
}


def key_of(section: str, name: str) -> str | None:
    """Return our key for what other trainers call `name`, or nearly so; "" if we have none; None for an unknown name.

    Args:
        section: the section of the configuration in which `name` stands, "" at the top level.
    """
    names = dict(OTHER_NAMES)
    if section in ("trainer", "critic"):
        for ours, critics in _FOR_CRITIC.items():
            names = {other: key.replace(ours, critics) for other, key in names.items()}
        names |= _OF_CRITIC
    if section in ("reward", "critic", "reference"):
        names |= {other: f"{section}.{key}" for other, key in _OF_MODEL.items()} | {"attn_implementation": ""}
        names |= dict.fromkeys(_MODEL, f"{section}.model")
    elif section in _FOLDERS:
        names |= dict.fromkeys(("model", *_MODEL[: -2 if section else -1]), _FOLDERS[section])
    names |= dict.fromkeys((*_ADVICE, *_SAME_ADVICE), "")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    return names[near[0]] if near else None


def advice_on(name: str) -> str:
    """Return advice for another trainer's setting that has no counterpart here; "" if there is none."""
    return _ADVICE.get(_SAME_ADVICE.get(name, name), "")


def key_of_path(path: str, value: Any) -> str | None:
    """Return our key for exactly this path of another trainer; a section in `value` continues the path."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        path = f"{path}.{name}"
    return OTHER_NAMES.get(path) if "." in path else None
