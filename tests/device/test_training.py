"""Updates of policy and critic, and the reference, on simulated cards: host waits, results, ranks with a card each."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from rlhf_triton.actor.data.rollout import PPOBatch
from safetensors.torch import load_file
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace
from tiny_checkpoints import VOCAB, save_tiny
from torch import Tensor, nn

from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.generation.cache import shared_passes
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run import policies
from rlhf_triton.config import RunConfig
from rlhf_triton.learning import sharding
from rlhf_triton.learning.ranks import AnyRanks, OneRank, Ranks
from rlhf_triton.learning.sharding import MergedSlices
from rlhf_triton.python_backend.models.canary import CANARY_TOKENS, check_canary
from rlhf_triton.python_backend.models.language_model import load_language_model
from rlhf_triton.python_backend.models.modeling import load_critic, save_critic
from rlhf_triton.python_backend.models.output_head import head_logprobs
from rlhf_triton.trainer.critic_update import CriticUpdate, load_update, split_rows
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import TrainPayload, train_payload
from tests.device.test_critic_training import payload, updates_of
from tests.learning.test_policy_ranks import CASES as POLICY_CASES
from tests.learning.test_policy_ranks import PROMPTS, batch_of, make
from tests.learning.test_policy_ranks import gradients as policy_gradients
from tests.learning.test_policy_ranks import settings_of as policy_settings
from tests.support.policy_training import TrainablePolicy, random_batch, rollout_of, trainable_policy, update_of
from tests.support.ranks import on_ranks, whole_tensors
from tests.support.settings import trainer_section

LENGTHS, PROMPT = [9, 4, 12, 7, 5, 10], 3
WAITS_OF_A_STEP = 2  # statistics, and the norm of the gradient
WAITS_OF_AN_UPDATE = 1  # a micro-batch whose prompts are shared: transformers looks at their mask; otherwise none
WAITS_OF_A_REFERENCE = 1  # a micro-batch: its log-probs; one more if its prompts are shared
WAITS_OF_A_CRITIC = 1  # a micro-batch: its loss, so that the heartbeat tells how far the card is
POLICY_CASES["lora in bfloat16"] = {"lora_rank": 2, "precision": "bfloat16"}


def make_policy(checkpoint: Path, device: str = "cuda:2", **settings: Any) -> TrainablePolicy:
    section = {"lr": 1e-2, "minibatch_size": len(LENGTHS), "token_budget": 30, "algorithm_name": "grpo"}
    torch.manual_seed(0)
    return trainable_policy(**{**section, "model": checkpoint, "device": device, **settings})


def make_batch(*, shared: bool = False) -> PPOBatch:
    return random_batch(LENGTHS, prompt=PROMPT, seed=0, shared=shared)


def traced(work: Callable[[], Any]) -> Trace:
    work()  # what is copied once, such as the banned tokens
    with Trace() as trace:
        work()
    return trace


def num_shared(policy: TrainablePolicy, batch: PPOBatch) -> int:
    """The number of micro-batches whose prompts are shared."""
    found = 0
    for rows in policy.plan(batch.lengths):
        width = int(batch.lengths[rows].max())
        inside = batch.mask[rows, : width - 1] != 0
        found += policy._shares_prompts and bool(shared_passes(batch.tokens[rows, :width], batch.lengths[rows], inside))
    return found


def weights_of(policy: Policy) -> Tensor:
    return torch.cat([p.detach().cpu().flatten() for p in policy.model.parameters() if p.requires_grad])


# ---- how often the host waits ----


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "float32", "entropy_bonus": 0.01},
        {"lora_rank": 2, "lora_dropout": 0.1},
        {"gradient_checkpointing": True, "kl_penalty_in": "loss", "entropy_bonus": 0.01},
    ],
)
def test_a_policy_update_waits_for_its_statistics_and_its_norm(checkpoint: Path, settings: dict[str, Any]):
    policy, batch = make_policy(checkpoint, **settings), make_batch()
    assert len(policy.plan(batch.lengths)) == 3
    trace = traced(lambda: update_of(policy).run(batch, seed=0, kl_coef=0.1))
    assert trace.num_waits <= num_shared(policy, batch) * WAITS_OF_AN_UPDATE + WAITS_OF_A_STEP, trace.where
    assert {parameter.device for parameter in policy.model.parameters()} == {torch.device("cuda:2")}


def test_log_probs_wait_once_a_micro_batch_and_for_the_inspection_of_shared_masks(checkpoint: Path):
    policy, batch = make_policy(checkpoint, token_budget=1000), make_batch(shared=True)
    trace = traced(lambda: policy.token_logprobs(policy.model, batch.tokens, batch.lengths, batch.mask))
    assert all("transformers" in place or "body(" in place for _, place in trace.where), trace.where
    assert trace.num_waits == 1
    policy, batch = make_policy(checkpoint, kl_reference="actor"), make_batch()
    trace = traced(lambda: policy.logprobs(rollout_of(batch, prompt=PROMPT), reference=True))
    most = len(policy.plan(batch.lengths)) * WAITS_OF_A_REFERENCE + num_shared(policy, batch)
    assert trace.num_waits <= most, trace.where
    served = load_language_model(checkpoint, device="cuda:1", dtype="bfloat16", banned_token_ids=[3, 4])
    trace = traced(lambda: served.logprobs([np.arange(5, 5 + n) for n in (4, 7, 1)]))
    assert trace.num_waits <= WAITS_OF_A_REFERENCE, trace.where


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"lora_rank": 2}),
        ("gpt2", {"lora_rank": 2, "precision": "float32"}),
        ("bert", {"attention": "eager"}),
        ("llama", {"gradient_checkpointing": True, "attention": "eager", "lora_rank": 2}),
    ],
)
def test_a_critic_update_waits_once_a_micro_batch(family: str, settings: dict[str, Any], tmp_path: Path):
    (update,) = updates_of(tmp_path, family, device="cuda:3", token_budget=20, **settings)
    done: list[int] = []
    with Trace() as trace:
        report = update.train(payload(), done.append)
    assert np.isfinite(report.loss_mean)
    assert trace.num_waits <= len(done) * WAITS_OF_A_CRITIC + 2, trace.where  # for the norm, and whether all is finite


# ---- results are those of the CPU ----


def test_log_probs_without_masks_are_those_with_masks(checkpoint: Path):
    batch, found = make_batch(), []
    for device in ("cpu", "cuda:1"):
        policy = make_policy(checkpoint, device, precision="float32")
        assert policy._masks == (device == "cpu")
        seen: list[Any] = []
        policy.causal(policy.model).base_model.register_forward_pre_hook(
            lambda _, __, kw, seen=seen: seen.append(kw.get("attention_mask")), with_kwargs=True
        )
        logprobs = policy.token_logprobs(policy.model, batch.tokens, batch.lengths, batch.mask)[0].detach().cpu()
        assert {mask is None for mask in seen} == {device != "cpu"}
        rows = [row[:length].numpy() for row, length in zip(batch.tokens, LENGTHS, strict=True)]
        served = load_language_model(checkpoint, device=device).logprobs(rows)
        found.append(torch.cat([logprobs.flatten(), *map(torch.from_numpy, served)]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_policy_update_on_a_card_is_that_on_the_cpu(checkpoint: Path, shared: bool):
    found = []
    for device in ("cpu", "cuda:1"):
        policy = make_policy(checkpoint, device, precision="float32", entropy_bonus=0.01, token_budget=40)
        stats = update_of(policy).run(make_batch(shared=shared), seed=0, kl_coef=0.1)
        found.append((stats, weights_of(policy)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3, abs=1e-5)
    # Adam's first step has the size of the learning rate, 0.01, whatever the gradient: compare its sign, too.
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("weight_is_rounded", [True, False])
def test_the_output_layer_multiplies_bfloat16_terms_to_a_millionth(weight_is_rounded: bool):
    """Log-probs and entropies to 2e-6 of the largest, gradients to 2e-5: a term more has 8 bits more."""
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(512, 1000, bias=False), torch.randn(64, 512), torch.randint(0, 1000, (64,))
    if weight_is_rounded:
        head.weight.data = head.weight.data.bfloat16().float()

    def results(device: str) -> list[Tensor]:
        there, on = nn.Linear(512, 1000, bias=False).to(device), hidden.clone().to(device).requires_grad_()
        there.weight = nn.Parameter(head.weight.data.clone().to(device))
        settings: dict[str, Any] = {"temperature": 0.9, "banned_token_ids": [3], "with_entropy": True}
        with Trace() as trace:
            logprobs, entropies = head_logprobs(on, there, targets.to(device), **settings)
            assert entropies is not None
            (logprobs.sum() + 0.1 * entropies.sum()).backward()
        if device != "cpu":
            assert trace.ops["mm"] == 12  # forward, again in the backward pass, and two gradients, three products each
        gradients = [each.grad for each in (on, there.weight) if each.grad is not None]
        return [each.detach().cpu() for each in (logprobs, entropies, *gradients)]

    for ours, exact, bound in zip(results("cuda"), results("cpu"), (2e-6, 2e-6, 2e-5, 2e-5), strict=True):
        assert float((ours - exact).abs().max()) <= bound * float(exact.abs().max())


def test_a_frozen_output_layer_in_bfloat16_takes_one_product_of_bfloat16_hidden_states():
    head = nn.Linear(16, 40, bias=False, dtype=torch.bfloat16, device="cuda")
    hidden, targets = torch.randn(3, 16, device="cuda").bfloat16(), torch.tensor([1, 2, 3], device="cuda")
    with torch.no_grad(), Trace() as trace:
        logprobs, _ = head_logprobs(hidden, head, targets, temperature=1.0)
    assert trace.ops["mm"] == 1
    exact = (hidden.cpu().float() @ head.weight.detach().cpu().float().T).log_softmax(-1)
    torch.testing.assert_close(logprobs.cpu(), exact[torch.arange(3), targets.cpu()], rtol=0, atol=2e-6)


# ---- a policy on two ranks with a card each, and on ranks of the CPU on a machine that has cards ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("policies")
    save_tiny(root / "untied", "llama", "language", vocab_size=200)
    make_tokenizer().save_pretrained(root / "untied")
    return root


def devices_of(policy: Policy) -> set[str]:
    """The devices of all weights and of the optimizer's state."""
    models = [model for model in (policy.model, policy.sampler, policy.reference) if model is not None]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    moments = [tensor for state in policy.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return {str(tensor.device) for tensor in (*tensors, *moments)}


def policy_session(ranks: Ranks, folder: Path, case: str, device: str) -> dict[str, Any]:
    """What an actor does with its policy; returns where this rank's tensors are, and what its threads launched."""
    section = policy_settings(folder, case, device=device)
    config = RunConfig(actor=section)
    made: list[Policy] = []
    make_policy = policies.make_policy

    def kept(*arguments: Any) -> Any:
        made.append((pair := make_policy(*arguments))[0])
        return pair

    policies.make_policy = kept
    found: dict[str, Any] = {}
    with recorded_launches() as record:
        if ranks.rank:
            policies.follow_rank_0(config, ranks)
        else:
            policy, update = kept(config, Method.of(section.algorithm, section.kl), ranks)
            policy.renew_sampler()
            rollout = policy.generate(PROMPTS, seed=1)
            found["logprobs"] = [policy.logprobs(rollout, reference=each).numpy() for each in (False, True)]
            update.run(batch_of(1), seed=1, kl_coef=0.1)
            policy.renew_sampler()
            (state := folder / f"{case}, {device}").mkdir()
            policy.write_state(state)
            found["stats"] = update.run(batch_of(2), seed=2, kl_coef=0.1)
            policy.read_state(state)
            found["again"] = update.run(batch_of(2), seed=2, kl_coef=0.1)
            policy.save(state / "policy")
            ranks.announce("end")
    torch.distributed.barrier()
    found["devices"] = devices_of(made[0])
    found["strays"] = [(each.thread, each.current, each.card) for each in record.strays]
    found["cards"] = {card for card in range(8) if torch.cuda.max_memory_allocated(card)}
    return found


@pytest.mark.parametrize(
    ("case", "device", "cards"),
    [("ppo", "cuda:4", [4, 5]), ("lora in bfloat16", "cuda:4", [4, 5]), ("ppo", "cpu", [None, None])],
)
def test_a_policy_trains_on_the_card_of_each_rank(folder: Path, case: str, device: str, cards: list[int | None]):
    results = on_ranks(2, policy_session, folder, case, device, device=device)
    for found, card in zip(results, cards, strict=True):
        assert found["devices"] == {"cpu" if card is None else f"cuda:{card}"}
        assert found["cards"] == ({card} - {None})
        assert found["strays"] == []
    assert np.isfinite(results[0]["logprobs"]).all()
    for name in ("train_optim/loss", "train_optim/grad_norm"):
        assert results[0]["again"][name] == pytest.approx(results[0]["stats"][name], rel=1e-6)


def gradients_of(ranks: AnyRanks, folder: Path, precision: str) -> dict[str, np.ndarray]:
    ranks.announce = lambda *_, **__: None  # type: ignore[method-assign]
    settings = policy_settings(folder, "lora", device="cuda", precision=precision)
    return dict(enumerate(policy_gradients(*make(settings, ranks))))  # type: ignore[arg-type]


def distance(one: Mapping[Any, np.ndarray], other: Mapping[Any, np.ndarray]) -> float:
    """The norm of the difference of all gradients, relative to that of `other`."""
    assert one.keys() == other.keys()
    squares = [(np.square(one[name] - other[name]).sum(), np.square(other[name]).sum()) for name in other]
    return float(np.sqrt(np.divide(*np.sum(squares, axis=0))))


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_gradients_of_two_cards_are_those_of_one(folder: Path, precision: str, tolerance: float):
    expected = gradients_of(OneRank(), folder, precision)
    for found in on_ranks(2, gradients_of, folder, precision, device="cuda"):
        assert distance(found, expected) <= tolerance


# ---- a critic on two ranks with a card each: its versions, and what they exchange ----

ROWS, PASSES = 8, 2  # of a batch; micro-batches of each rank
CANARY = np.arange(CANARY_TOKENS)
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 2},
    "lora, checkpointed": {"lora_rank": 2, "gradient_checkpointing": True},
}
RUNS = [*(("llama", case) for case in CASES), ("gpt2", "lora"), ("bert", "all weights")]
LIMITS = [sharding.MOST_UNREDUCED, 0]


