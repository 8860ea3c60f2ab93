"""Loads a served model by its loader's name, so that other processes can be told to load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.models.language_model import LanguageModel, load_language_model
from rlhf_triton.models.mapped_tensors import check_finite
from rlhf_triton.models.modeling import CriticModel, RewardModel, load_critic, load_reward
from rlhf_triton.models.token_reward import load_logit_reward, load_process_reward

Model = RewardModel | CriticModel | LanguageModel
LOADERS = {
    load.__name__: load
    for load in (load_reward, load_process_reward, load_logit_reward, load_critic, load_language_model)
}


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
