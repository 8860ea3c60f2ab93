"""Tests of `actor.generation` and `Policy.generate`.

Responses equal those of transformers' `generate` for any model, number of slots and order of ends. The tests also cover
what ends a response, and the log-probs of generated tokens.
"""

import functools
import itertools
import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import transformers
from decoded_responses import asking, one_response, responses
from samples import logprobs_of, tokens_of
from settings import actor_section
from transformers import AutoModelForCausalLM, GenerationConfig

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import PolicyTurn, padded, row_of_response, rows_of
from rlhf_triton.actor.generation import shared_prompts
from rlhf_triton.actor.generation.cache import SlotCache, cache_layers
from rlhf_triton.actor.generation.engine import LocalGeneration
from rlhf_triton.actor.generation.row_sources import NewRow, RowId, SamplingJob, uniform_draws
from rlhf_triton.actor.generation.shared_prompts import can_share, response_hidden, shared_passes
from rlhf_triton.actor.generation.slots import Decoder, SamplingSettings, draw
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.config.actor import GenerationSection

VOCAB = 64
EOS = 2
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 256}
GROUPED = {**WIDE, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
OPT = {**SMALL, "ffn_dim": 64, "max_position_embeddings": 256, "word_embed_proj_dim": 32}
FAMILIES = {
    "llama": ("LlamaConfig", WIDE),
    "grouped heads": ("Qwen2Config", GROUPED),
    "learned positions": ("GPT2Config", GPT2),
    "offset positions": ("OPTConfig", OPT),
    "distances in the mask": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "half rotated": ("GPTNeoXConfig", WIDE),
    "sliding window": ("MistralConfig", {**GROUPED, "sliding_window": 8}),
    "every other layer slides": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
}


def make_model(family, *, eos_bias=0.0):
    """Return a model with random weights large enough for distinct logits; `eos_bias` makes responses end."""
    name, settings = FAMILIES[family]
    torch.manual_seed(5)
    settings = {**settings, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    bias = eos_bias * torch.nn.functional.one_hot(torch.tensor(EOS), VOCAB)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + bias)
    return model


def make_prompts(count, *, longest=20):
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, rng.integers(1, longest + 1)) for _ in range(count)]


def generation(model, *, uses_slots=None, **settings):
    given = {"max_new_tokens": 16, "generation_batch_size": 4, **settings}
    made = LocalGeneration(model, None, actor_section(**given).generation, eos_ids=[EOS], pad_id=0, banned_ids=[0, 1])
    made.uses_slots = uses_slots
    return made


def texts(written_by, prompts, *, seed=0, greedy=False):
    found = {}
    given = [Prompt("", "", tokens) for tokens in prompts]
    written_by.run_rows(
        dict(enumerate(given)), lambda i, rows: found.update({i: responses([*rows])[0]}), seed=seed, greedy=greedy
    )
    assert len(found) == len(prompts)
    return [found[i] for i in range(len(prompts))]


# ---- decoding in slots ----


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_slot_decoding_matches_transformers_generate(family):
    model = make_model(family, eos_bias=2.0)
    prompts = make_prompts(11)
    ours = generation(model)
    written = texts(ours, prompts, greedy=True)
    assert ours.uses_slots, "transformers' generate() generated the responses"
    assert written == texts(generation(model, uses_slots=False), prompts, greedy=True)


def test_slot_decoding_handles_a_response_that_just_fits_the_models_positions():
    model = make_model("learned positions")
    prompts = [np.full(length, 5) for length in (255, 9)]
    ours, theirs = (generation(model, max_new_tokens=1, uses_slots=slots) for slots in (None, False))
    assert texts(ours, prompts, greedy=True) == texts(theirs, prompts, greedy=True)
    assert ours.uses_slots


