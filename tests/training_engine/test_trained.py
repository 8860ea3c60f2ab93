"""A model in training: saved and restored state, its learning rate, and settings that change at a resume."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from settings import actor_section
from torch import nn

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.optimizer import OptimizerSection
from rlhf_triton.config.trained_model import TrainedSection
from rlhf_triton.training_engine.trained import TrainedModel

ROWS = torch.arange(15.0).reshape(5, 3)
LENGTHS = torch.tensor([4, 2, 5, 3, 1])


class StandIn(torch.optim.Optimizer):
    """Stores its state like bitsandbytes' AdamW8bit, which needs CUDA: 8-bit moments, and the step count as int."""

    def __init__(self, groups, *, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "state1": torch.zeros_like(parameter, dtype=torch.uint8)}
                state["step"] += 1
                state["state1"] += (parameter.grad * 10).abs().byte()
                change = state["state1"].float() / state["step"] + group["weight_decay"] * parameter
                parameter -= group["lr"] * change


@pytest.fixture(params=["adamw", "adamw_8bit"])
def kind(request, monkeypatch):
    optim = ModuleType("bitsandbytes.optim")
    optim.AdamW8bit = StandIn
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", optim)
    return request.param


def linear(seed=0, **settings):
    """Return a linear layer in training, with these settings of either section."""
    torch.manual_seed(seed)
    rates = {"lr": 0.1, "min_lr": 0.01, "warmup_steps": 2, "weight_decay": 0.1}
    optimizer = OptimizerSection(
        **{**rates, **{k: v for k, v in settings.items() if k in OptimizerSection.model_fields}}
    )
    section = TrainedSection(**{k: v for k, v in settings.items() if k in TrainedSection.model_fields})
    return TrainedModel(nn.Linear(3, 2), section, optimizer, section="trainer", remedy="none", total_steps=9)


def train(trained, steps):
    """Take optimizer steps on all rows; return the last statistics."""
    for _ in range(steps):
        statistics = trained.accumulate(LENGTHS, lambda rows, counts: loss_of(trained, rows))
        assert trained.step() is not None
    return statistics


def loss_of(trained, rows):
    return trained.model(ROWS[rows]).square().sum(), {"rows": torch.tensor(float(len(rows)))}


def test_restored_model_continues_bit_identically(tmp_path, kind):
    """The checkpoint may precede the first step, when the optimizer has no state; the schedule continues, too."""
    one = linear(kind=kind)
    other = linear(1, kind=kind)
    for steps in (0, 2):
        train(one, steps) if steps else None
        one.save(tmp_path / str(steps))
        train(other, 3)
        other.load(tmp_path / str(steps), steps)
        assert other.state().keys() == one.state().keys()
        assert other.last_lr == one.last_lr
    for each in (one, other):
        train(each, 2)
    assert all(torch.equal(other.weights()[name], tensor) for name, tensor in one.weights().items())
    assert isinstance(one.optimizer, StandIn) == (kind == "adamw_8bit")
    decays = [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in one.optimizer.param_groups]
    assert decays == [(0.1, [2]), (0.0, [1])]  # matrices only


def test_accumulate_gives_the_same_gradients_for_any_token_budget():
    found = []
    for token_budget in (1, 6, 100):
        trained = linear(token_budget=token_budget)
        statistics = trained.accumulate(LENGTHS, lambda rows, counts, trained=trained: loss_of(trained, rows))
        found.append((statistics, [p.grad for p in trained.parameters.values()]))
    for statistics, gradients in found:
        assert statistics == pytest.approx({"rows": 5.0, "loss": found[0][0]["loss"]})
        torch.testing.assert_close(gradients, found[0][1])


@pytest.mark.parametrize(
    ("setting", "value", "changed"),
    [
        ("lr", 0.2, "trainer.optimizer.lr: was 0.1, now 0.2"),
        ("token_budget", 7, "trainer.token_budget: was 4096, now 7 (rounding only)"),
        ("freeze", ["x"], None),
        ("lora_rank", 2, None),
        ("lora_alpha", 8, None),
        ("lora_targets", ("q_proj",), None),
    ],
)
def test_resume_lists_changed_settings_and_refuses_fixed_ones(setting, value, changed):
    saved = linear().settings
    trained = linear(**{setting: value})
    linear().check_fixed(saved, Path("5"))
    assert linear().changes(saved) == []
    if changed is None:
        with pytest.raises(CheckpointError, match=rf"^5 was saved with trainer\.{setting}: .*; restore it"):
            trained.check_fixed(saved, Path("5"))
    else:
        trained.check_fixed(saved, Path("5"))
        assert trained.changes(saved) == [changed]


def rate_of(actor, step):
    return actor.optimizer.learning_rate(step, total_steps=actor.optimizer_steps)


def test_policy_learning_rate_is_constant_by_default():
    actor = actor_section(lr=9e-7, steps=3)
    assert {rate_of(actor, step) for step in range(100)} == {9e-7}  # to the last bit


def test_policy_cosine_schedule_ends_with_the_run():
    """Two passes over 3 minibatches (the last one smaller) in each of 10 steps; the first 2 train the critic alone."""
    schedule = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 4}
    sizes = {"steps": 10, "critic_warmup_steps": 2, "rollout_size": 20, "minibatch_size": 8, "update_epochs": 2}
    actor = actor_section(**sizes, **schedule)
    assert [rate_of(actor, step) for step in (0, 3, 4, 26, 48, 99)] == pytest.approx([0.25, 1, 1, 0.5, 0, 0])
