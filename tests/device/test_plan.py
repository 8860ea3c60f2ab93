"""The plan's bytes of each role against the peak of the simulated card while the role works, within 10 %.

The simulated card counts the tensors that exist at the same time, and runs the kernels of the CPU: what a real kernel
allocates for itself, the allocator's rounding and gaps, contexts and NCCL's buffers are not seen, and the plan's
reserves for these are left out here. Attention is computed by PyTorch's plain implementation, which stores its
probabilities, so the plan is made for this one, too; a real card has kernels that store less, which the plan assumes
otherwise.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from actor.algorithms.methods import Method
from actor.data.rollout import PPOBatch, Prompt, Rollout
from actor.policy.policy import Policy
from actor.policy.update import PolicyUpdate
from python_backend.config import ActorSection, RunConfig, load_config
from python_backend.models.modeling import load_critic, save_critic
from python_backend.serving.ranks.loaders import load_model
from python_backend.wire.training_payload import TrainPayload
from tests.support.settings import nested
from tools.plan.serving import served_role
from tools.plan.training import generation_sizes, policy_role, trainer_role
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

T = TypeVar("T")
NEAR = 0.1
CARD = 1
PROMPT, RESPONSE, ROWS, BUDGET = 24, 40, 8, 256
LONGEST = PROMPT + RESPONSE
SHAPE = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
TOKENS = [np.full(LONGEST, 5 + i, np.int64) for i in range(ROWS)]  # distinct: a shared prompt is computed once
LOADERS = {"reward": "load_reward", "critic": "load_critic", "reference": "load_language_model"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, kind in {"policy": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}.items():
        torch.manual_seed(0)
        kind.from_config(LlamaConfig(**SHAPE, num_labels=1)).bfloat16().save_pretrained(root / name)
        make_tokenizer().save_pretrained(root / name)
    (root / "critic").mkdir()
    save_critic(load_critic(root / "reward"), root / "critic")  # as its versions are stored
    return root


def config_of(
    root: Path, precision: str = "bfloat16", *, trainer: dict[str, Any] = {}, served: dict[str, Any] = {}, **actor: Any
) -> RunConfig:
    """Return the run; `actor`: its settings, named as in `tests.support.settings`."""
    device = f"cuda:{CARD}"
    scoring = {"token_budget": BUDGET, "workers": 1, "device": device, "dtype": precision, **served}
    given = {
        "rollout_size": ROWS, "minibatch_size": ROWS, "prompts_max_tokens": PROMPT, "max_new_tokens": RESPONSE,
        "policy_checkpoint": root / "policy", "policy_token_budget": BUDGET, "policy_device": device,
        "policy_precision": precision, "generation_batch_size": ROWS, "kl_coef": 0.1, **actor,
    }  # fmt: skip
    training = {"token_budget": BUDGET, "global_batch_size": ROWS, "device": device, "precision": precision}
    sections = {
        "run": {"dir": root / "run", "share_cards": True},
        "reward": {"checkpoint": root / "reward", **scoring},
        "critic": {"checkpoint": root / "critic", **scoring},
        "reference": scoring if actor.get("kl_reference") == "triton" else {},
        "trainer": {**training, "reload_on_save": "none", **trainer},
        "actor": nested(ActorSection, given),
    }
    (root / "run.yaml").write_text(json.dumps(sections, default=str))
    return load_config(root / "run.yaml")


class Peak:
    """The growth of the card's memory since the object was made."""

    def __init__(self) -> None:
        gc.collect()  # models of other tests, whose layers refer to each other
        self._start = torch.cuda.memory_allocated(CARD)

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(CARD) - self._start

    def of(self, work: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of `work` and the largest growth during it."""
        torch.cuda.reset_peak_memory_stats(CARD)
        return work(), torch.cuda.max_memory_allocated(CARD) - self._start


def planned(plan: Callable[..., T], *arguments: Any) -> T:
    with sdpa_kernel(SDPBackend.MATH):  # as on a simulated card
        return plan(*arguments)


def near(planned_bytes: int, peak: int) -> None:
    print(f"planned {planned_bytes / 2**20:.2f}, peak {peak / 2**20:.2f} MiB: {planned_bytes / peak:.3f}")
    assert planned_bytes == pytest.approx(peak, rel=NEAR)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", LOADERS)
def test_a_served_model(checkpoints: Path, role: str, precision: str):
    config = config_of(checkpoints, precision, kl_reference="triton")
    section, rows, peak = config.served_sections[role], TOKENS[: BUDGET // LONGEST], Peak()

    def serve() -> None:
        load = lambda like: load_model(LOADERS[role], section.checkpoint, like, options)
        options = {"device": section.device, "dtype": section.dtype}
        model = load(None)
        forward = {"reward": "score", "critic": "values", "reference": "logprobs"}[role]
        getattr(model, forward)(rows)
        if role == "critic":  # the next version is staged while this one serves
            following = model.with_weights(section.checkpoint)
            following.check_finite()
            for each in (model, following):
                each.values(rows)

    near(planned(served_role, config, role).sizes.total, peak.of(serve)[1])


def payload() -> TrainPayload:
    lengths = np.array([row.size for row in TOKENS])
    targets = np.ones(int(lengths.sum()) - len(TOKENS), np.float32)
    return TrainPayload(np.concatenate(TOKENS), lengths, targets, targets, targets)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("bfloat16", {"gradient_checkpointing": True}),
        ("bfloat16", {"lora_rank": 8}),
        ("bfloat16", {"lora_rank": 8, "gradient_checkpointing": True}),
    ],
)
def test_the_trained_critic(checkpoints: Path, precision: str, settings: dict[str, Any]):
    config, peak = config_of(checkpoints, precision, trainer=settings), Peak()

    def train() -> None:
        update = CriticUpdate(build_critic(config.critic.checkpoint, config.trainer, seed=0), config.trainer)
        for _ in range(2):
            update.train(payload(), lambda _: None)
            update.critic.with_weights(config.critic.checkpoint).values(TOKENS[:1])  # as when it is verified

    near(planned(trainer_role, config).sizes.total, peak.of(train)[1])


def batch_of(rollout: Rollout, reference: torch.Tensor | None) -> PPOBatch:
    mask = torch.zeros(ROWS, LONGEST - 1)
    mask[:, PROMPT - 1 :] = 1.0
    zeros = torch.zeros_like(mask)
    return PPOBatch(rollout.tokens, rollout.lengths, mask, mask, zeros - 9, reference, mask, zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("float32", {}),
        ("float32", {"policy_lora_rank": 8}),
        ("bfloat16", {}),
        ("bfloat16", {"policy_gradient_checkpointing": True}),
        ("bfloat16", {"policy_lora_rank": 8}),
        ("bfloat16", {"policy_lora_rank": 8, "policy_gradient_checkpointing": True}),
        ("bfloat16", {"one_step_off_policy": True}),
        ("bfloat16", {"one_step_off_policy": True, "policy_lora_rank": 8}),
    ],
)
def test_the_policy(checkpoints: Path, precision: str, settings: dict[str, Any]):
    config, peak = config_of(checkpoints, precision, **settings), Peak()
    policy = make_policy(config)
    update = PolicyUpdate.of(config.actor, policy, Method.of(config.actor.algorithm, config.actor.kl))
    for _ in range(2):  # the optimizer's moments are there from the second time on
        before = peak.now
        rollout, generating = peak.of(lambda: generate(policy))
        logprobs = [peak.of(lambda: policy.logprobs(rollout, reference=which)) for which in (False, True)]
        batch = batch_of(rollout, logprobs[1][0])
        _, training = peak.of(lambda: update.run(batch, seed=1, kl_coef=0.1))
        policy.renew_sampler()
    beside = max(generating, logprobs[0][1]) - before
    both = training + beside if config.actor.one_step_off_policy else max(training, before + beside)
    near(planned(policy_role, config).sizes.total, both)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        ("bfloat16", {"policy_lora_rank": 8}),
        ("bfloat16", {"one_step_off_policy": True}),
    ],
)
def test_generation(checkpoints: Path, precision: str, settings: dict[str, Any]):
    """Many rows at a time, so that generation needs more memory than log-probs do, which the plan covers, too."""
    num = 4 * ROWS
    sizes = {"rollout_size": num, "minibatch_size": num, "generation_batch_size": num, "policy_token_budget": LONGEST}
    config, peak = config_of(checkpoints, precision, **sizes, **settings), Peak()
    policy = make_policy(config)
    before = peak.now
    rollout, generating = peak.of(lambda: generate(policy, num))
    assert peak.of(lambda: policy.logprobs(rollout))[1] < generating
    near(planned(generation_sizes, config.actor)[0].total, generating - before)


def make_policy(config: RunConfig) -> Policy:
    torch.manual_seed(0)
    policy = Policy.of(config.actor)
    policy.generation._eos_ids = []  # so that each response has all its tokens
    return policy


def generate(policy: Policy, num: int = ROWS) -> Rollout:
    return policy.generate([Prompt(str(i), "", np.full(PROMPT, 5 + i)) for i in range(num)], seed=1)
