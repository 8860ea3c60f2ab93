"""Architectures against plain transformers: each row's outputs are those of the row alone, or the model is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import KINDS, POSITIONS, VOCAB, save_architecture

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.batching import plan_micro_batches
from python_backend.models.modeling import quiet_transformers
from python_backend.training.ranks import Ranks
from python_backend.wire.training_payload import TrainPayload
from tests.support.loaders import load_critic, load_process_reward, load_reward, skip_on_cards
from tests.support.settings import trainer_section
from trainer.critic_update import CriticUpdate
from trainer.trained_critic import TrainedCritic

TOLERANCE = 1e-5
SERVED = """
    albert apertus arcee axk1 axk2 bert big_bird biogpt bloom camembert convbert data2vec-text deberta deberta-v2
    deepseek_v2 deepseek_v3 diffllama distilbert doge electra ernie esm esmc eurobert exaone4 falcon flaubert fnet
    gemma gemma2 gemma3_text glm glm4 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj gte helium
    hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe jina_embeddings_v3 layoutlm lilt llama longformer luke megatron-bert
    minicpm3 minimax ministral ministral3 mistral mistral4 mixtral mobilebert modernbert mpnet mpt nemotron nomic_bert
    nystromformer olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text
    qwen3_moe qwen3_next rembert roberta roberta-prelayernorm roformer seed_oss smollm3 squeezebert stablelm
    starcoder2 tapas ultrabert xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso
"""
ONE_BY_ONE = {"convbert", "fnet", "mobilebert", "nystromformer", "yoso", "xlnet"}  # XLNet as a reward only
REFUSED = {  # in these words; a critic of the last two has a head without them, or there is no class for it
    "bros": "BrosForTokenClassification cannot score rows of tokens: You have to specify bbox",
    "canine": "cannot score rows of tokens: `get_input_embeddings`",
    "funnel": "FunnelForTokenClassification cannot score rows of tokens",
    "ibert": "cannot score rows of tokens: 'QuantEmbedding'",
    "layoutlmv3": "cannot score rows of tokens",
    "reformer": "ReformerForSequenceClassification draws random numbers in each forward pass",
    "ctrl": "a causal body under the head classifier of CTRLForSequenceClassification is not supported",
    "modernbert-decoder": "a causal body under the head classifier of ModernBertDecoder",
}
QUICK = {"bert", "big_bird", "convbert", "deberta-v2", "fnet", "llama", "mixtral", "xlnet"}
quiet_transformers()


def names(known: Sequence[str]) -> Any:
    marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in known]
    return pytest.mark.parametrize("name", marked)


def rows_of(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, length) for length in lengths]


NO_DEPTHWISE = "the simulated cards have no depthwise convolution"
ROWS = rows_of(5, 11, 30, 3, 18, 8, 1)


def assert_alone_and_together(
    score: Callable[[list[np.ndarray]], Sequence[np.ndarray]], rows: list[np.ndarray], expected: list[np.ndarray]
) -> None:
    """Compare each row alone, as planned, and in every position of a batch, with `expected`."""
    everywhere = [[*range(k, len(rows)), *range(k)] for k in range(len(rows))]
    planned = plan_micro_batches([row.size for row in rows], token_budget=40, max_rows=8)
    for batch in [*everywhere, *planned, *([i] for i in range(len(rows)))]:
        for i, found in zip(batch, score([rows[i] for i in batch]), strict=True):
            np.testing.assert_allclose(found, expected[i], atol=TOLERANCE)


@torch.no_grad()
def directly(model: Any, row: np.ndarray) -> np.ndarray:
    """Hugging Face's own logits of one row: `[1]`, or `[length]` of its tokens."""
    ids = torch.from_numpy(row)[None]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, ..., 0].reshape(-1).numpy()


