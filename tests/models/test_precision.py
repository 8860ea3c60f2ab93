"""Policies and the served reference: the effects of bfloat16, merged weights, and rows up to the last position."""

import copy
import threading
import weakref

import numpy as np
import pytest
import torch
from rope_models import LIMIT, MODELS, TOLERANCE, models, save
from run_checkpoints import make_tokenizer, save_policy
from safetensors.torch import load_file
from samples import logprobs_of, tokens_of
from settings import actor_section
from tiny_checkpoints import POSITIONS, save_tiny
from transformers import GPT2LMHeadModel, PreTrainedModel

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import rows_of
from rlhf_triton.actor.policy.loading import load_model
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.models.adapters import MergedWeights
from rlhf_triton.models.language_model import load_language_model
from rlhf_triton.models.logprobs import target_logprobs
from rlhf_triton.models.modeling import load_critic, quiet_transformers
from rlhf_triton.models.precision import in_float32
from rlhf_triton.tools import render_configs

PROMPTS = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((3, 6, 2, 9))]


LORA_COPY = {"lora_rank": 2, "max_off_policy_steps": 1, "old_logprobs": "sampler"}


EXACT = ("norm", "ln_", "lm_head", "embed_tokens", "wte", "wpe", ".gate.", ".experts.", "lora_")


GPU_BOUND = 2e-5  # nats: a GPU multiplies the output layer as sums of bfloat16 terms


FAMILIES = ("llama", "gpt2", "mixtral")


quiet_transformers()


def make_policy(folder, **settings):
    limits = {"model": folder, "max_new_tokens": 8, "prompts_max_tokens": 12, "precision": "bfloat16"}
    torch.manual_seed(0)
    return Policy(actor_section(**{**limits, **settings}))


def by_hand(model, rows, banned):
    """Return log-probs `[B, S-1]` of whole rows from a float32 model under autocast with a float32 head."""
    tokens, lengths = tokens_of(rows).to(model.device), torch.tensor([[len(row.tokens)] for row in rows])
    attention = (torch.arange(tokens.shape[1]) < lengths).long().to(model.device)
    with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.base_model(input_ids=tokens, attention_mask=attention, use_cache=False)[0][:, :-1]
    with torch.no_grad():
        logits = torch.nn.functional.linear(hidden.float(), model.lm_head.weight)
        return target_logprobs(logits, tokens[:, 1:], temperature=1.0, banned_token_ids=banned).cpu()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, settings) for family in FAMILIES for settings in ({"lora_rank": 2}, {})),
        *(("llama", settings) for settings in ({"max_off_policy_steps": 1, "old_logprobs": "sampler"}, LORA_COPY)),
    ],
    ids=str,
)
def test_frozen_matrices_are_held_in_bfloat16_without_changing_logprobs(tmp_path, family, settings, caplog):
    exact = make_policy(save_policy(tmp_path, family), precision="float32", kl_coef=0)
    policy = make_policy(tmp_path, **settings)
    rollout = rows_of(policy.generate(PROMPTS, seed=1))
    assert not caplog.text, "transformers' generate() is used"
    for row, logprobs in zip(rollout, policy.logprobs(rollout), strict=True):
        np.testing.assert_allclose(row.logprobs, logprobs, atol=0.02, rtol=0)
    expected = by_hand(exact.model, rollout, policy.banned_ids)
    for reference in (False, True):
        found = logprobs_of(policy, rollout, reference=reference)
        bound = 0 if policy.model.device.type == "cpu" else GPU_BOUND
        torch.testing.assert_close(found[found != 0], expected[found != 0], rtol=0, atol=bound)
    for model in (policy.model, policy.generator, policy.reference):
        for name, parameter in [] if model is None else model.named_parameters():
            is_float32 = parameter.requires_grad or any(part in name for part in EXACT)
            assert parameter.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
    causal = policy.model.get_base_model() if "lora_rank" in settings else policy.model
    with torch.no_grad(), policy.computing():
        logits = causal(input_ids=tokens_of(rollout)[:1].to(policy.model.device)).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_equivalence_checks_run_in_float32(tmp_path):
    policy = make_policy(save_policy(tmp_path), lora_rank=2)
    exact = make_policy(tmp_path, lora_rank=2, precision="float32")
    ids = torch.arange(4, 16, device=policy.model.device)[None]
    for name, parameter in exact.model.named_parameters():
        if parameter.ndim == 2 and "lora" not in name and "embed" not in name and "lm_head" not in name:
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad(), policy.computing(), in_float32(policy.model):
        found = policy.model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(found, exact.model(input_ids=ids).logits)
    assert {p.dtype for n, p in policy.model.named_parameters() if "base_layer" in n} == {torch.bfloat16}


