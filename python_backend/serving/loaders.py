"""How each served model is loaded: by which function, named so that other processes can be told, and its options."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.models.language_model import LanguageModel, load_language_model
from rlhf_triton.models.mapped_tensors import check_finite
from rlhf_triton.models.modeling import CriticModel, RewardModel, load_critic, load_reward
from rlhf_triton.models.token_reward import load_logit_reward, load_process_reward
from rlhf_triton.python_backend.serving.parameters import Parameters
from rlhf_triton.wire.contract import BANNED_TOKEN_IDS, CRITIC, PROCESS, REFERENCE, TEMPERATURE

Model = RewardModel | CriticModel | LanguageModel
LOADERS = {
    load.__name__: load
    for load in (load_reward, load_process_reward, load_logit_reward, load_critic, load_language_model)
}


def loader_of(parameters: Parameters) -> tuple[str, dict[str, Any]]:
    """Return the name of a served model's loader, a key of `LOADERS`, and the loader's options."""
    if parameters.model == CRITIC:
        return "load_critic", {}
    if parameters.model == REFERENCE:
        temperature = float(parameters.text(TEMPERATURE))
        banned = json.loads(parameters.text(BANNED_TOKEN_IDS))
        return "load_language_model", {"temperature": temperature, "banned_token_ids": banned}
    setting = parameters.text("standardization")
    scale = json.loads(setting) if setting.startswith("{") else None
    options: dict[str, Any] = {"standardization": setting if scale is None else (scale["mean"], scale["std"])}
    weights = json.loads(parameters.text("attribute_weights"))
    score = parameters.optional("score") or "auto"
    is_process = parameters.optional(PROCESS) is not None
    logit = parameters.optional("logit")
    if logit is not None:
        rule = json.loads(logit)
        probability = score == "probability" or (score == "auto" and is_process and bool(rule["against"]))
        return "load_logit_reward", {**options, **rule, "probability": probability}
    if is_process:
        return "load_process_reward", {**options, "attribute_weights": weights, "score": score}
    return "load_reward", {**options, "pooling": parameters.text("pooling"), "attribute_weights": weights}


def load_model(loader: str, folder: Path, served: Model | None, options: Mapping[str, Any]) -> Any:
    """Load a model.

    Args:
        loader: a name in `LOADERS`.
        served: the model served now, if `folder` is another version of its weights; None: load from scratch.
        options: keyword arguments of the loader.

    Raises:
        CheckpointError: the model cannot be loaded, or its weights are not finite.
    """
    if isinstance(served, CriticModel | RewardModel):
        model: Any = served.with_weights(folder)
    else:
        model = LOADERS[loader](folder, **options)
    check_finite(model.model)  # also pages in the mapped file before the first forward pass
    return model
