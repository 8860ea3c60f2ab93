"""The served models against plain transformers: each row gets the same numbers, or the model is refused."""

import functools
import gc
import itertools
import json
import logging
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints
import torch
from architectures import KINDS, POSITIONS, VOCAB, save_architecture
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import load_critic, load_language_model, load_process_reward, load_reward, load_trained, skip_on_gpus
from rope_models import DYNAMIC, LIMIT, LONGROPE, TOLERANCE, models, save
from safetensors.torch import load_file, save_file
from settings import trainer_section
from tiny_checkpoints import CONFIGS, save_tiny
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
)

from rlhf_triton.checkpoints.inspection import CheckpointError, inspect_checkpoint
from rlhf_triton.checkpoints.row_length import fix_forward, max_positions, stable_length
from rlhf_triton.models import modeling, output_head
from rlhf_triton.models.batching import plan_micro_batches
from rlhf_triton.models.logprobs import sampling_entropy, target_logprobs
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.models.output_head import head_logprobs, linear_head
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.trained_critic import TrainedCritic
from rlhf_triton.training_engine.ranks import Ranks
from rlhf_triton.wire.contract import ContractError, scoring_rows
from rlhf_triton.wire.training_payload import TrainPayload

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
    "ctrl": "the head classifier of CTRLForSequenceClassification needs a bidirectional body",
    "modernbert-decoder": "the head classifier of ModernBertDecoder",
}


QUICK = {"bert", "big_bird", "convbert", "deberta-v2", "fnet", "llama", "mixtral", "xlnet"}


near = functools.partial(np.testing.assert_allclose, atol=TOLERANCE)
quiet_transformers()


def names(known):
    marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in known]
    return pytest.mark.parametrize("name", marked)


def rows_of(*lengths):
    """Token rows without special tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, length) for length in lengths]


ROWS = rows_of(5, 11, 30, 3, 18, 8, 1)


def assert_alone_and_together(score, rows, expected):
    """Compare rows as sent, in reverse, as planned, and each alone, with `expected`."""
    order = [*range(len(rows))]
    planned = plan_micro_batches([row.size for row in rows], token_budget=40, max_rows=8)
    for batch in [order, order[::-1], *planned, *([i] for i in order)]:
        for i, found in zip(batch, score([rows[i] for i in batch]), strict=True):
            near(found, expected[i])


@torch.no_grad()
def directly(model, row):
    """Return Hugging Face's own logits of one row: `[1]`, or `[length]` for its tokens."""
    ids = torch.from_numpy(row)[None]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, ..., 0].reshape(-1).numpy()


# ---- architectures ----


@pytest.mark.device
@names(SERVED.split())
def test_row_scores_match_transformers_alone_and_batched(tmp_path, name):
    if name == "convbert":
        skip_on_gpus("the simulated GPUs have no depthwise convolution")
    for kind in KINDS:
        if (model := save_architecture(tmp_path / kind, name, kind)) is None:
            continue
        if kind == "reward" and name in ("flaubert", "xlm"):  # their head is no last layer of its own
            continue
        served = (load_reward if kind == "reward" else load_critic)(tmp_path / kind)
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
            steps = load_process_reward(tmp_path / kind)
            assert_alone_and_together(lambda batch: steps.launch_token_scores(batch)(), rows, expected)  # noqa: B023
        elif getattr(outputs, "is_causal", False):
            critic = load_critic(tmp_path / kind)
            assert_alone_and_together(lambda batch: [v[-1:] for v in critic.values(batch)], rows, expected)  # noqa: B023


@names(list(REFUSED))
def test_unsupported_architectures_are_refused_with_the_reason(tmp_path, name):
    message = "(?s)" + re.escape(REFUSED[name])
    refused = 0
    for kind, load in (("reward", load_reward), ("critic", load_critic)):
        if save_architecture(tmp_path / kind, name, kind) is not None and (name, kind) != ("funnel", "reward"):
            refused += 1
            with pytest.raises(CheckpointError, match=message):
                load(tmp_path / kind)
    assert refused


