"""A reward model of three attributes, not merged, with everything around it: declared, served, refused by PPO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bare_client import ask
from live_system import (
    Checkpoints,
    LlamaForSequenceClassification,
    make_run,
    make_tokenizer,
    random_rows,
    run_actor,
    scoring_inputs,
    start_system,
)

from python_backend.wire.contract import CRITIC_INFER, REWARD_MODEL
from tools.render_configs import parse_config

LABELS = ("helpfulness", "correctness", "verbosity")


def three_labels(folder: Path, like: Path) -> LlamaForSequenceClassification:
    """The reward checkpoint `like` with a head of three labels."""
    model = LlamaForSequenceClassification.from_pretrained(str(like), num_labels=3, ignore_mismatched_sizes=True)
    model.config.id2label = dict(enumerate(LABELS))
    torch.nn.init.normal_(model.score.weight, 0.0, 0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model.eval()


@pytest.mark.slow
def test_attributes_that_are_not_merged(tmp_path: Path, checkpoints: Checkpoints) -> None:
    model = three_labels(tmp_path / "reward", checkpoints.reward)
    reward = {"checkpoint": str(tmp_path / "reward"), "merge_attributes": False, "standardization": "off"}
    run = make_run(tmp_path / "run", checkpoints, reward=reward)
    system = start_system(run)
    try:
        for name in (REWARD_MODEL, CRITIC_INFER):
            config = parse_config(name, (run.config.run.repository_dir / name / "config.pbtxt").read_text())
            assert [list(tensor.dims) for tensor in config.output if tensor.name == "rewards"] == [[3]]
        rows = random_rows([4, 19], seed=1)
        with torch.no_grad():
            expected = np.concatenate([model(torch.from_numpy(row)[None]).logits.numpy() for row in rows])
        for name in (REWARD_MODEL, CRITIC_INFER):
            np.testing.assert_allclose(ask(run.url, name, scoring_inputs(rows))["rewards"], expected, atol=1e-5)
        code, log = run_actor(run, "actor")
        assert code == 2
        assert log.splitlines()[-1].startswith("error: reward_model returns 3 rewards per row, but the actor needs one")
    finally:
        system.stop()