@names(SERVED.split())
def test_a_row_scores_as_in_plain_transformers_whatever_shares_its_forward_pass(tmp_path: Path, name: str):
    if name == "convbert":
        skip_on_cards(NO_DEPTHWISE)
    for kind in KINDS:
        if (model := save_architecture(tmp_path / kind, name, kind)) is None:
            continue
        if kind == "reward" and name in ("flaubert", "xlm"):  # their head is no last layer of its own
            continue
        served: Any = (load_reward if kind == "reward" else load_critic)(tmp_path / kind)
        outputs = served._outputs if kind == "reward" else served._token_head
        rows = [row for row in ROWS if row.size <= (served.limits.max_length or POSITIONS)]
        assert len(rows) > 4
        expected = [directly(model, row) for row in rows]
        assert np.ptp(np.concatenate(expected)) > 100 * TOLERANCE  # a constant would pass for anything
        swapped = [served.with_weights(tmp_path / kind)] if name in ONE_BY_ONE else []
        for each in (served, *swapped):
            assert_alone_and_together(each.score if kind == "reward" else each.values, rows, expected)
        if name == "mpt":  # its bias ends there: one longer row would fail all that share its forward pass
            assert served.limits.max_length == POSITIONS
        assert outputs.one_by_one == (name in ONE_BY_ONE and (name, kind) != ("xlnet", "critic"))
        if kind == "critic":
            assert_alone_and_together(load_process_reward(tmp_path / kind).token_scores, rows, expected)
        elif getattr(outputs, "is_causal", False):
            critic = load_critic(tmp_path / kind)
            assert_alone_and_together(lambda batch: [v[-1:] for v in critic.values(batch)], rows, expected)  # noqa: B023


@names(list(REFUSED))
def test_what_cannot_be_scored_is_refused_by_name(tmp_path: Path, name: str):
    message = "(?s)" + re.escape(REFUSED[name])
    refused = 0
    for kind, load in (("reward", load_reward), ("critic", load_critic)):
        if save_architecture(tmp_path / kind, name, kind) is not None and (name, kind) != ("funnel", "reward"):
            refused += 1
            with pytest.raises(CheckpointError, match=message):
                load(tmp_path / kind)
    assert refused


def test_bigbird_keeps_full_attention_and_refuses_rows_that_would_end_it(tmp_path: Path):
    """Its block-sparse attention becomes full attention at the first short row, for all that follow."""
    model = save_architecture(tmp_path, "big_bird", "critic")
    critic = load_critic(tmp_path)
    assert critic.limits.max_length == 14  # (5 + 2 * 1) * 2
    short, long = rows_of(14, 30)
    critic.values([long])
    np.testing.assert_allclose(critic.values([short])[0], directly(model, short), atol=TOLERANCE)
    assert critic.model.base_model.attention_type == "original_full"
    model.config.attention_type = "original_full"
    model.save_pretrained(tmp_path)
    assert load_critic(tmp_path).limits.max_length == POSITIONS


@pytest.mark.parametrize("name", ["convbert", "fnet"])
def test_neither_does_padding_change_the_training_of_a_critic(tmp_path: Path, name: str):
    if name == "convbert":
        skip_on_cards(NO_DEPTHWISE)
    save_architecture(tmp_path, name, "critic")
    sizes = np.array([row.size for row in ROWS[:4]])
    zeros = np.zeros(sizes.sum() - sizes.size, np.float32)
    payload = TrainPayload(np.concatenate(ROWS[:4]), sizes, zeros + 1, zeros, zeros + 1)
    reports = []
    for token_budget in (1, 10_000):
        update = CriticUpdate(load_critic(tmp_path), trainer_section(token_budget=token_budget, clip_value=0, lr=1e-2))
        reports.append([update.train(payload, lambda _: None) for _ in range(2)])
    assert [each.loss_mean for each in reports[1]] == pytest.approx([r.loss_mean for r in reports[0]], abs=TOLERANCE)
    critic = load_critic(tmp_path)
    with pytest.raises(CheckpointError, match=r"forward pass of its own.*set trainer.ranks: 1"):
        TrainedCritic(critic.model, critic, ranks=object.__new__(Ranks))
