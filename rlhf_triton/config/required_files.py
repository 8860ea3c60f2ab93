"""Checks that the files named in a configuration exist and are usable, before anything slow starts."""

import importlib
import importlib.util
import symtable
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import (
    CheckpointError,
    check_pickles,
    fingerprint_model,
    inspect_checkpoint,
    is_same_model,
    reward_head,
    tokenizer_kind,
)
from rlhf_triton.checkpoints.language_models import check_family, check_language_model
from rlhf_triton.checkpoints.tensor_parallel import check_tensor_parallel
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.labels import attribute_weights
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import ModelSection, RewardSection
from rlhf_triton.config.training_checks import missing_package
from rlhf_triton.errors import reason_of
from rlhf_triton.store.durable import read_json
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.user_code import FILE_SPEC

WAYS_OUT = {
    "reward": ", or use only functions in `rewards`",
    "critic": ", or choose an actor.algorithm.name without a critic: grpo, rloo or reinforce++",
}


def check_files(config: RunConfig, *, server: bool = False, actor: bool = False) -> None:
    """Check the models, prompts and reward functions that the server, the actor, or both will read.

    Raises:
        ConfigError: the message has one line per missing or unusable file, with key, value and remedy.
    """
    _raise((_server_problems(config, whole_run=actor) if server else {}) | (_actor_problems(config) if actor else {}))


def check_devices(config: RunConfig, *roles: str) -> None:
    """Check that torch can use the GPUs of these roles, such as `reward` or `actor.policy`; default: all roles.

    Raises:
        ConfigError: the message has one line per role with a missing GPU.
    """
    if problems := missing_gpus(config, *roles):
        raise ConfigError("\n".join(problems))