def test_slot_cache_is_allocated_once_and_reused_for_all_rows(monkeypatch):
    """Rows that go on for long: the columns are used up again and again."""
    sizes = set()
    shifts = []
    shift = SlotCache.shift
    write_on = Decoder._decode_step

    def watched(self):
        sizes.add(tuple(tensor.data_ptr() for layer in self._cache.layers for tensor in layer.tensors()))
        write_on(self)

    monkeypatch.setattr(Decoder, "_decode_step", watched)
    monkeypatch.setattr(SlotCache, "shift", lambda self, *args: (shifts.append(1), shift(self, *args)))
    model = make_model("llama", eos_bias=1.0)
    prompts = make_prompts(60, longest=4)
    found = {}
    decoder = Decoder(model, SamplingSettings(max_new_tokens=24, eos_ids=[EOS], banned_ids=[0, 1]), slots=4)
    decoder.run(asking(prompts, found, lambda _: None, most=24))
    assert len(sizes) == 1
    assert len(shifts) > 3
    plain = generation(model, uses_slots=False, max_new_tokens=24, generation_batch_size=60)
    assert [found[i] for i in range(60)] == texts(plain, prompts, greedy=True)


def test_draw_samples_in_proportion_to_the_probabilities():
    """20,000 draws of five tokens: each share within four standard deviations of its probability."""
    torch.manual_seed(0)
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 20_000
    drawn = draw(probabilities.log().expand(count, -1), torch.rand(count, dtype=torch.float64))
    shares = drawn.bincount(minlength=5) / count
    assert ((shares - probabilities).abs() <= 4 * (probabilities * (1 - probabilities) / count).sqrt()).all()
    edges = torch.tensor([0.0, 0.5 - 1e-6, 0.5 + 1e-6, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities.log().expand(4, -1), edges).tolist() == [0, 0, 2, 4]


def test_draws_depend_on_seed_and_prompt_alone():
    whole, again = ([list(islice(uniform_draws(7, index), 200)) for index in range(3)] for _ in range(2))
    assert whole == again
    assert len({value for row in [*whole, list(islice(uniform_draws(8, 0), 200))] for value in row}) == 800
    assert 0.45 < np.mean(whole) < 0.55


@pytest.mark.parametrize(
    ("size", "token_budget", "first"), [(3, None, [1]), (16, None, [3]), (16, 40, [2, 1]), (16, 1, [1, 1, 1])]
)
def test_rows_of_a_group_share_the_prefill_of_their_prompt(size, token_budget, first, monkeypatch):
    """Prefills have fewer rows, stay within the token budget, and give the same responses as separate prefills."""
    prompts = [prompt for prompt in make_prompts(3) for _ in range(4)]
    passes = []
    prefill = Decoder._prefill
    logits = Decoder._logits

    def watched(self, *given):
        def noted(self, cache, ids, *window):
            passes.append(ids)
            return logits(self, cache, ids, *window)

        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_logits", noted)
            prefill(self, *given)

    monkeypatch.setattr(Decoder, "_prefill", watched)
    settings = SamplingSettings(max_new_tokens=16, eos_ids=[EOS], banned_ids=[0, 1])
    decoder = Decoder(make_model("llama", eos_bias=2.0), settings, slots=size, token_budget=token_budget)
    together = {}
    decoder.run(asking(prompts, together, functools.partial(uniform_draws, 3), most=16))
    assert all(len(ids) == 1 or ids.numel() <= (token_budget or math.inf) for ids in passes)
    assert sum(map(len, passes)) < 12
    assert [len(ids) for ids in passes[: len(first)]] == first
    for i, prompt in enumerate(prompts):
        assert together[i] == one_response(decoder, prompt, uniform_draws(3, i), 16)


# ---- rows of several turns ----


class Talk:
    """Asks for up to three turns in each row, behind random tokens; some are asked for at once, some much later."""

    longest = 60

    def __init__(self, prompts, seed):
        self.size = len(prompts)
        self._rng = np.random.default_rng(seed)
        self.rows = {i: [[*prompt.tolist()]] for i, prompt in enumerate(prompts)}  # prompt, turn, observation, turn, …
        self._late = []
        self._now = [*self.rows]
        self.answered = 0
        self._draws = functools.cache(functools.partial(uniform_draws, seed))

    def deliver(self, row, turn):
        index = row.conversation
        parts = self.rows[index]
        assert len(turn.logprobs) == len(turn.tokens)
        parts.append(turn.tokens)
        size = int(self._rng.integers(1, 9))
        if len(parts) >= 2 + 2 * int(self._rng.integers(3)) or sum(map(len, parts)) + size >= self.longest:
            self.size -= 1
            return
        parts.append(self._rng.integers(3, 60, size).tolist())
        (self._late if self._rng.integers(2) else self._now).append(index)
        self.answered += 1

    def next_rows(self, *, wait):
        found = self._now
        self._now = []
        if (wait and not found) or self._rng.random() < 0.1:
            found = found + self._late
            self._late = []
        return [self._row(index) for index in found]

    def _row(self, index):
        tokens = [*itertools.chain(*self.rows[index])]
        return NewRow(
            id=RowId(0, index), tokens=tokens, order=0, index=index, seed=(0, index), draws=self._draws(index)
        )


@pytest.mark.parametrize(
    ("name", "slots", "budget"),
    [
        pytest.param("llama", 1, None, marks=pytest.mark.slow),
        ("llama", 3, 20),
        ("learned positions", 5, None),
        ("every other layer slides", 3, 20),
        ("llama", 40, 30),
    ],
)
def test_resumed_rows_match_generation_from_the_whole_row(name, slots, budget):
    model = make_model(name, eos_bias=2.0)
    prompts = make_prompts(24)
    for seed in range(2):
        settings = SamplingSettings(max_new_tokens=12, eos_ids=[EOS], banned_ids=[0, 1], min_new_tokens=seed)
        talk = Talk(prompts, seed)
        Decoder(model, settings, slots=slots, token_budget=budget).run(talk)
        assert talk.answered > 10
        for i, (prompt, *parts) in talk.rows.items():
            draws = uniform_draws(seed, i)
            row = prompt
            for turn, observed in itertools.zip_longest(parts[::2], parts[1::2], fillvalue=()):
                left = min(12, talk.longest - len(row))
                decoder = Decoder(model, replace(settings, max_new_tokens=left), slots=1)
                assert turn == one_response(decoder, row, draws, left)
                row = [*row, *turn, *observed]


def test_new_weights_are_taken_up_between_tokens_with_exact_logprobs():
    """Each token has the log-prob that a forward pass gives it, with the weights of the step that is recorded.

    A second job is added while the first one is decoded; seeds make its responses those of a rollout of its own.
    """
    model = make_model("llama", eos_bias=-2.0)
    prompts = make_prompts(9)
    alone = texts(generation(model), prompts[5:], seed=2)
    layer = model.model.layers[0].self_attn.v_proj.weight
    weights = [layer.detach().clone(), layer.detach() * 0.5]
    engine = generation(model)
    found = {}

    def given(numbers):
        return {number - numbers.start: Prompt(str(number), "", prompts[number]) for number in numbers}

    def finished(index, rows):
        found[int(rows[0].prompt.prompt_id)] = rows[0]

    for step, passes in ((0, 14), (1, 1000)):
        remaining = iter([False] * passes)
        layer.data.copy_(weights[step])
        engine.renew(step)
        engine.add(SamplingJob(given((range(5), range(5, 9))[step]), finished, seed=1 + step))
        engine.decode(lambda remaining=remaining: next(remaining, True))
    assert not engine.has_jobs
    steps = [row.policy_steps[row.sampled].tolist() for _, row in sorted(found.items())]
    assert any(0 < sum(of_row) < len(of_row) for of_row in steps), "no response has tokens of both weights"
    assert all(of_row == sorted(of_row) for of_row in steps)
    for row in found.values():
        assert (row.policy_steps[~row.sampled] == -1).all()
        for step in (0, 1):
            layer.data.copy_(weights[step])
            tokens = torch.from_numpy(row.tokens)
            logits = model(tokens[None]).logits[0].detach()
            logits[:, [0, 1]] = -torch.inf
            expected = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0].numpy()
            its = row.policy_steps[1:] == step
            np.testing.assert_allclose(row.logprobs[1:][its], expected[its], atol=1e-5)
    assert texts(generation(model), prompts[5:], seed=2) == [responses([found[i]])[0] for i in range(5, 9)]
    assert alone != [responses([found[i]])[0] for i in range(5, 9)]


