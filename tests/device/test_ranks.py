"""Policy and critic on two ranks with a card each, and ranks of the CPU on a machine that has cards."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from simulated_cuda.threads import recorded_launches
from tiny_checkpoints import save_tiny

from actor.algorithms.method import Method
from actor.policy.policy import Policy
from actor.run import policies
from python_backend.training.ranks import AnyRanks, OneRank, Ranks
from tests.support.ranks import on_ranks
from tests.training.test_policy_ranks import CASES, PROMPTS, batch_of, gradients, make, settings_of

PASSES = 2  # micro-batches of each rank for `batch_of`
CASES["lora in bfloat16"] = {"lora_rank": 2, "precision": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("policies")
    save_tiny(root / "untied", "llama", "language", vocab_size=200)
    make_tokenizer().save_pretrained(root / "untied")
    return root


def devices_of(policy: Policy) -> Counter[str]:
    """The devices of all weights and of the optimizer's state."""
    models = [model for model in (policy.model, policy.sampler, policy.reference) if model is not None]
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    moments = [tensor for state in policy.optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return Counter(str(tensor.device) for tensor in (*tensors, *moments))


def session(ranks: Ranks, folder: Path, case: str, device: str) -> dict[str, Any]:
    """What an actor does with its policy; returns where this rank's tensors are, and what its threads launched."""
    section = settings_of(folder, case, device=device)
    config: Any = SimpleNamespace(actor=section, run=SimpleNamespace(seed=0))
    made: list[Policy] = []
    make = policies.make_policy

    def kept(*arguments: Any) -> Any:
        made.append((pair := make(*arguments))[0])
        return pair

    policies.make_policy = kept
    found: dict[str, Any] = {}
    with recorded_launches() as record:
        if ranks.rank:
            policies.follow(config, ranks)
        else:
            policy, update = kept(config, Method.of(section.algorithm, section.kl), ranks)
            policy.renew_sampler()
            rollout = policy.generate(PROMPTS, seed=1)
            found["logprobs"] = policy.logprobs(rollout).numpy()
            found["reference"] = policy.logprobs(rollout, reference=True).numpy()
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


@pytest.mark.parametrize("case", ["ppo", "lora in bfloat16"])
def test_a_policy_trains_on_two_cards(folder: Path, case: str):
    results = on_ranks(2, session, folder, case, "cuda:4", device="cuda:4")
    for rank, found in enumerate(results):
        assert set(found["devices"]) == {f"cuda:{4 + rank}"}, f"rank {rank}"
        assert found["cards"] == {4 + rank}
        assert found["strays"] == []
    assert np.isfinite(results[0]["logprobs"]).all()
    for name in ("train_optim/loss", "train_optim/grad_norm"):
        assert results[0]["again"][name] == pytest.approx(results[0]["stats"][name], rel=1e-6)


def gradients_of(ranks: AnyRanks, folder: Path, precision: str) -> list[np.ndarray]:
    ranks.announce = lambda *_, **__: None  # type: ignore[method-assign]
    return gradients(*make(settings_of(folder, "lora", device="cuda", precision=precision), ranks))


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_gradients_of_two_cards_are_those_of_one(folder: Path, precision: str, tolerance: float):
    expected = gradients_of(OneRank(), folder, precision)
    for found in on_ranks(2, gradients_of, folder, precision, device="cuda"):
        squares = [(np.square(a - b).sum(), np.square(b).sum()) for a, b in zip(found, expected, strict=True)]
        assert np.sqrt(np.divide(*np.sum(squares, axis=0))) <= tolerance


def recorded_traffic() -> Counter[tuple[str, torch.dtype]]:
    """Count the elements that FSDP exchanges from now on in this process, by collective and dtype."""
    sent: Counter[tuple[str, torch.dtype]] = Counter()
    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch.distributed, name, functools.partial(counted, getattr(torch.distributed, name), name, sent))
    return sent


def counted(collective: Any, name: str, sent: Counter[tuple[str, torch.dtype]], *args: Any, **kwargs: Any) -> Any:
    whole = max((each for each in (*args, *kwargs.values()) if torch.is_tensor(each)), key=torch.Tensor.numel)
    sent[name, whole.dtype] += whole.numel()
    return collective(*args, **kwargs)


def test_ranks_of_the_cpu_use_no_card(folder: Path):
    for found in on_ranks(2, session, folder, "ppo", "cpu"):
        assert set(found["devices"]) == {"cpu"}
        assert found["cards"] == set()