def settings_of(case: str) -> Any:
    given = {"precision": "bfloat16", "token_budget": 20, "global_batch_size": ROWS, "warmup_steps": 0, "lr": 1e-2}
    return trainer_section(device="cuda", **given, **CASES[case])


def even_payload() -> TrainPayload:
    """Rows of 10 tokens, of which a micro-batch has two."""
    rng = np.random.default_rng(0)
    returns, prev_values = rng.normal(size=(2, ROWS, 9)).astype(np.float32)
    arrays = {"tokens": rng.integers(1, VOCAB, (ROWS, 10)), "sequence_lengths": np.full((ROWS, 1), 10)}
    arrays |= {"returns": returns, "prev_values": prev_values, "mask": np.ones_like(returns)}
    return train_payload(arrays, Limits(VOCAB))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("critics")
    for family in ("llama", "gpt2", "bert"):
        save_tiny(root / f"first {family}", family, "critic")
        (root / family).mkdir()
        save_critic(load_critic(root / f"first {family}", device="cpu"), root / family)
    return root


def gradients(update: CriticUpdate) -> dict[str, np.ndarray]:
    """The gradients of one batch, whole."""
    for rows in update._micro_batches(list(split_rows(even_payload()))):
        update._accumulate(rows, float(ROWS * 9))
    found = {name: p.grad for name, p in update.parameters.items() if p.grad is not None}
    whole = {name: tensor.clone().numpy() for name, tensor in whole_tensors(found)}
    update.optimizer.zero_grad()
    return whole