def test_renew_generator_copies_an_update_to_a_bfloat16_generator(tmp_path):
    policy = make_policy(save_policy(tmp_path), max_off_policy_steps=1, old_logprobs="sampler", kl_coef=0)
    rollout = rows_of(policy.generate(PROMPTS, seed=1))
    before = logprobs_of(policy, rollout)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter *= 1.5
    assert torch.equal(logprobs_of(policy, rollout), before)
    policy.renew_generator()
    exact = make_policy(tmp_path, kl_coef=0)
    exact.model.load_state_dict(policy.model.state_dict())
    assert torch.equal(logprobs_of(policy, rollout), logprobs_of(exact, rollout))


@pytest.mark.parametrize(
    ("family", "stored", "settings"),
    [
        ("llama", "bfloat16", {}),
        ("llama", "float32", {"lora_rank": 2}),
        ("gpt2", "float32", {"lora_rank": 2}),
        ("mixtral", "bfloat16", {"lora_rank": 2}),
    ],
    ids=str,
)
def test_served_reference_logprobs_match_the_actors(tmp_path, settings, family, stored):
    """So that the KL begins at 0."""
    folder = save_policy(tmp_path, family)
    if stored == "bfloat16":
        model = make_policy(folder, precision="float32", kl_coef=0).model
        model.bfloat16().save_pretrained(folder)
    policy = make_policy(folder, **settings)
    served = load_language_model(
        folder, device=policy.settings.device, dtype="bfloat16", banned_token_ids=policy.banned_ids
    )
    rollout = rows_of(policy.generate(PROMPTS, seed=1))
    for row in rollout:
        found = served.launch([row.tokens])()[0]
        start = row.prompt.tokens.size
        (expected,) = policy.logprobs([row])
        np.testing.assert_allclose(found[start - 1 : len(row.tokens) - 1], expected[start:], atol=1e-5, rtol=0)


# ---- merged weights ----