# ---- models that slots do not support, and lack of memory ----


def test_recurrent_model_falls_back_to_transformers_generate(caplog):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    config = transformers.MambaConfig(**sizes, pad_token_id=0, eos_token_id=EOS)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert cache_layers(model) == 0
    written_by = generation(model, max_new_tokens=3)
    assert all(1 <= len(text) <= 3 for text in texts(written_by, make_prompts(3)))
    assert "caches more than keys and values" in caplog.text
    assert not written_by.uses_slots


@pytest.mark.parametrize(
    ("lengths", "scale"),
    [([3, 8, 20], 1), ([7, 7, 7, 7], 1), ([1, 1], 1), ([3, 8, 20, 5], 0.005)],
    ids=str,
)
def test_slot_decoding_is_disabled_if_its_probabilities_differ_from_a_plain_forward(lengths, scale, caplog):
    """It takes positions from the number of columns, which padding shifts. It is found out whatever the first prompts
    are, also those of equal length, and where the likeliest tokens are the same and their probabilities are not."""
    model = make_model("learned positions")
    embedding = model.transformer.wpe
    embedding.weight.data *= scale
    forward = embedding.forward
    embedding.forward = lambda ids: forward(torch.arange(ids.shape[-1]).expand_as(ids) * 5 % 256)
    written_by = generation(model)
    rng = np.random.default_rng(0)
    texts(written_by, [rng.integers(3, VOCAB, length) for length in lengths])
    assert not written_by.uses_slots
    assert "different distribution than plain forward passes" in caplog.text