def recorded_traffic() -> Counter[tuple[str, torch.dtype]]:
    """Count the elements that FSDP exchanges from now on in this process, by collective and dtype."""
    sent: Counter[tuple[str, torch.dtype]] = Counter()

    def counted(collective: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        whole = max((each for each in (*args, *kwargs.values()) if torch.is_tensor(each)), key=torch.Tensor.numel)
        sent[name, whole.dtype] += whole.numel()
        return collective(*args, **kwargs)

    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch.distributed, name, functools.partial(counted, getattr(torch.distributed, name), name))
    return sent


def critic_session(ranks: Ranks, root: Path) -> dict[Any, Any]:
    """Each case, in one group of ranks."""
    ranks.announce = lambda *_, **__: None  # type: ignore[method-assign]
    for family, case in RUNS:
        ranks.together(lambda folder=root / f"{family}, {case}": folder.mkdir(exist_ok=True))
    versions = {run: version(ranks, root, *run) for run in RUNS}
    sent = recorded_traffic()
    return {**versions, **{(case, most): traffic(ranks, root, case, most, sent) for case in CASES for most in LIMITS}}


def version(ranks: Ranks, root: Path, family: str, case: str) -> dict[str, Any]:
    """Train on a payload and write a version; returns gradients and weights, whole, and the canary row's values."""
    update = load_update(root / family, settings_of(case), seed=0, ranks=ranks)
    found: dict[str, Any] = {"gradients": gradients(update)}
    report = update.train(even_payload() if ranks.rank == 0 else None, lambda _: None)
    found["report"] = (report.loss_mean, report.grad_norm)
    found["canary"] = update.critic.values([CANARY])[0].tolist()
    update.critic.write(root / f"{family}, {case}")
    found["weights"] = {name: tensor.numpy() for name, tensor in whole_tensors(MergedSlices(update.critic.model))}
    found["after"] = gradients(update)  # trains on after the canary row
    return found


