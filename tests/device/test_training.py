"""Updates of policy and critic, and the reference, on simulated GPUs: synchronisations, results, a GPU per rank."""

import numpy as np
import pytest
import torch
from critic_training import small_payload
from policy_sessions import CASES as POLICY_CASES
from policy_sessions import session
from policy_training import (
    random_batch,
    samples_of,
    trainable_policy,
    update_of,
    weights_of,
)
from ranks import on_ranks, whole_tensors
from run_checkpoints import make_tokenizer
from safetensors.torch import load_file
from settings import trainer_section
from simulated_cuda.threads import recorded_launches
from simulated_cuda.trace import Trace
from tiny_checkpoints import save_tiny
from torch import nn

from rlhf_triton.actor.generation.shared_prompts import shared_passes
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.models.canary import CANARY_TOKENS
from rlhf_triton.models.language_model import load_language_model
from rlhf_triton.models.modeling import load_critic
from rlhf_triton.models.output_head import head_logprobs
from rlhf_triton.trainer.critic_update import load_update
from rlhf_triton.training_engine.merged_slices import MergedSlices

LENGTHS = [9, 4, 12, 7, 5, 10]
PROMPT = 3
WAITS_OF_A_STEP = 2  # statistics, and the norm of the gradient
WAITS_OF_AN_UPDATE = 1  # a micro-batch whose prompts are shared: transformers looks at their mask; otherwise none
WAITS_OF_A_REFERENCE = 1  # a micro-batch: its log-probs; one more if its prompts are shared
POLICY_CASES["lora in bfloat16"] = {"lora_rank": 2, "precision": "bfloat16"}


def make_policy(checkpoint, device="cuda:2", **settings):
    section = {"lr": 1e-2, "minibatch_size": len(LENGTHS), "token_budget": 30, "algorithm_name": "grpo"}
    torch.manual_seed(0)
    return trainable_policy(**{**section, "model": checkpoint, "device": device, **settings})


def make_batch(*, shared=False):
    return random_batch(LENGTHS, prompt=PROMPT, seed=0, shared=shared)


def traced(work):
    work()  # what is copied once, such as the banned tokens
    with Trace() as trace:
        work()
    return trace


def num_shared(policy, batch):
    """Return the number of micro-batches whose prompts are shared."""
    found = 0
    for rows in policy.trained.plan(batch.lengths.tolist()):
        width = int(batch.lengths[rows].max())
        inside = batch.mask[rows, : width - 1] != 0
        found += policy.token_logprobs.shares_prompts and bool(
            shared_passes(batch.tokens[rows, :width], batch.lengths[rows], inside)
        )
    return found


# ---- how often the host waits ----


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "float32", "entropy_bonus": 0.01},
        {"lora_rank": 2},
        {"gradient_checkpointing": True, "kl_penalty_in": "loss", "entropy_bonus": 0.01},
    ],
)
def test_policy_update_synchronises_with_the_gpu_only_for_statistics_and_norm(checkpoint, settings):
    policy = make_policy(checkpoint, **settings)
    batch = make_batch()
    assert len(policy.trained.plan(batch.lengths.tolist())) == 3
    trace = traced(lambda: update_of(policy).run(batch, seed=0, kl_coef=0.1))
    assert trace.num_waits <= num_shared(policy, batch) * WAITS_OF_AN_UPDATE + WAITS_OF_A_STEP, trace.where
    assert {parameter.device for parameter in policy.model.parameters()} == {torch.device("cuda:2")}


def test_logprobs_synchronise_with_the_gpu_once_per_micro_batch(checkpoint):
    policy = make_policy(checkpoint, token_budget=1000)
    batch = make_batch(shared=True)
    trace = traced(lambda: policy.token_logprobs.compute(policy.model, batch.tokens, batch.lengths, batch.mask))
    assert all("transformers" in place or "body(" in place for _, place in trace.where), trace.where
    assert trace.num_waits == 1
    policy = make_policy(checkpoint, kl_reference="actor")
    batch = make_batch()
    trace = traced(lambda: policy.logprobs(samples_of(batch, prompt=PROMPT), reference=True))
    most = len(policy.trained.plan(batch.lengths.tolist())) * WAITS_OF_A_REFERENCE + num_shared(policy, batch)
    assert trace.num_waits <= most, trace.where
    served = load_language_model(checkpoint, device="cuda:1", dtype="bfloat16", banned_token_ids=[3, 4])
    trace = traced(lambda: served.launch([np.arange(5, 5 + n) for n in (4, 7, 1)])())
    assert trace.num_waits <= WAITS_OF_A_REFERENCE, trace.where


# ---- results are those of the CPU ----


@pytest.mark.parametrize("shared", [False, True])
def test_policy_update_on_a_gpu_matches_the_cpu(checkpoint, shared):
    found = []
    for device in ("cpu", "cuda:1"):
        policy = make_policy(checkpoint, device, precision="float32", entropy_bonus=0.01, token_budget=40)
        assert policy.token_logprobs.masks == (device == "cpu")
        stats = update_of(policy).run(make_batch(shared=shared), seed=0, kl_coef=0.1).metrics
        found.append((stats, weights_of(policy)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3, abs=1e-5)
    # Adam's first step has the size of the learning rate, 0.01, whatever the gradient: compare its sign, too.
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=2e-3)