@pytest.mark.parametrize(("off", "decodes"), [(0.1, True), (0.5, False)])
def test_slot_decoding_is_checked_in_the_precision_of_generation(off, decodes, monkeypatch):
    written_by = generation(make_model("llama"))
    # Another kernel in bfloat16.
    monkeypatch.setattr(
        LocalGeneration, "_decoder_distance", lambda *_: off if torch.is_autocast_enabled("cpu") else 0.0
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        texts(written_by, make_prompts(3))
    assert written_by.uses_slots == decodes


def test_non_finite_logits_are_an_error():
    model = make_model("llama")
    written_by = generation(model)
    texts(written_by, make_prompts(3))
    model.lm_head.weight.data[5] = torch.nan
    for greedy in (True, False):
        with pytest.raises(FloatingPointError, match=r"logits are not finite.* lower actor\.optimizer\.lr"):
            texts(written_by, make_prompts(3), greedy=greedy)


def limit_rows(model, most, monkeypatch, *, after=0):
    """Let memory run out in forwards of more than `most` rows, `after` the first ones."""
    forward = model.forward
    passes = itertools.count()

    def limited(input_ids, **others):
        if next(passes) >= after and len(input_ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return forward(input_ids=input_ids, **others)

    monkeypatch.setattr(model, "forward", functools.wraps(forward)(limited))


@pytest.mark.parametrize("uses_slots", [True, False])
def test_out_of_memory_restarts_rows_with_the_same_draws(uses_slots, monkeypatch):
    model = make_model("llama", eos_bias=2.0)
    prompts = make_prompts(11)
    expected = texts(generation(model, uses_slots=uses_slots, generation_batch_size=8), prompts, seed=7)
    written_by = generation(model, uses_slots=uses_slots, generation_batch_size=8)
    texts(written_by, prompts[:1])
    limit_rows(model, 3, monkeypatch, after=5)
    found = []
    given = [Prompt("", "", tokens) for tokens in prompts]
    written_by.run_rows(dict(enumerate(given)), lambda i, rows: found.append((i, responses([*rows])[0])), seed=7)
    assert sorted(found) == list(enumerate(expected))  # each once
    assert (written_by.memory.num_halvings, written_by.memory.size) == (2, 2)


def test_out_of_memory_halves_the_decoding_rows_of_all_jobs(monkeypatch):
    model = make_model("llama", eos_bias=-2.0)
    prompts = [Prompt("", "", tokens) for tokens in make_prompts(9)]
    engine = generation(model, uses_slots=True, generation_batch_size=8)
    found = []
    limit_rows(model, 4, monkeypatch)
    engine.add(SamplingJob({0: prompts[0]}, lambda index, _: found.append(index), seed=1))
    later = [SamplingJob(dict(enumerate(prompts[1:], 1)), lambda index, _: found.append(index), seed=2)]

    def add():
        if later:
            engine.add(later.pop())
        return False

    engine.decode(add)
    assert sorted(found) == [*range(9)]
    assert engine.memory.size == 4


# ---- Policy.generate: what ends a response ----

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def make_policy(checkpoint, **settings):
    return Policy(actor_section(model=checkpoint, max_new_tokens=12, **settings))


def generate(policy, *, prompts=PROMPTS, seed=0, **settings):
    given = [Prompt(str(i), "", np.asarray(tokens)) for i, tokens in enumerate(prompts)]
    rows = rows_of(policy.generate(given, seed=seed, **settings))
    assert [row.tokens[~row.sampled].tolist() for row in rows] == prompts
    for response in responses(rows):
        assert 1 <= len(response) <= 12
        assert not set(response) & set(policy.banned_ids)
    return rows


def ends(rows):
    return [row.ended for row in rows]


def test_eos_ends_a_response_and_is_its_last_token(checkpoint):
    policy = make_policy(checkpoint)
    ended = []
    policy.model.lm_head.weight.data[policy.eos_ids[0]] += 0.5  # now and then
    for seed in range(4):
        rollout = generate(policy, seed=seed)
        ended += ends(rollout)
        for response, end in zip(responses(rollout), ends(rollout), strict=True):
            assert [token in policy.eos_ids for token in response] == [False] * (len(response) - 1) + [end]
    assert set(ended) == {True, False}


def test_eos_id_beyond_the_models_vocabulary_is_ignored():
    settings = GenerationSection(max_new_tokens=6, min_new_tokens=4)
    model = make_model("llama", eos_bias=2.0)
    written_by = LocalGeneration(model, None, settings, eos_ids=[EOS, VOCAB + 3], pad_id=0, banned_ids=[0, 1])
    assert all(4 <= len(text) <= 6 for text in texts(written_by, make_prompts(3)))


def test_a_stop_string_ends_a_response(checkpoint):
    free = make_policy(checkpoint)
    plain = responses(generate(free, seed=3))
    decode = free.tokenizer.decode
    stop = decode(plain[0][2:4])  # what the first row writes third and fourth
    policy = make_policy(checkpoint, stop_strings=(stop, "never written"))
    rollout = generate(policy, seed=3)
    for response, before, end in zip(responses(rollout), plain, ends(rollout), strict=True):
        stopped = stop in decode(response)
        assert end == (stopped or response[-1] in policy.eos_ids)
        assert stop not in decode(response[:-1])
        assert stopped or response == before  # the others write on as they would have
    assert len(responses(rollout)[0]) <= 4


@pytest.mark.device
def test_stop_string_that_starts_in_the_prompt_is_ignored(checkpoint):
    free = make_policy(checkpoint)
    written = responses(generate(free, greedy=True))[0]
    policy = make_policy(checkpoint, stop_strings=(free.tokenizer.decode([7, written[0]]),))
    assert responses(generate(policy, greedy=True))[0] == written


class Letters:
    """A tokenizer whose ids are the UTF-8 bytes."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("written", "ends"),
    [
        *[(text, False) for text in ("ab", "xab", "xabx", "xé", "xab" + "y" * 40)],
        *[(text, True) for text in ("xabxxxxab", "xxab", "xxxab", "abab", "xéab", "xxé")],
    ],
)
def test_stop_string_that_ends_within_min_new_tokens_is_ignored(written, ends):
    """The rule is vLLM's: `ab` may begin within the first three tokens but must end after them."""
    settings = GenerationSection(min_new_tokens=3, stop_strings=("ab", "é"))
    generation = LocalGeneration(None, Letters(), settings, eos_ids=[], pad_id=0, banned_ids=[])
    ids = list(written.encode())
    assert [generation._has_stop(ids[:n]) for n in range(len(ids) + 1)] == [False] * len(ids) + [ends]


# ---- Policy.generate: slots and transformers alike ----


@pytest.mark.device
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_new_tokens": 3}], ids=["plain", "restricted"]
)
def test_both_engines_sample_the_same_tokens_without_the_global_generator(checkpoint, settings):
    """A user's loss may seed it, and draw from it, in another thread."""
    found = []
    for uses_slots in (True, False):
        policy = make_policy(checkpoint, generation_batch_size=2, **settings)
        policy.generation.uses_slots = uses_slots
        before = torch.get_rng_state()
        found.append(responses(generate(policy, seed=5)))
        assert torch.equal(torch.get_rng_state(), before)
        found.append(responses(generate(policy, seed=5, finished=lambda *_: torch.manual_seed(9))))
    assert found == found[:1] * 4


def test_both_engines_ignore_the_checkpoints_generation_config(checkpoint):
    found = []
    ended = set()
    for uses_slots in (True, False):
        policy = make_policy(checkpoint, stop_strings=("t", "never written"))
        policy.generation.uses_slots = uses_slots
        asked = GenerationConfig(no_repeat_ngram_size=1, forced_eos_token_id=policy.eos_ids[0], eos_token_id=77)
        policy.model.generation_config = asked
        policy.model.lm_head.weight.data[policy.eos_ids[0]] *= 2  # the likeliest now and then
        rollout = generate(policy, prompts=[[5 + i] * (1 + i % 7) for i in range(30)], greedy=True)
        found.append(responses(rollout))
        ended.update(ends(rollout))
        assert policy.model.generation_config is asked  # checkpoints keep it
    assert ended == {True, False}
    assert found[0] == found[1]


# ---- log-probs of what was generated ----


def test_logprobs_apply_temperature_and_banned_tokens_but_not_top_k_or_top_p(checkpoint):
    """Under the temperature and without forbidden tokens, whatever top-k, top-p or a penalty did to the draw."""
    policy = make_policy(checkpoint, precision="float32", temperature=0.7, top_k=5, top_p=0.9)
    rollout = generate(policy, seed=1)
    row = torch.from_numpy(rollout[2].tokens)
    start = len(PROMPTS[2])
    with torch.no_grad():
        logits = policy.model(row[None].to(policy.model.device)).logits[0].cpu() / 0.7
    logits[:, policy.banned_ids] = -torch.inf
    expected = logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[start - 1 :, 0]
    found = torch.from_numpy(policy.logprobs(rollout)[2][start:])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_generator_weights_stay_fixed_during_an_update(checkpoint):
    """One-step off-policy: until `renew_generator`, texts and log-probs are those of the rollout's first policy."""
    policy = make_policy(checkpoint, max_off_policy_steps=1, old_logprobs="sampler")
    before = generate(policy)
    logprobs = logprobs_of(policy, before)
    ref_logprobs = logprobs_of(policy, before, reference=True)
    policy.model.lm_head.weight.data[20] += 5.0
    assert torch.equal(tokens_of(generate(policy)), tokens_of(before))
    assert torch.equal(logprobs_of(policy, before), logprobs)
    policy.renew_generator()
    assert not torch.equal(tokens_of(generate(policy)), tokens_of(before))
    assert not torch.equal(logprobs_of(policy, before), logprobs)
    assert torch.equal(logprobs_of(policy, before, reference=True), ref_logprobs)


def test_generation_logprobs_are_used_after_the_check(checkpoint, monkeypatch):
    policy = make_policy(checkpoint, precision="float32", temperature=0.7)
    rollout = generate(policy)
    other = generate(policy, seed=1)
    passes = []
    forward = policy.logprobs
    monkeypatch.setattr(policy, "logprobs", lambda rows: (passes.append(len(rows)), forward(rows))[1])
    np.testing.assert_allclose(padded(policy.sampled_logprobs(rollout)), padded(forward(rollout)), atol=1e-4, rtol=0)
    assert all(found is row.logprobs for found, row in zip(policy.sampled_logprobs(other), other, strict=True))
    assert passes == [len(PROMPTS)]


def test_rows_that_an_older_policy_sampled_do_not_test_generation(checkpoint):
    """A resumed run may begin with rows that an older policy sampled, which differ from forward passes."""
    policy = make_policy(checkpoint, precision="float32", max_off_policy_steps=1, old_logprobs="sampler")
    older = generate(policy)
    policy.model.lm_head.weight.data[20] += 5.0
    policy.renew_generator(1)
    assert all(found is row.logprobs for found, row in zip(policy.sampled_logprobs(older), older, strict=True))
    newer = [replace(row, logprobs=row.logprobs + row.sampled) for row in generate(policy)]
    both = [*older, *newer]
    assert torch.equal(padded(policy.sampled_logprobs(both)), padded(policy.logprobs(both))), (
        "generation's log-probs are used unchecked"
    )


@pytest.mark.device
@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 1.01), ({"precision": "bfloat16"}, 1.0)],
    ids=["wrong", "bfloat16"],
)
def test_generation_logprobs_are_recomputed_if_wrong_or_in_bfloat16(checkpoint, settings, scale):
    """bfloat16 is always recomputed: logits may agree by chance in the first rollout, which differs after a resume."""
    policy = make_policy(checkpoint, **settings)
    first = generate(policy)
    other = generate(policy, seed=1)
    found = zip(first, policy.logprobs(first), strict=True)
    first = [replace(row, logprobs=each * np.float32(scale)) for row, each in found]
    other = [replace(row, logprobs=np.ones(len(row.tokens), np.float32)) for row in other]
    for rows in (first, other):
        assert torch.equal(padded(policy.sampled_logprobs(rows)), padded(policy.logprobs(rows)))