def traffic(ranks: Ranks, root: Path, case: str, most: int, sent: Counter[Any]) -> tuple[dict[Any, int], int, int]:
    """The elements exchanged in one optimizer step; the weights of all layers, and all that are trained."""
    sharding.MOST_UNREDUCED = most
    update = load_update(root / "llama", settings_of(case), seed=0, ranks=ranks)
    layers = update.critic.model.base_model.layers
    gradients(update)  # the first pass creates what later ones keep
    update.critic.values([CANARY])
    sent.clear()
    report = update.train(even_payload() if ranks.rank == 0 else None, lambda _: None)
    assert report.optimizer_steps == 1
    sizes = [sum(p.numel() for p in each) for each in (layers.parameters(), update.parameters.values())]
    return dict(sent), sizes[0], sizes[1]


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[Any, Any]]:
    return on_ranks(2, critic_session, root, device="cuda", timeout_s=500)


@pytest.mark.parametrize(("family", "case"), RUNS)
def test_a_version_of_two_cards_gives_the_values_that_they_announced(ranks: Any, root: Path, family: str, case: str):
    """They gather weights in bfloat16, but publish those that they train, and a server may hold them in float32."""
    files = sorted((root / f"{family}, {case}").glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    served = load_critic(root / f"{family}, {case}", device="cpu")
    alone = load_update(root / family, settings_of(case), seed=0)
    expected = gradients(alone)
    report = alone.train(even_payload(), lambda _: None)
    for found in (results[family, case] for results in ranks):
        assert found["weights"].keys() == stored.keys()
        assert all(np.array_equal(found["weights"][name], stored[name]) for name in stored)
        check_canary(served, served.values([CANARY])[0], found["canary"])
        np.testing.assert_allclose(found["canary"], served.values([CANARY])[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["report"], (report.loss_mean, report.grad_norm), rtol=2e-2)
        np.testing.assert_allclose(found["canary"], alone.critic.values([CANARY])[0], atol=2e-2)
        assert distance(found["gradients"], expected) <= 2e-2
        assert distance(found["after"], gradients(alone)) <= 0.1  # AdamW amplifies rounding


@pytest.mark.parametrize("case", CASES)
def test_cards_gather_layers_in_bfloat16_and_add_up_gradients_once_a_step(ranks: Any, case: str):
    sent, in_layers, trained = ranks[0][case, LIMITS[0]]
    gathered, reduced = ("all_gather_single", torch.bfloat16), ("reduce_scatter_single", torch.float32)
    assert set(sent) == {gathered, ("all_gather_single", torch.float32), reduced}  # float32: embeddings, norm and head
    assert sent[gathered] == pytest.approx(2 * PASSES * in_layers, rel=0.05)  # forward and backward
    assert sent[reduced] == pytest.approx(trained, rel=0.05)  # once; slices are padded
    always, _, _ = ranks[0][case, LIMITS[1]]
    assert (always[gathered], always[reduced]) == (sent[gathered], PASSES * sent[reduced])
