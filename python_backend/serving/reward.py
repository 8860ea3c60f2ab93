"""Triton model `reward_model`: replies with `rewards`, the standardised scores.

`rewards` is FP32 [B, 1], or [B, A] if the A attributes are not merged; on request, `probabilities` is FP32 [B, A]. A
process reward also replies with the score of each step, and its `rewards` are their aggregates. If the weights come
from a store, `reward_version` INT64 [B, 1] names their version; one version scores a whole request.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from python_backend.models.modeling import RewardModel, Standardization
from python_backend.serving.requests import RowReader, read_limits
from python_backend.serving.rows.steps import StepReader, StepRules, step_reply
from python_backend.serving.rows.templates import RowTemplate
from python_backend.serving.scoring import Scoring
from python_backend.serving.torch_scoring import Launch
from python_backend.serving.triton import Call, Parameters, log
from python_backend.serving.versions.follower import Version
from python_backend.serving.versions.stored_model import StoredModel, version_column
from python_backend.wire.contract import PROBABILITIES, PROCESS, REWARD_VERSION, REWARDS, STORE, Limits, ScoringRows


class TritonPythonModel(StoredModel):
    """Scores rows with one fixed checkpoint, or with versions of it from a weights store."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self.set_up_torch(args)
        parameters = self.parameters
        folder = parameters.path("checkpoint")
        stored = parameters.optional(STORE) is not None
        model: RewardModel = self.follow(args, "reward") if stored else self.fix(self.load_version(folder, None))
        self.limits = read_limits(model.limits, parameters)
        self._is_process = parameters.optional(PROCESS) is not None
        self._reader = make_reader(folder, model, self.limits, parameters)
        self.start()
        log(f"{parameters.model}: {folder.name}, rewards are (score - {model.mean:g}) / {model.std:g}")

    def load_version(self, folder: Path, served: RewardModel | None) -> RewardModel:
        loader, options = read_loader(self.parameters)
        return self.load(loader, folder, served, **options)

    def read(self, call: Call) -> Generator[int, None, ScoringRows]:
        return self._reader.read(call)

    def forward_of(self, model: Version) -> Launch:
        return model.model.launch_token_scores if self._is_process else model.model.launch

    def reply(self, scoring: Scoring) -> Mapping[str, np.ndarray]:
        if self._is_process:
            return step_reply(scoring.rows, scoring.outputs, self.parameters.text("aggregate"))
        model: RewardModel = scoring.model.model
        rewards, scores = np.split(np.stack(scoring.outputs), [model.num_outputs], axis=1)
        answer = {REWARDS: rewards, REWARD_VERSION: version_column(scoring.model, len(rewards))}
        if PROBABILITIES in scoring.call.wanted:
            answer[PROBABILITIES] = model.probabilities(scores)
        return answer


def read_loader(parameters: Parameters) -> tuple[str, dict[str, Any]]:
    """Return the name of the model's loader and its options."""
    options: dict[str, Any] = {"standardization": read_standardization(parameters.text("standardization"))}
    weights, score = json.loads(parameters.text("attribute_weights")), parameters.optional("score") or "auto"
    is_process, logit = parameters.optional(PROCESS) is not None, parameters.optional("logit")
    if logit is not None:
        found = json.loads(logit)
        probability = score == "probability" or (score == "auto" and is_process and bool(found["against"]))
        return "load_logit_reward", {**options, **found, "probability": probability}
    if is_process:
        return "load_process_reward", {**options, "attribute_weights": weights, "score": score}
    pooling, merge = parameters.text("pooling"), parameters.text("merge_attributes") == "true"
    return "load_reward", {
        **options,
        "pooling": pooling,
        "attribute_weights": weights,
        "merge_attributes": merge,
        "finite": parameters.optional(STORE) is not None,
    }


def make_reader(folder: Path, model: RewardModel, limits: Limits, parameters: Parameters) -> RowReader:
    """Return the reader of the model's requests. Raises CheckpointError or ValueError if a setting does not fit."""
    adds, logit = parameters.text("add_special_tokens") == "true", parameters.optional("logit")
    process = parameters.optional(PROCESS)
    if process is not None:
        separator, mark = (parameters.optional(name) for name in ("step_separator", "step_mark"))
        rules = StepRules(process == "token", separator, mark, apart=logit is None)
        return StepReader(folder, limits, add_special_tokens=adds, rules=rules)
    template = parameters.optional("template")
    return RowReader(
        folder,
        limits,
        add_special_tokens=adds,
        skipped_pad_id=model.skipped_pad_id,
        append_eos=parameters.optional("append_eos") == "true",
        takes_pairs=parameters.optional("text") == "pair",
        has_token_types=model.has_token_types,
        template=None if template is None else RowTemplate(template),
        generation_prompt=parameters.optional("generation_prompt") == "true",
        truncates=template is None and logit is None,
    )


def read_standardization(setting: str) -> Standardization:
    """Parse the model parameter `standardization`: `checkpoint`, `off`, or JSON `{"mean": m, "std": s}`."""
    if setting in ("checkpoint", "off"):
        return cast(Standardization, setting)
    constants = json.loads(setting)
    return constants["mean"], constants["std"]