# ---- shared prompts ----


def shared_batch():
    """Return tokens, lengths and response mask of three prompts with four responses each, in mixed order."""
    generator = torch.Generator().manual_seed(0)
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [5, 6, 7]] * 4
    sizes = [size for size in (4, 1, 6, 3) for _ in range(3)]
    tokens = torch.zeros(12, 12, dtype=torch.int64)
    inside = torch.zeros(12, 11, dtype=torch.bool)
    for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        row = [*prompt, *torch.randint(5, 60, (size,), generator=generator).tolist()]
        tokens[i, : len(row)] = torch.tensor(row)
        inside[i, len(prompt) - 1 : len(row) - 1] = True
    inside[5, 7] = False  # a gap within a response
    return tokens, (tokens > 0).sum(1), inside


def plain_hidden(body, tokens, lengths, inside):
    attention = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
    return body(input_ids=tokens, attention_mask=attention, use_cache=False)[0][:, :-1][inside]


def shared_hidden(body, *batch):
    passes = shared_passes(*batch)
    return response_hidden(body, *passes)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompt_forward_matches_plain_outputs_and_gradients(family, monkeypatch):
    monkeypatch.setattr(shared_prompts, "WORTH_IT", 10.0)
    model = make_model(family)
    results = []
    assert can_share(model)
    for function in (plain_hidden, shared_hidden):
        model.zero_grad()
        hidden = function(model.base_model, *shared_batch())
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * weights).sum().backward()
        results.append([hidden, *(p.grad.clone() for p in model.base_model.parameters() if p.grad is not None)])
    torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=1e-3)


