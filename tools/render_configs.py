"""Renders the model repository: every config.pbtxt from templates and the one YAML, parsed by Triton's protobuf.
Given: a configuration. Returns: a folder that plain `tritonserver --model-repository` reads; `--check` tells drift.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.checkpoints import CheckpointError, inspect_checkpoint
from python_backend.config import ConfigError, ModelSection, RewardSection, RunConfig, load_config
from python_backend.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    REFERENCE,
    REWARD_CHECKPOINT,
    REWARD_FUNCTION_PREFIX,
    REWARD_MIXTURE,
    REWARD_MODEL,
)
from python_backend.sections import UNMEASURED
from tools.config_rules import check_rules
from tools.render_reference import reference_parameters
from tools.render_rewards import GENERATED, Render, render_rewards, stale_parts

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CONFIG = ROOT / "configs" / "default.yaml"
DEFAULT_REPOSITORY = ROOT / "model_repository"
MODULES = {
    REWARD_MODEL: "python_backend.reward",
    REWARD_CHECKPOINT: "python_backend.reward",
    REWARD_MIXTURE: "python_backend.reward_mixture",
    REFERENCE: "python_backend.reference",
    CRITIC: "python_backend.critic",
    CRITIC_TRAIN: "python_backend.critic_train",
    CRITIC_SAVE: "python_backend.critic_save",
}
FUNCTION_MODULE = "python_backend.function_reward"


@dataclass(frozen=True)
class Drift:
    """A file of the repository that differs from its rendering."""

    path: Path
    diff: str


def render_configs(config: RunConfig, *, resolve_paths: bool = True) -> dict[str, str]:
    """`{model: config.pbtxt}`, each valid for Triton's protobuf and for the rules it cannot know.

    Args:
        resolve_paths: write absolute paths (a run's own repository) instead of those in the YAML (the committed one).

    Raises:
        ConfigError: a rendering breaks a rule; the message names model, field and value.
    """
    place = Path.absolute if resolve_paths else Path
    weights = str(place(config.run.weights_dir))
    journal = {
        "journal": str(place(config.run.journal_dir)),
        "store": weights,
        "run_id": config.run.identity,
        "heartbeat_timeout_s": f"{config.trainer.heartbeat_timeout_s:g}",
        "training_key_sha256": _training_key_hash(config.server.training_key_env),
    }
    critic_parameters = {
        **_scoring_parameters(config.critic, place),
        "store": weights,
        "reload": config.critic.reload,
        "poll_interval_ms": str(config.critic.poll_interval_ms),
    }
    batch = min(config.reward.max_batch_size, config.critic.max_batch_size)
    render = functools.partial(_render, tokens_dtype=config.server.tokens_dtype)
    texts = {
        **_rewards(config, place, render),
        **_reference(config, place, render),
        CRITIC: _render_scoring(CRITIC, config.critic, render, critic_parameters),
        CRITIC_INFER: render(
            "ensemble.pbtxt.j2",
            max_batch_size=batch,
            num_components=len(config.rewards or {}),
            num_rewards=_num_rewards(config),
        ),
        CRITIC_TRAIN: render("journal.pbtxt.j2", name=CRITIC_TRAIN, parameters=journal),
        CRITIC_SAVE: render("journal.pbtxt.j2", name=CRITIC_SAVE, parameters=journal),
    }
    check_rules({model: parse_config(model, text) for model, text in texts.items()})
    return texts


def render_repository(config: RunConfig, out: Path, *, resolve_paths: bool = True) -> list[Path]:
    """Write the repository into `out`; files that are up to date keep their time. Returns the files written.

    Rendered models that the YAML no longer has are removed: the server loads whatever is there.
    """
    written = []
    for path, text in _files(config, out, resolve_paths).items():
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            written.append(path)
    for folder in _stale(config, out):
        shutil.rmtree(folder)
    return written


def check_repository(config: RunConfig, out: Path, *, resolve_paths: bool = True) -> list[Drift]:
    """Where `out` differs from what would be rendered."""
    drifts = []
    for path, text in _files(config, out, resolve_paths).items():
        found = path.read_text() if path.is_file() else ""
        if found != text:
            lines = difflib.unified_diff(found.splitlines(), text.splitlines(), "on disk", "rendered", lineterm="", n=1)
            drifts.append(Drift(path, "\n".join(lines)))
    return drifts + [Drift(folder, "-a model that the YAML no longer has") for folder in _stale(config, out)]


def parse_config(model: str, text: str) -> Any:
    """The ModelConfig message of a config.pbtxt. Raises ConfigError if Triton could not read it."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{model}/config.pbtxt is not what Triton reads: {error}") from error


def _files(config: RunConfig, out: Path, resolve_paths: bool) -> dict[Path, str]:
    files = {}
    for model, text in render_configs(config, resolve_paths=resolve_paths).items():
        files[out / model / "config.pbtxt"] = text
        module = FUNCTION_MODULE if model.startswith(REWARD_FUNCTION_PREFIX) else MODULES.get(model)
        if 'platform: "ensemble"' in text:  # it has no code, but Triton wants its version folder
            files[out / model / "1" / ".gitkeep"] = ""
        else:
            files[out / model / "1" / "model.py"] = f"from {module} import TritonPythonModel  # noqa: F401\n"
    return files