def test_saving_over_a_mapped_checkpoint_keeps_the_models_weights(tmp_path):
    """They are mapped: without the file's pages behind them, reading them would end the process."""
    save_tiny(tmp_path, "llama", "critic")
    critic = load_critic(tmp_path)
    before = {name: tensor.clone() for name, tensor in critic.model.state_dict().items()}
    critic.stored_as = torch.bfloat16
    critic.write(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} > {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.model.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_saved_lora_policy_equals_the_merge_of_peft_tensor_by_tensor(tmp_path, monkeypatch, family, precision):
    """GPT-2's layers are transposed and its output layer is tied; Mixtral's experts are stored under other names."""
    policy = make_policy(save_policy(tmp_path / "start", family), lora_rank=2, precision=precision)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:  # new ones add 0
                parameter.normal_(std=0.1)
    alive = weakref.WeakSet[torch.Tensor]()
    merge = MergedWeights.__getitem__

    def watched(weights, name):
        assert not alive, "the previous tensor is still in memory"
        tensor = merge(weights, name)
        if name in weights.adapted:
            alive.add(tensor)
        return tensor

    monkeypatch.setattr(MergedWeights, "__getitem__", watched)
    policy.save(tmp_path / "streamed")
    copy.deepcopy(policy.model).float().merge_and_unload().save_pretrained(tmp_path / "copied")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "copied"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = {path.name for path in (tmp_path / "copied").iterdir()} - {"model.safetensors", "generation_config.json"}
    assert "merged.safetensors" not in {path.name for path in (tmp_path / "streamed").iterdir()}
    for name in names:
        assert (tmp_path / "streamed" / name).read_text() == (tmp_path / "copied" / name).read_text()


def test_threads_that_load_at_once_leave_transformers_as_it_was(tmp_path, monkeypatch):
    """transformers replaces `tie_weights` during a load. Here the second thread would begin before the first ends."""
    save_tiny(tmp_path, "gpt2", "language")
    settings = actor_section(model=tmp_path).policy
    before = (PreTrainedModel.tie_weights, torch.get_default_dtype())
    begun = [threading.Event(), threading.Event()]
    first_has_ended = threading.Event()
    create = GPT2LMHeadModel.__init__

    def watched(model, *arguments, **options):
        is_first = not begun[0].is_set()
        begun[not is_first].set()
        create(model, *arguments, **options)
        if is_first:
            begun[1].wait(0.5)
        else:
            assert first_has_ended.wait(60)

    def load_first():
        load_model(settings)
        first_has_ended.set()

    monkeypatch.setattr(GPT2LMHeadModel, "__init__", watched)
    first = threading.Thread(target=load_first)
    first.start()
    assert begun[0].wait(60)
    policy = load_model(settings)
    first.join()
    assert (PreTrainedModel.tie_weights, torch.get_default_dtype()) == before
    assert policy.lm_head.weight is policy.transformer.wte.weight


# ---- rows of as many tokens as the model has positions for ----


def policy_of(folder, model, *, length, **settings):
    """Return a policy whose rows have at most `length` tokens, six of them for the prompt."""
    tokenizer = make_tokenizer()
    save(folder, model, "language", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    limits = {"prompts_max_tokens": 6, "max_new_tokens": length - 6}
    return Policy(actor_section(**{"model": folder, "precision": "float32", **limits, **settings}))


SHORT_PROMPTS = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((6, 1, 3))]
LAST = {**dict.fromkeys(MODELS, LIMIT), "gpt2": POSITIONS, "opt": POSITIONS, "gptj": POSITIONS}


@pytest.mark.parametrize("model", LAST)
def test_policy_with_too_few_positions_is_refused_at_the_start(tmp_path, model):
    """With learned positions, the run would end with an IndexError at the first response that is too long."""
    message = rf"more than {LAST[model]} tokens.*actor.prompts.max_tokens \(6\) \+ actor.generation.max_new_tokens"
    with pytest.raises(CheckpointError, match=message):
        policy_of(tmp_path, model, length=LAST[model] + 1)
    policy_of(tmp_path, model, length=LAST[model])


@models
def test_a_policy_generates_up_to_its_position_limit(tmp_path, model):
    policy = policy_of(tmp_path, model, length=LIMIT, min_new_tokens=LIMIT - 6)
    rollout = rows_of(policy.generate(SHORT_PROMPTS, seed=0, greedy=True))
    assert [len(row.tokens) for row in rollout] == [LIMIT, LIMIT - 5, LIMIT - 3]
    together = logprobs_of(policy, rollout)
    for i, sample in enumerate(rollout):
        row = torch.from_numpy(sample.tokens)[None]
        length = len(sample.tokens)
        start = len(sample.prompt.tokens)
        mask = torch.arange(length - 1)[None] >= start - 1
        alone = policy.token_logprobs.compute(policy.model, row, torch.tensor([length]), mask)
        torch.testing.assert_close(together[i : i + 1, : length - 1], alone.cpu(), atol=TOLERANCE, rtol=0)
        logits = policy.model(input_ids=row.to(policy.model.device), use_cache=False).logits.cpu()
        written = logits[0, start - 1 : -1].index_fill(-1, torch.tensor([*policy.banned_ids, *policy.eos_ids]), -1e9)
        assert written.argmax(-1).tolist() == row[0, start:].tolist()


# ---- tokens that the model has no embedding for ----


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padding_token_beyond_the_embeddings_is_not_used(tmp_path, family):
    """Such as one added to the tokenizer but not to the model."""
    tokenizer = make_tokenizer()
    save_tiny(tmp_path, family, "language", vocab_size=len(tokenizer), pad_token_id=None, eos_token_id=1)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "bos_token": "[BOS]"})
    tokenizer.save_pretrained(tmp_path)
    policy = Policy(actor_section(model=tmp_path, prompts_max_tokens=6, max_new_tokens=8))
    assert (tokenizer.pad_token_id, policy.pad_id, policy.banned_ids) == (policy.vocab_size, 1, [])
    assert torch.isfinite(logprobs_of(policy, rows_of(policy.generate(SHORT_PROMPTS, seed=0)))).all()
    assert render_configs._banned_token_ids(tmp_path) == "[]"  # or the actor refuses the served reference
