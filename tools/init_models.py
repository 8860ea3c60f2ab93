"""`rlhf-triton init models`: inspects models, scores a trial row, and writes the YAML sections that serve them.

Only the trial imports torch. Pickled weights are refused without being opened, unless `--convert` is given.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.checkpoints.inspection import CheckpointError, CheckpointInfo, inspect_checkpoint, reward_head
from rlhf_triton.checkpoints.language_models import check_language_model
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer, same_tokenizer
from rlhf_triton.config.command_line import interrupt_on_signals
from rlhf_triton.config.labels import attribute_weights, choices
from rlhf_triton.config.loading import parse_config, with_overrides
from rlhf_triton.config.required_files import has_chat_template
from rlhf_triton.config.sections import RewardSection
from rlhf_triton.config.yaml_file import dump_yaml

TRIAL_TOKENS = 8
TRIAL_TEXT = "A text."
HALF = {"BF16": "bfloat16"}
HEADS = {"sequence": "sequence classification", "token": "token classification", "value": "value head"}


def init_models(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Inspect the models and write the YAML, as the arguments of `init` say; `parser`: for its errors.

    Raises:
        CheckpointError: a folder cannot be used.
        ConfigError: an override is wrong.
    """
    folders = _check(parser, arguments)
    if arguments.convert is not None:
        from rlhf_triton.tools.convert_pickled import convert_pickled

        interrupt_on_signals()
        ((role, source),) = folders.items()
        convert_pickled(source, arguments.convert)
        setattr(arguments, role, arguments.convert)
    models = (arguments.reward, arguments.critic, arguments.policy)
    text = model_sections(*models, arguments.overrides, try_out=not arguments.no_load)
    if arguments.out is None:
        print(f"\n{text}", end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")
        print(f"\nwrote {arguments.out}")
    if "# choose" in text:
        print("not yet usable: the reward model has several labels; choose one of the lines in its section")


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the folders by role; exit with a message if the arguments contradict each other."""
    folders = {role: path for role in ("reward", "critic", "policy") if (path := getattr(arguments, role)) is not None}
    if not folders:
        parser.error("give --reward PATH, --critic PATH or --policy PATH")
    if arguments.convert is not None and len(folders) > 1:
        parser.error("--convert converts one folder: give one of --reward PATH, --critic PATH and --policy PATH")
    if arguments.out is not None and arguments.out.exists():
        parser.error(f"{arguments.out} already exists; choose another file")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"the folder {arguments.out.parent} does not exist; create it first")
    return folders


def model_sections(
    reward: Path | None, critic: Path | None, policy: Path | None, overrides: Sequence[str] = (), *, try_out: bool
) -> str:
    """Inspect the models, report on them, and return the YAML of their sections, which is validated.

    Args:
        reward: the reward model's folder.
        critic: the critic's folder, which may be the reward model's.
        policy: the policy's folder.
        overrides: keys of the sections, `section.key=value`, with which the models are tried as well.
        try_out: also load each model and score one row.

    Raises:
        CheckpointError: a folder cannot be used; the message names it and says what to do.
        ConfigError: an override is wrong.
    """
    rewards = None if reward is None else inspect_checkpoint(reward)
    if rewards is not None:
        _report("reward", rewards)
        reward_head(rewards)  # raises CheckpointError if the model has no reward head
    critics = rewards
    if critic != reward:
        critics = None if critic is None else inspect_checkpoint(critic)
    sections = with_overrides(make_sections(rewards, critics, policy), overrides)
    config = parse_config(sections, "the sections of the models", overrides)
    if rewards is not None and try_out:
        _try_reward(rewards, config.reward)
    if critics is not None and critics is not rewards:
        _report("critic", critics)
    if critics is not None and try_out:
        _try_critic(critics)
    if policy is not None:
        _try_policy(policy, try_out)
    if rewards is not None and critics is not None:
        _compare_tokenizers(rewards, critics)
    text = dump_yaml(sections)
    if rewards is not None and _needs_label_weights(rewards, config.reward):
        text = text.replace("reward:\n", f"reward:\n{_label_choices(rewards)}", 1)
    return text


def suggested_dtype(info: CheckpointInfo) -> str:
    """Return `bfloat16` if most weights in the files have that dtype and so need no conversion, else `float32`."""
    return HALF.get(next(iter(info.dtypes), ""), "float32")


def make_sections(
    reward: CheckpointInfo | None, critic: CheckpointInfo | None, policy: Path | None
) -> dict[str, dict[str, Any]]:
    """Return the `reward:` and `critic:` sections that serve these models, and the policy's key."""
    sections: dict[str, dict[str, Any]] = {}
    if reward is not None:
        sections["reward"] = {**_model_settings(reward), "pooling": "auto", "standardization": "model"}
    if critic is not None:
        sections["critic"] = {**_model_settings(critic), "standardization": "model"}
        if critic.constants is None and reward is not None and reward.constants is not None:
            constants = reward.constants  # values are standardised by the constants of the rewards they predict
            sections["critic"]["standardization"] = {"mean": constants.mean, "std": constants.std}
    if policy is not None:
        sections["actor"] = {"policy": {"model": str(policy)}}
    return sections


def _needs_label_weights(info: CheckpointInfo, section: RewardSection) -> bool:
    """Return whether nothing says which of several labels is the reward."""
    return len(info.label_names) > 1 and section.attribute_weights is None


def _model_settings(info: CheckpointInfo) -> dict[str, Any]:
    return {"model": str(info.folder), "dtype": suggested_dtype(info)}


def _label_choices(info: CheckpointInfo) -> str:
    """Return the settings that say which label is the reward, as comments: the user must choose one."""
    names = info.label_names
    goods = reversed(names) if len(names) == 2 else names[:1]
    ways = {choice for good in goods for choice in choices(names, good)}
    ordered = sorted(ways, key=lambda choice: ("separate" in choice, choice))
    lines = ["choose which of the labels is the reward: remove the # of one line (without one, the model is refused)"]
    lines += ["  # ".join(choice.removeprefix("reward.").removesuffix(")").split(" (")) for choice in ordered]
    return "".join(f"  # {line}\n" for line in lines)


def _report(role: str, info: CheckpointInfo) -> None:
    dtypes = ", ".join(f"{dtype} ({count:,} weights)" for dtype, count in info.dtypes.items())
    constants = info.constants
    lines = {
        "architecture": f"{info.architecture or 'unknown'} ({info.model_type})",
        "head": _head_line(info),
        "labels": ", ".join(info.labels) or "unnamed",
        "dtypes": f"{dtypes}; suggested: {suggested_dtype(info)}",
        "size": f"{info.num_parameters:,} parameters, {info.num_bytes / 1e6:,.1f} MB in {len(info.files)} file(s)",
        "vocabulary": f"{info.vocab_size or 'unknown'}, positions {info.max_positions or 'unlimited'}",
        "tokenizer": info.tokenizer or "none: only token ids can be scored, not `sentences`",
        "chat template": "yes"
        if has_chat_template(info.folder)
        else "none: chats cannot be scored until chat_template.jinja is saved there",
        "constants": "none" if constants is None else f"(score - {constants.mean:g}) / {constants.std:g}",
    }
    print(f"{role}: {info.folder}")
    for name, text in lines.items():
        print(f"  {name:<14}{text}")


def _head_line(info: CheckpointInfo) -> str:
    head = info.head
    if head is None:
        return "none"
    how = "the model's own pooling" if head.form.pooled else "on each token" if head.is_plain else "behind a gate"
    layers = f"{len(head.layers.names)} layers, " if len(head.layers.names) > 1 else ""
    return f"{HEADS[head.kind]} `{head.prefix}`: {head.num_labels} output(s), {layers}{how}"


def _try_reward(info: CheckpointInfo, section: RewardSection) -> None:
    """Score a row with the section's settings; if they leave the labels open, with a score for each of these."""
    from rlhf_triton.models.modeling import load_reward

    load = functools.partial(
        load_reward,
        pooling=section.pooling,
        attribute_weights="separate" if _needs_label_weights(info, section) else attribute_weights(section),
    )
    model, score = _try_out(info, load, lambda model, rows: model.score(rows))
    names = info.label_names if model.num_outputs > 1 else [""]
    scores = ", ".join(f"{name} {x:.4f}".lstrip() for name, x in zip(names, score, strict=True))
    print(f"  {'trial':<13} loads; the row of tokens 1 to {TRIAL_TOKENS} scores {scores}")
    if info.tokenizer is not None:
        tokenizer = load_tokenizer(info.folder)
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(TRIAL_TEXT)["input_ids"])  # special tokens included
        print(f"  {'sentences':<13} {TRIAL_TEXT!r} is tokenised as: {' '.join(tokens)}")