def test_bfloat16_output_layer_matches_float32():
    """Log-probs and entropies to 2e-6 of the largest, gradients to 2e-5: a term more has 8 bits more."""
    torch.manual_seed(0)
    head = nn.Linear(512, 1000, bias=False)
    hidden = torch.randn(64, 512)
    targets = torch.randint(0, 1000, (64,))

    def results(device):
        there = nn.Linear(512, 1000, bias=False).to(device)
        on = hidden.clone().to(device).requires_grad_()
        there.weight = nn.Parameter(head.weight.data.clone().to(device))
        settings = {"temperature": 0.9, "banned_token_ids": [3], "with_entropy": True}
        with Trace() as trace:
            logprobs, entropies = head_logprobs(on, there, targets.to(device), **settings)
            (logprobs.sum() + 0.1 * entropies.sum()).backward()
        if device != "cpu":
            assert trace.ops["mm"] == 12  # forward, again in the backward pass, and two gradients, three products each
        gradients = [each.grad for each in (on, there.weight) if each.grad is not None]
        return [each.detach().cpu() for each in (logprobs, entropies, *gradients)]

    for ours, exact, bound in zip(results("cuda"), results("cpu"), (2e-6, 2e-6, 2e-5, 2e-5), strict=True):
        assert float((ours - exact).abs().max()) <= bound * float(exact.abs().max())


# ---- a policy on two ranks with a GPU each, and on ranks of the CPU on a machine that has GPUs ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    save_tiny(root / "untied", "llama", "language", vocab_size=200)
    make_tokenizer().save_pretrained(root / "untied")
    return root


def devices_of(policy):
    """Return the devices of all weights and of the optimizer's state."""
    models = [model for model in (policy.model, policy.generator, policy.reference) if model is not None]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    moments = [tensor for state in policy.trained.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return {str(tensor.device) for tensor in (*tensors, *moments)}


def session_on_gpus(ranks, folder, case, device):
    """Return what rank 0 of a session returns, where this rank's tensors are, and what its threads launched."""
    made = []
    init = Policy.__init__

    def kept(policy, *arguments):
        made.append(policy)
        init(policy, *arguments)

    Policy.__init__ = kept
    with recorded_launches() as record:
        found = session(ranks, folder, case, device=device) or {}
    found["devices"] = devices_of(made[0])
    found["strays"] = [(each.thread, each.current, each.gpu) for each in record.strays]
    found["gpus"] = {gpu for gpu in range(8) if torch.cuda.max_memory_allocated(gpu)}
    return found


@pytest.mark.parametrize(
    ("case", "device", "gpus"),
    [("ppo", "cuda:4", [4, 5]), ("lora in bfloat16", "cuda:4", [4, 5]), ("ppo", "cpu", [None, None])],
)
def test_policy_trains_on_each_ranks_own_gpu(folder, case, device, gpus):
    results = on_ranks(2, session_on_gpus, folder, case, device, device=device)
    for found, gpu in zip(results, gpus, strict=True):
        assert found["devices"] == {"cpu" if gpu is None else f"cuda:{gpu}"}
        assert found["gpus"] == ({gpu} - {None})
        assert found["strays"] == []
    ended = results[0]["weights at the end"], results[0]["weights at the end, resumed"]
    assert all(np.isfinite(one).all() and np.allclose(one, other, atol=1e-6) for one, other in zip(*ended, strict=True))


# ---- a critic on two ranks with a GPU each ----

CANARY = np.arange(CANARY_TOKENS)
CRITICS = {
    "bert": {},
    "gpt2": {"lora_rank": 2},
    "llama": {"lora_rank": 2, "gradient_checkpointing": True},
}


def load_critic_update(root, family, **ranks):
    settings = {"device": "cuda", "precision": "bfloat16", "token_budget": 20, "global_batch_size": 4, "lr": 1e-2}
    section = trainer_section(**settings, warmup_steps=0, **CRITICS[family])
    return load_update(root / family, section, seed=0, **ranks)


def trained_critics(ranks, root):
    """Train a critic of each family and write a version; return this rank's weights, canary and report."""
    ranks.announce = lambda *_, **__: None
    found = []
    for family in CRITICS:
        ranks.run_on_all_ranks(lambda folder=root / f"{family} version": folder.mkdir(exist_ok=True))
        update = load_critic_update(root, family, ranks=ranks)
        report = update.train(small_payload() if ranks.rank == 0 else None, lambda _: None)
        canary = update.critic.values([CANARY])[0].tolist()
        update.critic.write(root / f"{family} version")
        weights = {name: tensor.numpy() for name, tensor in whole_tensors(MergedSlices(update.critic.model))}
        found.append({"report": (report.loss_mean, report.grad_norm), "canary": canary, "weights": weights})
    return found


def test_version_published_by_two_gpus_serves_its_announced_canary_values(tmp_path):
    """They gather weights in bfloat16, but publish those that they train, and a server may hold them in float32."""
    for family in CRITICS:
        save_tiny(tmp_path / f"first {family}", family, "critic")
        (tmp_path / family).mkdir()
        load_critic(tmp_path / f"first {family}", device="cpu").write(tmp_path / family)
    for family, *results in zip(CRITICS, *on_ranks(2, trained_critics, tmp_path, device="cuda"), strict=True):
        stored = {
            name: tensor
            for file in (tmp_path / f"{family} version").glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        served = load_critic(tmp_path / f"{family} version", device="cpu")
        alone = load_critic_update(tmp_path, family)
        report = alone.train(small_payload(), lambda _: None)
        for found in results:
            assert found["weights"].keys() == stored.keys()
            assert all(np.array_equal(found["weights"][name], stored[name]) for name in stored)
            np.testing.assert_allclose(found["canary"], served.values([CANARY])[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found["report"], (report.loss_mean, report.grad_norm), rtol=2e-2)
            np.testing.assert_allclose(found["canary"], alone.critic.values([CANARY])[0], atol=2e-2)