def test_bigbird_keeps_full_attention_and_refuses_rows_that_would_end_it(tmp_path):
    """BigBird switches from block-sparse to full attention at the first short row, for all later rows."""
    model = save_architecture(tmp_path, "big_bird", "critic")
    critic = load_critic(tmp_path)
    assert critic.limits.max_length == 14  # (5 + 2 * 1) * 2
    short, long = rows_of(14, 30)
    critic.values([long])
    near(critic.values([short])[0], directly(model, short))
    assert critic.model.base_model.attention_type == "original_full"
    model.config.attention_type = "original_full"
    model.save_pretrained(tmp_path)
    assert load_critic(tmp_path).limits.max_length == POSITIONS


@pytest.mark.parametrize("name", ["convbert", "fnet"])
def test_critic_training_does_not_depend_on_padding(tmp_path, name):
    save_architecture(tmp_path, name, "critic")
    sizes = np.array([row.size for row in ROWS[:4]])
    zeros = np.zeros(sizes.sum() - sizes.size, np.float32)
    payload = TrainPayload(np.concatenate(ROWS[:4]), sizes, zeros + 1, zeros, zeros + 1)
    reports = []
    for token_budget in (1, 10_000):
        update = CriticUpdate(load_trained(tmp_path), trainer_section(token_budget=token_budget, clip_value=0, lr=1e-2))
        reports.append([update.train(payload, lambda _: None) for _ in range(2)])
    assert [each.loss_mean for each in reports[1]] == pytest.approx([r.loss_mean for r in reports[0]], abs=TOLERANCE)
    critic = load_critic(tmp_path)
    with pytest.raises(CheckpointError, match=r"its own forward pass.*set trainer.ranks: 1"):
        TrainedCritic(critic.model, critic, ranks=object.__new__(Ranks))


# ---- weights: first ones, swapped ones, shared ones ----


@pytest.mark.device
def test_values_are_bit_identical_after_a_swap_and_in_any_order(tmp_path):
    """Each row has its own forward pass, as under `run.deterministic`; the model is wide enough to expose sum order."""
    save_tiny(tmp_path, "llama", "critic", hidden_size=256, intermediate_size=512, max_position_embeddings=128)
    critic = load_critic(tmp_path)
    critic.write(tmp_path)
    rows = rows_of(1, 2, 3, 7, 16, 31, 50, 77, 120)
    fresh = {row.size: critic.values([row])[0].tobytes() for row in rows}
    for same in (critic, critic.with_weights(tmp_path)):
        assert {row.size: same.values([row])[0].tobytes() for row in rows[::-1]} == fresh


def all_mapped(model):
    """Return whether every weight of the body lies in a mapping of a safetensors file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "safetensors" in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if line[-1].endswith(".safetensors")]
    pointers = [parameter.data_ptr() for parameter in model.base_model.parameters()]
    return all(any(start <= pointer < end for start, end in spans) for pointer in pointers)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
@pytest.mark.parametrize("form", ["one file", "shards", "bfloat16", "cast"])
@pytest.mark.parametrize("family", CONFIGS)
def test_body_is_memory_mapped_if_its_dtype_is_served(tmp_path, family, form):
    file = tmp_path / "model.safetensors"
    model = save_tiny(tmp_path, family, "reward")
    if form == "shards":
        file.unlink()
        model.save_pretrained(tmp_path, max_shard_size="3KB")
    if form == "bfloat16":
        save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    dtype = "bfloat16" if form in ("bfloat16", "cast") else "float32"
    for load in (modeling.load_reward, modeling.load_critic):
        assert all_mapped(load(tmp_path, dtype=dtype).model) is (form != "cast")


def test_swap_leaks_no_objects(tmp_path):
    """safetensors 0.8.0 loses two numbers for each tensor that it reads: a gigabyte after 100,000 swaps of 150."""
    save_tiny(tmp_path, "llama", "reward")
    critic = modeling.load_critic(tmp_path)
    critic.write(tmp_path)
    assert all_mapped(critic.with_weights(tmp_path).model)
    blocks = []
    gc.freeze()  # what other tests left takes a second to examine
    for _ in range(36):
        critic.with_weights(tmp_path)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    gc.unfreeze()
    assert (blocks[-1] - blocks[5]) / 30 < 10, "a swap leaves 10 or more objects"


# ---- micro-batches ----


@given(lengths=st.lists(st.integers(1, 40), max_size=60), token_budget=st.integers(1, 100), max_rows=st.integers(1, 9))
def test_plan_micro_batches_packs_each_row_once_within_the_budget(lengths, token_budget, max_rows):
    plan = plan_micro_batches(lengths, token_budget=token_budget, max_rows=max_rows)
    order = [row for batch in plan for row in batch]
    assert order == sorted(range(len(lengths)), key=lambda row: lengths[row])  # equal lengths keep their order
    for batch, following in itertools.zip_longest(plan, plan[1:]):
        assert len(batch) == 1 or (len(batch) * lengths[batch[-1]] <= token_budget and len(batch) <= max_rows)
        if following is not None:
            assert len(batch) == max_rows or (len(batch) + 1) * lengths[following[0]] > token_budget


# ---- log-probs of language models ----


close = torch.testing.assert_close
LENGTHS = (5, 1, 32, 2, 17, 3, 31)


SAMPLING = {"temperature": 0.7, "banned_token_ids": [0, 2]}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def token_rows(lengths=LENGTHS):
    """Token rows, banned ids among them."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, length, dtype=np.int64) for length in lengths]


