"""The files that a run needs, looked for before anything slow starts: only what its configuration uses is demanded."""

from __future__ import annotations

from pathlib import Path

from python_backend.checkpoints import CheckpointError, check_checkpoint
from python_backend.config import ConfigError, RunConfig
from python_backend.function_rewards import FILE_SPEC

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
WAYS_OUT = {
    "reward": ", or give `rewards` functions alone",
    "critic": ", or take an actor.algorithm without a critic: grpo, rloo or reinforce++",
}


def check_files(config: RunConfig, *, server: bool = False, actor: bool = False) -> None:
    """Check the checkpoints, prompts and reward functions that the server, the actor, or both, read.

    Raises:
        ConfigError: a line for each that is missing: key, value, and what to do.
    """
    problems = _of_actor(config) if actor else {}
    if server:
        problems = {**_of_server(config), **problems}
    if problems:
        raise ConfigError("\n".join(f"{key}: {problem}" for key, problem in problems.items()))


def check_critic(config: RunConfig) -> None:
    """Check that the sidecar has a critic to train, and its checkpoint if there is no version. Raises ConfigError."""
    if not config.actor.uses_critic:
        raise ConfigError(
            f"actor.algorithm: {config.actor.algorithm} has no critic, so there is nothing to train; leave the sidecar "
            "out, or set it to ppo"
        )
    has_version = (config.run.weights_dir / "CURRENT").exists()
    problem = None if has_version else _of_checkpoint(config.critic.checkpoint, WAYS_OUT["critic"])
    if problem:
        raise ConfigError(f"critic.checkpoint: {problem}")


def tokenizer_folder(config: RunConfig) -> Path:
    """Whose tokenizer decodes the text for reward functions: beside a reward model its own, otherwise the policy's.

    Where the policy is another trainer's and unknown here: the critic's, which shares its vocabulary, or the one that
    `reward.checkpoint` names.
    """
    if config.uses_reward_model:
        return config.reward.checkpoint
    folders = [config.actor.checkpoint, config.critic.checkpoint, config.reward.checkpoint]
    return next((folder for folder in folders if _has_tokenizer(folder)), config.actor.checkpoint)


def _of_server(config: RunConfig) -> dict[str, str]:
    problems = {
        f"{role}.checkpoint": _of_checkpoint(section.checkpoint, WAYS_OUT.get(role, ""))
        for role, section in config.served_sections.items()
    }
    if not config.uses_reward_model and not _has_tokenizer(folder := tokenizer_folder(config)):
        problems["actor.checkpoint"] = (
            f"{folder} holds no tokenizer, with which reward functions read the policy's tokens; give the folder of "
            "the policy's checkpoint"
        )
    for name, term in config.functions.items():
        found = FILE_SPEC.fullmatch(str(term.function))
        if found and not Path(found["file"]).is_file():
            problems[f"rewards.{name}.function"] = (
                f"{found['file']} does not exist; give the path of a Python file{_start_of(Path(found['file']))}"
            )
    return {key: problem for key, problem in problems.items() if problem}


def _of_actor(config: RunConfig) -> dict[str, str]:
    actor = config.actor
    problems = {"actor.checkpoint": _of_checkpoint(actor.checkpoint), "actor.prompts": _of_prompts(actor.prompts)}
    if problems["actor.checkpoint"] is None and not _has_tokenizer(actor.checkpoint):
        problems["actor.checkpoint"] = (
            f"{actor.checkpoint} holds no tokenizer; save the policy's into it, with tokenizer.save_pretrained(folder)"
        )
    if actor.validation_prompts is not None and actor.validation_size:
        problems["actor.validation_prompts"] = _of_prompts(actor.validation_prompts)
    return {key: problem for key, problem in problems.items() if problem}


def _of_checkpoint(folder: Path, way_out: str = "") -> str | None:
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        return str(error) if folder.is_dir() else f"{error}{_start_of(folder)}{way_out}"
    return None


def _of_prompts(path: Path) -> str | None:
    if path.exists():
        return None
    return f'{path} does not exist; give a file of prompts, such as JSONL of {{"text": …}}{_start_of(path)}'


def _start_of(path: Path) -> str:
    return "" if path.is_absolute() else f" (relative paths start at {Path.cwd()})"


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)
