"""The tools on simulated cards: the check of a GPU, and the plan's bytes of each role."""

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from actor.algorithms.method import Method
from actor.data.rollout import PPOBatch, Prompt, Rollout
from actor.policy.policy import Policy
from actor.policy.update import PolicyUpdate
from actor.run.policies import follow_rank_0, make_policy
from benchmarks import gpu as parts
from benchmarks import memory
from python_backend.config import ActorSection, RunConfig, load_config
from python_backend.models.modeling import load_critic, save_critic
from python_backend.serving.ranks.controller import ServingRanks
from python_backend.serving.ranks.loaders import load_model
from python_backend.training.ranks import Ranks
from tests.device.test_critic_training import payload
from tests.support.ranks import on_ranks, serving_ranks
from tests.support.settings import nested
from tools.plan.roles import generation_sizes, policy_role, served_role, trainer_role
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import build_critic

# ---- the check of a GPU: nothing meets on two devices ----


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parts.Job]:
    """All parts share its checkpoints; `device_tests` starts pytest and runs no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "IN_FLIGHT", 16)
        yield parts.Job("cuda", small=True, scratch=str(tmp_path_factory.mktemp("scratch")), tests="--version")


@pytest.mark.parametrize(
    "part", ["environment", "device_tests", "served_score", "scoring", "swap", "ppo_step", "mixed_requests"]
)
def test_a_part_of_the_check_finds_no_number_outside_its_limits(job: parts.Job, part: str):
    """Without `tritonserver`: a real server sees that there is no GPU."""
    found = list(getattr(parts, part)(job))
    assert found
    assert [number for number in found if number.verdict == "miss"] == []


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_role_whose_memory_the_planner_predicts_works_on_the_card(job: parts.Job, role: str):
    config, before = job.config(), memory.reset_peak("cuda")
    memory.run_role(role, config)
    assert memory.peak_bytes("cuda") > before
    assert memory.planned_bytes(role, config) > 0


# ---- the plan's bytes against the peak of the card while the role works, within 10 % ----
#
# The simulated card counts the tensors that exist at the same time, and runs the kernels of the CPU: what a real kernel
# allocates for itself, the allocator's rounding and gaps, contexts and NCCL's buffers are not seen, and the plan's
# reserves for these are left out here. Attention is computed by PyTorch's plain implementation, which stores its
# probabilities, so the plan is made for this one, too; a real card has kernels that store less, which the plan assumes
# otherwise.

T = TypeVar("T")
NOTHING: dict[str, Any] = {}
NEAR = 0.1
CARD = 1
PROMPT, RESPONSE, ROWS, BUDGET = 24, 40, 8, 256
LONGEST = PROMPT + RESPONSE
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
TOKENS = [np.full(LONGEST, 5 + i, np.int64) for i in range(ROWS)]  # distinct: a shared prompt is computed once
LOADERS = {"reward": "load_reward", "critic": "load_critic", "reference": "load_language_model"}
FOLDERS = {"reward": "reward", "critic": "critic", "reference": "policy"}


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
    root: Path,
    precision: str = "bfloat16",
    *,
    trainer: Mapping[str, Any] = NOTHING,
    tensor_parallel: int = 1,
    **actor: Any,
) -> RunConfig:
    """Return the run; `actor`: its settings, named as in `tests.support.settings`."""
    device = f"cuda:{CARD}"
    scoring = {"token_budget": BUDGET, "workers": 1, "device": device, "dtype": precision}
    scoring |= {"tensor_parallel": tensor_parallel, "instances": 1}
    given = {
        "rollout_size": ROWS,
        "minibatch_size": ROWS,
        "prompts_max_tokens": PROMPT,
        "max_new_tokens": RESPONSE,
        "policy_model": root / "policy",
        "policy_token_budget": BUDGET,
        "policy_device": device,
        "policy_precision": precision,
        "generation_batch_size": ROWS,
        "kl_coef": 0.1,
        **actor,
    }
    training = {"token_budget": BUDGET, "global_batch_size": ROWS, "device": device, "precision": precision}
    sections = {
        "run": {"dir": root / "run", "share_cards": True},
        "reward": {"model": root / "reward", **scoring},
        "critic": {"model": root / "critic", **scoring},
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

    def of(self, work: Callable[..., Any], *arguments: Any, **others: Any) -> tuple[Any, int]:
        """Return the result of `work` and the largest growth during it."""
        torch.cuda.reset_peak_memory_stats(CARD)
        return work(*arguments, **others), torch.cuda.max_memory_allocated(CARD) - self._start


def planned(plan: Callable[..., T], *arguments: Any) -> T:
    with sdpa_kernel(SDPBackend.MATH):  # as on a simulated card
        return plan(*arguments)


def near(planned_bytes: int, peak: int) -> None:
    print(f"planned {planned_bytes / 2**20:.2f}, peak {peak / 2**20:.2f} MiB: {planned_bytes / peak:.3f}")
    assert planned_bytes == pytest.approx(peak, rel=NEAR)


def serve(role: str, load: Callable[..., Any], forward: Callable[..., Any]) -> None:
    """Do what a served model does; a critic stages its next version while it serves."""
    model = load(None)
    forward(model)
    if role == "critic":
        following = load(model)
        following.check_finite()
        for each in (model, following):
            forward(each)


@pytest.mark.parametrize(
    ("role", "precision"), [("reward", "float32"), ("critic", "bfloat16"), ("reference", "bfloat16")]
)
def test_a_served_model(checkpoints: Path, role: str, precision: str):
    config, peak = config_of(checkpoints, precision, kl_reference="triton"), Peak()
    section = config.served_sections[role]
    options = {"device": section.device, "dtype": section.dtype}

    def work() -> None:
        serve(role, lambda like: load_model(LOADERS[role], section.model, like, options), scored)

    near(planned(served_role, config, role).sizes.total, peak.of(work)[1])


def scored(model: Any) -> None:
    forward = next(getattr(model, name) for name in ("score", "values", "logprobs") if hasattr(model, name))
    forward(TOKENS[: BUDGET // LONGEST])


@pytest.fixture(scope="module")
def ranks() -> Iterator[ServingRanks]:
    """Two ranks with a card each; this process is rank 0."""
    with serving_ranks(f"cuda:{CARD}") as ranks:
        yield ranks


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_a_model_split_over_two_cards(checkpoints: Path, role: str, ranks: ServingRanks):
    config, peak = config_of(checkpoints, kl_reference="triton", tensor_parallel=2), Peak()
    options = {"dtype": "bfloat16"}

    def forward(model: Any) -> None:
        with ranks.forward(model, TOKENS[: BUDGET // LONGEST], LONGEST):
            scored(model)

    def work() -> None:
        serve(role, lambda like: ranks.load(LOADERS[role], checkpoints / FOLDERS[role], like, options), forward)

    near(planned(served_role, config, role).sizes.total, peak.of(work)[1])


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("float32", {}),
        ("bfloat16", {"gradient_checkpointing": True}),
        ("bfloat16", {"lora_rank": 8}),
    ],
)
def test_the_trained_critic(checkpoints: Path, precision: str, settings: dict[str, Any]):
    config, peak = config_of(checkpoints, precision, trainer=settings), Peak()

    def train() -> None:
        update = CriticUpdate(build_critic(config.critic.model, config.trainer, seed=0), config.trainer)
        for _ in range(2):
            update.train(payload(0, [LONGEST] * ROWS), lambda _: None)
            update.critic.with_weights(config.critic.model).values(TOKENS[:1])  # as when it is verified

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
        ("bfloat16", {"policy_gradient_checkpointing": True}),
        ("bfloat16", {"policy_lora_rank": 8}),
        ("bfloat16", {"one_step_off_policy": True}),
    ],
)
def test_the_policy(checkpoints: Path, precision: str, settings: dict[str, Any]):
    config, peak = config_of(checkpoints, precision, **settings), Peak()
    policy, update = make_policy(config, Method.of(config.actor.algorithm, config.actor.kl))
    near(planned(policy_role, config).sizes.total, policy_bytes(policy, update, peak, config))


def policy_bytes(policy: Policy, update: PolicyUpdate, peak: Peak, config: RunConfig) -> int:
    """Return the most bytes that a policy holds in its steps; a one-step-off one generates beside updates."""
    policy.generation._eos_ids = []  # so that each response has all its tokens
    most = 0
    for _ in range(2):  # the optimizer's moments are there from the second time on
        before = peak.now
        rollout, generating = peak.of(generate, policy)
        reference, comparing = peak.of(policy.logprobs, rollout, reference=True)
        beside = max(generating, peak.of(policy.logprobs, rollout)[1]) - before
        training = peak.of(update.run, batch_of(rollout, reference), seed=1, kl_coef=0.1)[1]
        both = training + beside if config.actor.one_step_off_policy else max(training, before + beside)
        most = max(most, comparing, both)
        policy.renew_sampler()
    return most


def rank_bytes(ranks: Ranks, file: Path) -> int:
    config = load_config(file)
    method, peak = Method.of(config.actor.algorithm, config.actor.kl), Peak()
    if ranks.rank:
        follow_rank_0(config, ranks)
        return 0
    policy, update = make_policy(config, method, ranks)
    most = policy_bytes(policy, update, peak, config)
    ranks.announce("end")
    return most


@pytest.mark.parametrize(
    ("num", "settings"),
    [(2, {"policy_lora_rank": 8}), (4, {"policy_gradient_checkpointing": True})],
)
def test_the_policy_on_several_cards(checkpoints: Path, num: int, settings: dict[str, Any]):
    config = config_of(checkpoints, ranks=num, **settings)
    most = on_ranks(num, rank_bytes, checkpoints / "run.yaml", device=f"cuda:{CARD}")[0]
    near(planned(policy_role, config).sizes.total, most)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [("float32", {}), ("bfloat16", {"policy_lora_rank": 8})],
)
def test_generation(checkpoints: Path, precision: str, settings: dict[str, Any]):
    """Many rows at a time, so that generation needs more memory than log-probs do, which the plan covers, too."""
    num = 4 * ROWS
    sizes = {"rollout_size": num, "minibatch_size": num, "generation_batch_size": num, "policy_token_budget": LONGEST}
    config, peak = config_of(checkpoints, precision, **sizes, **settings), Peak()
    policy, _ = make_policy(config, Method.of(config.actor.algorithm, config.actor.kl))
    policy.generation._eos_ids = []
    before = peak.now
    rollout, generating = peak.of(generate, policy, num)
    assert peak.of(policy.logprobs, rollout)[1] < generating
    near(planned(generation_sizes, config)[0].total, generating - before)


def generate(policy: Policy, num: int = ROWS) -> Rollout:
    return policy.generate([Prompt(str(i), "", np.full(PROMPT, 5 + i)) for i in range(num)], seed=1)