@torch.no_grad()
def assert_direct(folder, model, rows, temperature, banned_token_ids):
    """Compare with transformers' forward pass and log_softmax of each row alone."""
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    for row, found in zip(rows, model.launch(rows)(), strict=True):
        logits = theirs(input_ids=torch.from_numpy(row)[None]).logits[0].double() / temperature
        logits[:, list(banned_token_ids)] = -torch.inf
        expected = [float(logits[t].log_softmax(-1)[row[t + 1]]) for t in range(row.size - 1)]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, [*expected, 0.0], atol=1e-5, rtol=1e-5)


@pytest.fixture
def sizes(monkeypatch):
    """Return how many positions got logits at once; at most seven fit."""
    found = []
    logits_of = output_head._logits

    def watched(*arguments):
        logits = logits_of(*arguments)
        found.append(len(logits))
        return logits

    for limit in ("MAX_LOGITS", "MAX_LOGITS_ON_GPU"):
        monkeypatch.setattr(output_head, limit, 7 * VOCAB + 1)
    monkeypatch.setattr(output_head, "_logits", watched)
    return found


@pytest.mark.device
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "gptj"])
def test_reference_logprobs_are_the_same_alone_and_batched(tmp_path, sizes, family):
    save_tiny(tmp_path, family, "language", tie_word_embeddings=family == "qwen2")
    model = load_language_model(tmp_path, **SAMPLING)
    sizes.clear()
    assert_direct(tmp_path, model, token_rows(), **SAMPLING)
    assert (max(sizes), sum(sizes)) == (7, sum(LENGTHS) - len(LENGTHS)), (
        "logits are not computed in parts, of the predicting positions only"
    )
    plain = load_language_model(tmp_path)
    assert_direct(tmp_path, plain, token_rows(), temperature=1.0, banned_token_ids=[])
    assert [found.tolist() for found in plain.launch(token_rows([1, 1]))()] == [[0], [0]]  # nothing to predict


@pytest.mark.device
def test_reference_logprobs_include_logit_scaling_after_the_head(tmp_path):
    torch.manual_seed(1)
    model = GraniteForCausalLM(GraniteConfig(**SMALL, max_position_embeddings=32, logits_scaling=0.25))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(tmp_path)
    assert_direct(tmp_path, load_language_model(tmp_path, **SAMPLING), token_rows(), **SAMPLING)


@pytest.mark.parametrize(
    ("family", "head", "message"),
    [
        ("llama", "body", r"the weights have no lm_head\.weight"),
        ("deberta-v3", "body", "no causal language model for deberta-v2 models"),
        *((family, "language", r"is not causal.*set is_decoder: true") for family in ("bert", "roberta")),
    ],
)
def test_reference_that_is_not_a_causal_language_model_is_refused(tmp_path, family, head, message):
    save_tiny(tmp_path / "0", family, head)
    with pytest.raises(CheckpointError, match=message):
        load_language_model(tmp_path / "0", **SAMPLING)
    if head == "language":
        save_tiny(tmp_path / "1", family, head, is_decoder=True)
        model = load_language_model(tmp_path / "1", **SAMPLING)
        assert_direct(tmp_path / "1", model, token_rows(), **SAMPLING)


