"""Models whose rotary tables change with the length of a row."""

import pytest
import tiny_checkpoints
from tiny_checkpoints import save_tiny

TOLERANCE = 1e-5
LIMIT = tiny_checkpoints.POSITIONS // 2  # longest row that leaves the rotary table as it is
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MODELS = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}),
}
models = pytest.mark.parametrize("model", MODELS)


def save(folder, model, head, **more):
    """Save one of MODELS, or of another family with 32 positions."""
    family, settings = MODELS.get(model, (model, {"n_positions": 32} if model == "gptj" else {}))
    return save_tiny(folder, family, head, **settings, **more)