def _rewards(config: RunConfig, place: Any, render: Render) -> dict[str, str]:
    """reward_model, and what it consists of where the YAML has `rewards`."""

    def checkpoint(name: str) -> str:
        section = config.reward
        parameters = {
            **_scoring_parameters(section, place),
            "standardization": _standardization(section),
            "pooling": section.pooling,
            "attribute_weights": json.dumps(section.attribute_weights),
            "merge_attributes": json.dumps(section.merge_attributes),
            "add_special_tokens": json.dumps(section.add_special_tokens),
            "num_rewards": str(_num_rewards(config)),
        }
        return _render_scoring(name, section, render, parameters, num_rewards=_num_rewards(config))

    if config.rewards is None:
        return {REWARD_MODEL: checkpoint(REWARD_MODEL)}
    return render_rewards(config, place, render=render, checkpoint=checkpoint, fingerprint=_tokenizer_fingerprint)


def _reference(config: RunConfig, place: Any, render: Render) -> dict[str, str]:
    """The reference model, where the actor asks for it: otherwise no server loads what nobody uses."""
    if config.actor.reference == "actor":
        return {}
    parameters = {**_scoring_parameters(config.reference, place), **reference_parameters(config)}
    return {REFERENCE: _render_scoring(REFERENCE, config.reference, render, parameters)}


def _stale(config: RunConfig, out: Path) -> list[Path]:
    """Folders in `out` of models that were rendered once and are no longer in the YAML."""
    file = out / REFERENCE / "config.pbtxt"
    is_left = config.actor.reference == "actor" and file.is_file() and file.read_text().startswith(GENERATED)
    return [*stale_parts(config, out), *([file.parent] if is_left else [])]


def _num_rewards(config: RunConfig) -> int:
    """Rewards of a row: one, or the checkpoint's number of labels where they are not merged."""
    section = config.reward
    if section.merge_attributes or not (section.checkpoint / "config.json").is_file():
        return 1
    try:
        head = inspect_checkpoint(section.checkpoint).head
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    num_labels = 1 if head is None else head.num_labels
    if num_labels > 1 and config.rewards is not None:
        raise ConfigError(f"reward.merge_attributes: false gives {num_labels} rewards a row, and `rewards` adds up one")
    return num_labels


def _render_scoring(
    name: str, model: ModelSection, render: Render, parameters: Mapping[str, str], *, num_rewards: int = 1
) -> str:
    kind, _, index = model.device.partition(":")
    preferred = model.preferred_batch_size
    return render(
        "scoring.pbtxt.j2",
        name=name,
        model=model,
        preferred=[preferred] if isinstance(preferred, int) else preferred,
        num_rewards=num_rewards,
        instances=model.instances,
        kind="KIND_CPU" if kind == "cpu" else "KIND_GPU",
        gpus=[index] if index else [],
        parameters=parameters,
    )


def _scoring_parameters(model: ModelSection, place: Any) -> dict[str, str]:
    return {
        "checkpoint": str(place(model.checkpoint)),
        "device": model.device,
        "dtype": model.dtype,
        **{name: str(model.settled(name)) for name in UNMEASURED},
        "micro_batch_rows": str(model.micro_batch_rows),
        "strip_sequence_length_to_multiple": str(model.strip_sequence_length_to_multiple),
        "queue_timeout_s": f"{model.queue_timeout_s:g}",
        "max_length": str(model.max_length or ""),
        "max_sentence_bytes": str(model.max_sentence_bytes),
        "compile": json.dumps(model.compile),
        "tokenizer_fingerprint": _tokenizer_fingerprint(model.checkpoint),
    }


def _tokenizer_fingerprint(folder: Path) -> str:
    known = ("config.json", "tokenizer.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in known):  # the committed rendering knows no checkpoint
        return ""
    from python_backend.tokenization import fingerprint, load_tokenizer

    try:
        return fingerprint(load_tokenizer(folder.absolute()))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _standardization(reward: RewardSection) -> str:
    setting = reward.standardization
    return setting if isinstance(setting, str) else json.dumps(setting.model_dump())


def _training_key_hash(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"server.training_key_env names {variable}, but that environment variable is not set")
    return hashlib.sha256(key.encode()).hexdigest()


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tools"), undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["quoted"] = lambda text: json.dumps(str(text), ensure_ascii=False)
    return environment.get_template(template).render(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """`python tools/render_configs.py [--config YAML] [--out DIR] [--check] [section.key=value …]`."""
    parser = argparse.ArgumentParser(prog="render_configs", description="Render the model repository.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="default: configs/default.yaml")
    parser.add_argument("--out", type=Path, help="default: model_repository, or the run's own with --config")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    committed = args.config.resolve() == DEFAULT_CONFIG
    try:
        config = load_config(args.config, args.overrides)
        out = args.out or (DEFAULT_REPOSITORY if committed else config.run.repository_dir)
        if args.check:
            drifts = check_repository(config, out, resolve_paths=not committed)
            for drift in drifts:
                print(f"{drift.path} is not up to date:\n{drift.diff}", file=sys.stderr)
            print(f"{out}: {'render it again' if drifts else 'up to date'}")
            return 1 if drifts else 0
        written = render_repository(config, out, resolve_paths=not committed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {len(written)} files written, the others were up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