# ---- log-probs and entropies of logits ----


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    banned=st.sets(st.integers(0, 4), max_size=3),
)
def test_log_probs_and_entropies_equal_a_loop_over_softmax(seed, temperature, banned):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(6, (3, 4), generator=generator)
    sampling = {"temperature": temperature, "banned_token_ids": sorted(banned)}
    found = target_logprobs(logits, targets, **sampling)
    entropies = sampling_entropy(logits, **sampling)
    for at in itertools.product(range(3), range(4)):
        weights = [0.0 if v in banned else math.exp(float(z) / temperature) for v, z in enumerate(logits[at])]
        shares = [weight / sum(weights) for weight in weights]
        p = shares[int(targets[at])]
        assert float(found[at]) == pytest.approx(math.log(p) if p else -math.inf)
        assert float(entropies[at]) == pytest.approx(-sum(p * math.log(p) for p in shares if p))


def test_target_logprobs_of_bfloat16_logits_are_computed_in_float32():
    logits = (20 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)) - 30).bfloat16()
    result = target_logprobs(logits, torch.arange(8), temperature=1.0)
    expected = logits.float().log_softmax(-1).gather(-1, torch.arange(8)[:, None])[:, 0]
    close(result, expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize(("temperature", "banned"), [(0.0, []), (math.nan, []), (1.0, [3, 1]), (1.0, [-1, 1])])
def test_target_logprobs_refuses_invalid_sampling_settings(temperature, banned):
    message = "banned_token_ids" if banned else f"temperature.*{temperature}"
    with pytest.raises(ValueError, match=message):
        target_logprobs(torch.zeros(2, 3), torch.zeros(2).long(), temperature=temperature, banned_token_ids=banned)


# ---- the output head, without whole logits ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_head_logprobs_and_gradients_match_full_logits_computed_in_chunks(sizes, bias, with_entropy, is_frozen):
    targets = torch.arange(3, 19)
    weights = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    kept = []  # what the backward pass needs
    for whole in (True, False):
        torch.manual_seed(0)
        head = nn.Linear(4, VOCAB, bias=bias, dtype=torch.float64).requires_grad_(not is_frozen)
        hidden = torch.randn(16, 4, dtype=torch.float64, requires_grad=True)
        if whole:
            logits = head(hidden)
            logprobs = target_logprobs(logits, targets, **SAMPLING)
            entropies = sampling_entropy(logits, **SAMPLING)
        else:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
                logprobs, entropies = head_logprobs(hidden, head, targets, with_entropy=with_entropy, **SAMPLING)
        loss = (logprobs * weights[0]).sum()
        if with_entropy:
            loss = loss + (entropies * weights[1]).sum()
        loss.backward()
        gradients = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
        results.append([logprobs.detach(), entropies.detach() if with_entropy else None, *gradients])
    close(results[1], results[0])
    assert sizes == [7, 7, 2] * 2, "the parts of forward and backward pass differ"
    assert sum(kept) <= hidden.numel() + 2 * targets.numel() + sum(parameter.numel() for parameter in head.parameters())


LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "config", "is_linear"),
    [
        (LlamaForCausalLM, LlamaConfig(**SMALL), True),
        (
            Gemma2ForCausalLM,
            Gemma2Config(**SMALL, final_logit_softcapping=30.0),
            False,
        ),  # random weights reach less
        (CohereForCausalLM, CohereConfig(**SMALL, logit_scale=0.5), False),
        (MiniCPM3ForCausalLM, MiniCPM3Config(**{**SMALL, **LATENT}, dim_model_base=4), False),  # scales hidden states
        (Llama4ForCausalLM, Llama4TextConfig(**SMALL, intermediate_size_mlp=16, num_local_experts=1), False),  # no body
    ],
)
def test_linear_head_rejects_models_that_change_their_logits(kind, config, is_linear):
    torch.manual_seed(0)
    model = kind(config).eval()
    assert linear_head(model) is (model.lm_head if is_linear else None)