def missing_gpus(config: RunConfig, *roles: str) -> list[str]:
    """Return a message for each of these roles (default: all) whose GPUs torch cannot use. Imports torch if needed."""
    places = [
        place for place in config.places if place.gpus and (not roles or place.key.removesuffix(".device") in roles)
    ]
    if not places:
        return []
    torch = importlib.import_module("torch")
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = (
        f"torch, built for CUDA {torch.version.cuda}, can use {usable}; update the driver if nvidia-smi shows a lower "
        "version"
        if torch.version.cuda
        else "this torch is built for the CPU; install one that is built for CUDA"
    )
    needed = {place: int(place.gpus[-1].partition(":")[2]) + 1 for place in places}
    return [
        f"{place.key}: {place.gpus[-1]} needs {count} {'GPU' if count == 1 else 'GPUs'}; {available}"
        + (", or set it to cpu" if place.key.endswith(".device") else "")
        for place, count in needed.items()
        if count > usable
    ]


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in `folder` has a chat template."""
    files = ("chat_template.jinja", "additional_chat_templates")
    settings = read_json(folder / "tokenizer_config.json") or {}
    return any((folder / name).exists() for name in files) or bool(settings.get("chat_template"))


def check_critic(config: RunConfig) -> None:
    """Check that the sidecar has a critic to train, from a published version or a checkpoint. Raises ConfigError."""
    if not config.actor.algorithm.uses_critic:
        raise ConfigError(
            f"actor.algorithm.name: {config.actor.algorithm.name} has no critic, so there is nothing to train; do not "
            "start the sidecar, or set actor.algorithm.name to ppo"
        )
    if not config.serves_critic:
        raise ConfigError(
            "critic.model: the YAML has no section `critic`, so there is nothing to train; add the section"
        )
    problems = {"trainer.optimizer.kind": missing_package(config.trainer.optimizer)}
    if not (config.run.weights_dir / "CURRENT").exists():
        problems["critic.model"] = _checkpoint_problem(config.critic.model, WAYS_OUT["critic"])
    _raise(problems)


def tokenizer_folder(config: RunConfig) -> Path | None:
    """Return the folder of the tokenizer that decodes tokens for reward functions.

    If the reward model is served, this is its folder. Otherwise it is the first folder with a tokenizer among those of
    the policy, the critic (which has the same vocabulary) and `reward.model`. If there is none, it is the policy's
    folder or, if another trainer owns the policy, None: functions then receive only texts.
    """
    if config.uses_reward_model:
        return config.reward.model
    folders = [config.actor.policy.model, config.critic.model, config.reward.model]
    return next(filter(tokenizer_kind, folders), config.actor.policy.model if config.has_actor else None)


def _raise(problems: Mapping[str, str | None]) -> None:
    lines = [f"{key}: {problem}" for key, problem in problems.items() if problem]
    if lines:
        raise ConfigError("\n".join(lines))


def _server_problems(config: RunConfig, *, whole_run: bool) -> dict[str, str | None]:
    problems: dict[str, str | None] = {}
    for role, section in config.served_sections.items():
        is_language = role == "reference" or (role == "reward" and config.reward.logit is not None)
        problem = _checkpoint_problem(section.model, WAYS_OUT.get(role, ""), is_language=is_language)
        problem = problem or _problem_of(load_tokenizer, section.model)
        if problem is None:
            problems[f"{role}.max_length"] = _max_length_problem(section)
            if role == "reward":
                problem = _reward_problem(config.reward, whole_run=whole_run) or _problem_of(_check_store, config)
            if section.tensor_parallel > 1 and problem is None:
                problem = _problem_of(check_tensor_parallel, section.model, section.tensor_parallel)
        problems[f"{role}.model"] = problem
    folder = tokenizer_folder(config)
    if config.functions and not config.uses_reward_model and folder is not None and not tokenizer_kind(folder):
        problems["actor.policy.model"] = (
            f"{folder} has no tokenizer to decode the policy's tokens for reward functions; give the folder of the "
            "policy's model"
        )
    gate = config.reward.gate
    if gate is not None and not gate.is_file():
        problems["reward.gate"] = f"{gate} does not exist; give a JSONL file of pairs{_relative_hint(gate)}"
    specs = {f"rewards.{name}.function": str(term.function) for name, term in config.functions.items()}
    return problems | _function_problems(specs)


def _max_length_problem(section: ModelSection) -> str | None:
    most = inspect_checkpoint(section.model).max_positions
    if section.max_length is None or most is None or section.max_length <= most:
        return None
    return f"{section.max_length} exceeds the {most} positions of {section.model}; set {most} or less, or remove it"


def _check_store(config: RunConfig) -> None:
    """Raise CheckpointError if the store has versions of another model, so that `reward.model` would not be served."""
    store = WeightsStore(config.run.reward_weights_dir)
    current = store.current() if config.reward.store else None
    if current is None:
        return
    wanted = fingerprint_model(config.reward.model)
    versions = sorted({0, current})
    if not any(is_same_model(fingerprint_model(store.folder(version)), wanted) for version in versions):
        have = f"versions 0 and {current} have" if current else "version 0 has"
        raise CheckpointError(
            f"{config.reward.model} would not be served: reward.store serves from {store.root}, whose {have} other "
            "weights or another config.json; publish it with `rlhf-triton weights publish --model reward FOLDER`, "
            "restore reward.model, or start in another folder (run.dir)"
        )


def _actor_problems(config: RunConfig) -> dict[str, str | None]:
    actor = config.actor
    problems = {
        "actor.policy.model": _checkpoint_problem(actor.policy.model, is_language=True),
        **{key: _prompts_problem(path) for key, path in actor.prompts.paths.items()},
    }
    if problems["actor.policy.model"] is None and not tokenizer_kind(actor.policy.model):
        problems["actor.policy.model"] = (
            f"{actor.policy.model} has no tokenizer; save the policy's tokenizer into it with "
            "tokenizer.save_pretrained(folder)"
        )
    if actor.validation.prompts is not None and actor.validation.size:
        problems["actor.validation.prompts"] = _prompts_problem(actor.validation.prompts)
    if missing := [name for name in actor.trackers if importlib.util.find_spec(name) is None]:
        install = f"pip install {' '.join(missing)} 'numpy<2' 'protobuf<5'"
        verb = "are" if len(missing) > 1 else "is"
        problems["actor.trackers"] = f"{' and '.join(missing)} {verb} not installed; {install}, or remove it"
    own = {"report": config.report} if config.report else {}
    problems |= _function_problems(actor.algorithm.own_functions | own)
    return problems | {"actor.optimizer.kind": missing_package(actor.optimizer)}


def _checkpoint_problem(folder: Path, way_out: str = "", *, is_language: bool = False) -> str | None:
    problem = _problem_of(check_language_model if is_language else _check_model, folder)
    return problem if problem is None or folder.is_dir() else f"{problem}{_relative_hint(folder)}{way_out}"


def _check_model(folder: Path) -> None:
    check_family(inspect_checkpoint(folder))
    check_pickles(folder)


def _reward_problem(reward: RewardSection, *, whole_run: bool) -> str | None:
    folder = reward.model
    if reward.logit is None and (
        problem := _problem_of(lambda: reward_head(inspect_checkpoint(folder)))
        or _problem_of(attribute_weights, reward)
    ):
        return problem
    is_separate = reward.attribute_weights == "separate"
    if whole_run and is_separate and (count := len(inspect_checkpoint(folder).label_names)) > 1:
        return (
            f"{folder} would return {count} rewards per row, but the run needs one; set reward.attribute_weights to "
            "one weight per label"
        )
    if (reward.logit or reward.process) and not tokenizer_kind(folder):
        return (
            f"{folder} has no tokenizer, which reward.logit and reward.process need; save the model's tokenizer into "
            "it with tokenizer.save_pretrained(folder)"
        )
    if whole_run and not tokenizer_kind(folder):
        return (
            f"{folder} has no tokenizer, so it is unknown whether the reward model uses the policy's token ids; "
            "save the reward model's tokenizer into it with tokenizer.save_pretrained(folder)"
        )
    return None


def _problem_of(check: Callable[..., object], *arguments: Any) -> str | None:
    """Call `check`; return the message of the CheckpointError that it raises, or None."""
    try:
        check(*arguments)
    except CheckpointError as error:
        return str(error)
    return None


def _function_problems(specs: Mapping[str, str]) -> dict[str, str | None]:
    """Return the problem, or None, with each user's function that is in a file, by configuration key."""
    matches = {key: FILE_SPEC.fullmatch(spec) for key, spec in specs.items()}
    return {key: _function_problem(Path(file["file"]), file["name"]) for key, file in matches.items() if file}


def _function_problem(file: Path, name: str) -> str | None:
    """Return the problem with a user's function, or None. Parses the file but does not run it."""
    if not file.is_file():
        return f"{file} does not exist; give the path of a Python file{_relative_hint(file)}"
    try:
        code = file.read_text(encoding="utf-8")
        symbols = symtable.symtable(code, str(file), "exec").get_symbols()
    except (SyntaxError, ValueError) as error:
        return f"{file} is not valid Python: {reason_of(error)}"
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name in names or "import *" in code:  # a star import may define any name
        return None
    functions = sorted(symbol.get_name() for symbol in symbols if symbol.is_namespace())
    return f"{file} has no {name!r}; it defines {', '.join(functions) or 'no functions'}"


def _prompts_problem(path: Path) -> str | None:
    if path.exists():
        return None
    return f'{path} does not exist; give a file of prompts, such as JSONL of {{"text": …}}{_relative_hint(path)}'


def _relative_hint(path: Path) -> str:
    return "" if path.is_absolute() else f" (relative paths start at {Path.cwd()})"