def test_shared_hidden_forwards_each_distinct_prompt_once():
    model = make_model("llama")
    sizes = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: sizes.append(tuple(inputs[0].shape)))
    shared_hidden(model.model, *shared_batch())
    assert sizes == [(3, 5), (12, 6)]  # a prompt's last token predicts the response's first: it is in the rows
    tokens, lengths, inside = shared_batch()
    tokens[:, 0] = torch.arange(12) + 5  # prompts of their own
    assert shared_passes(tokens, lengths, inside) is None


def test_rows_without_sampled_tokens_share_no_prompts(checkpoint):
    """An environment whose `reset` fails leaves such rows, and a micro-batch may have no others."""
    policy = make_policy(checkpoint)
    row = row_of_response(Prompt("", "", np.arange(5, 15)), PolicyTurn([], ended=False, logprobs=[]))
    assert [logprobs.tolist() for logprobs in policy.logprobs([row] * 4)] == [[0.0] * 10] * 4


def test_prompt_sharing_is_off_if_the_models_cache_changes_its_outputs():
    model = make_model("llama")
    forward = model.model.forward

    def odd(*args, past_key_values=None, **kwargs):
        output = forward(*args, past_key_values=past_key_values, **kwargs)
        output.last_hidden_state = output.last_hidden_state * (1.0 if past_key_values is None else 1.01)
        return output

    model.model.forward = odd
    assert not can_share(model)