# ---- rotary tables ----


MIXED = rows_of(3, LIMIT, 9, LIMIT + 4, LIMIT - 1, tiny_checkpoints.POSITIONS, 5)  # some longer than what is served


ROLES = {
    "reward": ("reward", load_reward),
    "critic": ("critic", load_critic),
    "reference": ("language", load_language_model),
}


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        near(one, other)


@models
@pytest.mark.parametrize("role", ROLES)
def test_dynamic_rope_rows_score_the_same_after_and_beside_longer_rows(tmp_path, model, role):
    head, load = ROLES[role]
    theirs = save(tmp_path, model, head)
    expected = [load(tmp_path).launch([row])()[0] for row in MIXED]  # alone in a fresh model
    for row, found in zip(MIXED, expected, strict=True):
        if row.size > LIMIT:  # no longer served, and another table
            continue
        with torch.no_grad():
            logits = theirs(input_ids=torch.from_numpy(row)[None]).logits[0]
        if role == "reference":
            logits = torch.tensor([*logits[:-1].log_softmax(-1)[range(row.size - 1), row[1:]], 0.0])
        near(found[: logits.numel()], logits.reshape(-1).numpy())
    served = load(tmp_path)
    assert_close(served.launch(MIXED)(), expected)
    assert_close(served.launch(MIXED[::-1])(), expected[::-1])
    for i in (5, 1, 3, 0, 1):  # a long row before each short one
        assert_close(served.launch([MIXED[i]])(), [expected[i]])


@torch.no_grad()
def test_rotary_tables_are_fixed_per_layer_type():
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 2},
        max_position_embeddings=LIMIT,
        layer_types=kinds,
        rope_parameters={kinds[0]: DYNAMIC, kinds[1]: {"rope_type": "default", "rope_theta": 10000.0}},
    )
    body = AutoModel.from_config(config).eval()
    fix_forward(body)
    row, longer = (torch.from_numpy(each)[None] for each in rows_of(LIMIT, tiny_checkpoints.POSITIONS))
    before = body(input_ids=row)[0]
    body(input_ids=longer)
    torch.testing.assert_close(body(input_ids=row)[0], before, atol=TOLERANCE, rtol=0)


# ---- longer rows are refused ----


@models
def test_rows_beyond_the_stable_rope_length_are_refused(tmp_path, model, caplog):
    save(folder := tmp_path / "0", model, "critic")
    with caplog.at_level(logging.WARNING):
        critic = load_critic(folder)
    assert ("rows are limited to 16 tokens, not max" in caplog.text) == (model != "dynamic")
    critic.write(folder)
    published = json.loads((folder / "config.json").read_text())  # what critic_train reads
    found = (critic.limits.max_length, inspect_checkpoint(folder).max_positions, max_positions(published))
    assert found == (LIMIT, LIMIT, LIMIT)
    with pytest.raises(ContractError, match=r"tokens\[0\]: 17 tokens, but the model has 16 positions"):
        scoring_rows(np.ones((1, LIMIT + 1), np.int64), None, limits=critic.limits)


@pytest.mark.parametrize(
    ("config", "limit", "positions"),
    [
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,  # Phi-3 128k on the hub
                "rope_scaling": {"type": "su", "short_factor": [1.05], "long_factor": [1.3]},
            },
            4096,
            4096,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "short_mscale": 1.1,
                    "long_mscale": 1.2,  # Phi-3.5-MoE scales by length, too
                },
            },
            4096,
            4096,
        ),
        ({"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rope_scaling": None}, None, 4096),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}},
            },
            LIMIT,
            LIMIT,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            None,
            131072,
        ),
        (
            {"max_position_embeddings": 64, "rope_parameters": {**LONGROPE, "short_factor": LONGROPE["long_factor"]}},
            None,
            64,
        ),
        ({"max_seq_len": 2048}, None, 2048),  # MPT
        ({}, None, None),
    ],
)
def test_stable_length_and_max_positions_are_read_from_config_json(config, limit, positions):
    assert stable_length(config) == limit
    assert max_positions(config) == positions