def _try_policy(folder: Path, try_out: bool) -> None:
    check_language_model(folder)
    info = inspect_checkpoint(folder)
    _report("policy", info)
    if try_out:
        from rlhf_triton.models.language_model import load_language_model

        _, logprobs = _try_out(info, load_language_model, lambda model, rows: model.launch(rows)())
        print(f"  {'trial':<13} loads; the log-prob of token 2 after token 1 is {logprobs[0]:.4f}")


def _try_critic(info: CheckpointInfo) -> None:
    from rlhf_triton.models.modeling import load_critic

    model, values = _try_out(info, load_critic, lambda model, rows: model.values(rows))
    print(f"  {'as a critic':<13} loads; {model.note}; the value after {TRIAL_TOKENS} tokens is {values[-1]:.4f}")


def _try_out(
    info: CheckpointInfo, load: Callable[..., Any], compute: Callable[[Any, list[np.ndarray]], Any]
) -> tuple[Any, Any]:
    """Load the model; return it and what `compute` returns for it and one row. Raises CheckpointError if not finite."""
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    model = load(info.folder, dtype=suggested_dtype(info))
    row = np.arange(1, TRIAL_TOKENS + 1, dtype=np.int64) % model.limits.vocab_size
    row = np.append(np.array(getattr(model, "header", ()), np.int64), row)
    (outputs,) = compute(model, [row])
    if not np.isfinite(outputs).all():
        raise CheckpointError(f"{info.folder} outputs {outputs.tolist()}: its weights are damaged; copy it again")
    return model, outputs


def _compare_tokenizers(reward: CheckpointInfo, critic: CheckpointInfo) -> None:
    if reward is critic or reward.tokenizer is None or critic.tokenizer is None:
        return
    if same_tokenizer(reward.folder, critic.folder):
        print("tokenizers: reward and critic have the same vocabulary")
    else:
        print(
            "tokenizers: reward and critic DIFFER. The critic must have the actor's tokenizer; the actor then sends "
            "text (`sentences`) instead of token ids to the reward model"
        )
