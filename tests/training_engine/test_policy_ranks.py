"""Policy training on several ranks: it must match one process in updates, sampling and resuming."""

import asyncio
import string
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from policy_sessions import CASES, LENGTHS, PROMPTS, batch_of, begin, make, session, settings_of
from ranks import on_ranks
from run_checkpoints import TEXTS, make_tokenizer
from samples import a_sample
from settings import actor_section
from tiny_checkpoints import save_tiny
from tiny_tokenizers import make_text_tokenizer
from torch.distributed import HashStore, PrefixStore
from transformers import AutoModelForCausalLM

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import rows_of
from rlhf_triton.actor.generation.row_sources import SamplingJob
from rlhf_triton.actor.generation.slots import Decoder
from rlhf_triton.actor.policy import policy as policy_module
from rlhf_triton.actor.policy.samplers import OtherSamplers
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RankFailed, RlhfError
from rlhf_triton.models.sharded_tensors import whole
from rlhf_triton.training_engine.mailbox import as_tensor, value_of
from rlhf_triton.training_engine.ranks import ALONE, END, Ranks

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environment_classes.py"
UPDATES = 5


def gradients(policy, update):
    """The gradients of one minibatch of all rows."""
    batch = batch_of(100)
    rows = torch.arange(len(LENGTHS))
    update._gradients(batch, rows, float(batch.policy_weights.sum()), 0.1)
    found = [whole(p.grad).cpu().clone().numpy() for p in policy.model.parameters() if p.grad is not None]
    policy.trained.drop_gradients()
    return found


def trained(ranks, folder, case, dtype):
    """Return statistics, gradients and weights of five updates, and the generator's distance from the policy."""
    torch.use_deterministic_algorithms(True)
    if dtype == torch.float64:
        load = policy_module.load_model
        policy_module.load_model = lambda settings, **how: load(settings, **how).double()
    try:
        policy, update = make(settings_of(folder, case), ranks)
    finally:
        if dtype == torch.float64:
            policy_module.load_model = load
    found = {"gradients": gradients(policy, update), "stats": [], "distance": 0.0}
    tokens = batch_of(0).tokens
    lengths = batch_of(0).lengths
    for step in range(UPDATES):
        found["stats"].append(update.run(batch_of(step), seed=step, kl_coef=0.1).metrics)
        policy.renew_generator()
        everywhere = torch.ones_like(tokens[:, 1:])
        with torch.no_grad():
            ours, theirs = (
                policy.token_logprobs.compute(m, tokens, lengths, everywhere) for m in (policy.model, policy.generator)
            )
        found["distance"] = max(found["distance"], float((ours - theirs).abs().max()))
    found["weights"] = [whole(p.detach()).cpu().clone().numpy() for p in policy.model.parameters()]
    return found


def all_cases(ranks, folder, work, runs):
    """Return the results of several runs in one group of ranks, each of which calls the operations itself."""
    ranks.announce = lambda *_, **__: None
    return [work(ranks, folder, *run) for run in runs]


def give_up(*_):
    raise asyncio.CancelledError


def gives_up(ranks, folder):
    """Give up a job that rank 1 responds to slowly; return the next one's tokens, or the jobs that rank 1 answers."""
    answered = []
    lanes = []
    if isinstance(ranks, Ranks) and ranks.rank:
        follow = OtherSamplers.follow
        decode = Decoder._decode_step
        reply = OtherSamplers._reply

        def followed(samplers, *given):
            lanes.append(samplers._lane)
            follow(samplers, *given)

        def decode_after_rank_0(decoder):
            while lanes and not lanes[0].has_next():
                time.sleep(0.01)
            lanes.clear()
            decode(decoder)

        def replied(samplers, number, message):
            answered.append(number)
            reply(samplers, number, message)

        OtherSamplers.follow = followed
        Decoder._decode_step = decode_after_rank_0
        OtherSamplers._reply = replied
    policy, _ = begin(ranks, RunConfig(actor=settings_of(folder, "ppo")))
    if policy is None:
        return answered

    if isinstance(ranks, Ranks):
        policy.add(SamplingJob(dict(enumerate(PROMPTS)), give_up, 1, False))
        with pytest.raises(asyncio.CancelledError):
            policy.decode()
        policy.abandon()
    policy.renew_generator()
    return [row.tokens.tolist() for row in rows_of(policy.generate(PROMPTS, seed=2))]


def conversations(ranks, folder, name="Countdown"):
    """Return the rows of conversations with an environment, some of which fail."""
    settings = {"prompts_max_tokens": 100, "max_new_tokens": 6, "stop_strings": [*string.ascii_lowercase]}
    actor = actor_section(model=folder, **settings)
    environment = {"class": f"{ENVIRONMENTS}:{name}", "max_tokens": 200}
    policy, _ = begin(ranks, RunConfig.model_validate({"actor": actor, "environment": environment}))
    if policy is None:
        return None
    said = {"messages": [{"role": "user", "content": "Play."}]}
    prompts = [Prompt(str(i // 2), "", np.array([5]), {**said, "turns": i % 4 - 1}) for i in range(9)]
    try:
        policy.renew_generator()
        found = policy.generate(prompts, seed=3)
        rows = rows_of(found)
        known = zip(policy.sampled_logprobs(rows), rows, strict=True)
        assert all(each is row.logprobs for each, row in known), (
            "log-probs that no forward pass contradicts were replaced"
        )
    finally:
        policy.close()
    return [[value_of(as_tensor(row)) for row in conversation] for conversation in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    for name, tied in (("untied", False), ("tied", True)):
        save_tiny(root / name, "llama", "language", vocab_size=200, tie_word_embeddings=tied)
        make_tokenizer().save_pretrained(root / name)
    for name, reply in (("keeps replies", "m.content"), ("changes replies", "m.content if loop.last else '-'")):
        save_tiny(root / name, "llama", "language", vocab_size=200, max_position_embeddings=256)
        template = f"{{% for m in messages %}}{{{{ {reply} }}}}\n{{% endfor %}}"
        texts = [*TEXTS, string.printable]
        made = make_text_tokenizer("qwen2", texts, chat_template=template, model_max_length=256)
        made.save_pretrained(root / name)
    return root


def largest(ours, theirs):
    assert len(ours) == len(theirs)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


EXACT = [case for case in CASES if case != "bfloat16"]


@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, ["grpo", "lora", "tied"]), *(pytest.param(size, EXACT, marks=pytest.mark.slow) for size in (2, 4))],
    ids=["2 ranks, some cases", "2 ranks", "4 ranks"],
)
def test_policy_update_on_ranks_matches_one_process(folder, size, cases):
    runs = [(case, torch.float64) for case in cases]
    for (case, dtype), *results in zip(runs, *on_ranks(size, all_cases, folder, trained, runs), strict=True):
        one = trained(ALONE, folder, case, dtype)
        for found in results:
            assert found["stats"] == [pytest.approx(stats, rel=1e-11, abs=1e-12) for stats in one["stats"]]
            assert largest(found["gradients"], one["gradients"]) <= 1e-12
            assert found["distance"] <= 1e-12


CUSTOM_LOSS = """
def loss(inputs):
    ones = inputs.mask.new_ones(inputs.mask.shape)
    metrics = {"one": inputs.sum(ones), "thousand": inputs.sum(1000 * ones)}
    names = [*metrics][::-1] if bool((inputs.groups == 0).any()) else [*metrics]
    return inputs.mean(inputs.logprobs), {name: metrics[name] for name in names[:NUM_NAMES]}
"""


def updated_by_custom_loss(ranks, folder, spec):
    """Return the metrics of an update whose rank with the first group returns metrics in another order."""
    ranks.announce = lambda *_, **__: None
    _, update = make(settings_of(folder, "one micro-batch", minibatch_size=7, loss=spec), ranks)
    metrics = update.run(replace(batch_of(0), groups=torch.arange(7)), seed=0, kl_coef=0.0).metrics
    return metrics["train_optim/one"], metrics["train_optim/thousand"]


def test_ranks_add_the_metrics_of_a_custom_loss_by_name(folder, tmp_path):
    """A name that one rank lacks is an error on all ranks, at once."""
    specs = []
    for count in (2, 1):
        (tmp_path / f"{count}.py").write_text(CUSTOM_LOSS.replace("NUM_NAMES", str(count)))
        specs.append(f"{tmp_path / f'{count}.py'}:loss")
    assert on_ranks(2, updated_by_custom_loss, folder, specs[0]) == [pytest.approx((1.0, 1000.0))] * 2
    differing = rf"FunctionError: actor\.algorithm\.loss: {specs[1]} returns different metrics .* \(one, thousand\)"
    with pytest.raises(RuntimeError, match=rf"rank 0: {differing}.*rank 1: {differing}"):
        on_ranks(2, updated_by_custom_loss, folder, specs[1], group_timeout_s=30)


def test_other_ranks_end_the_responses_that_rank_0_gives_up(folder):
    """A run that `actor.max_minutes` ends renews the generators for its validation while they still respond."""
    tokens, answered = on_ranks(2, gives_up, folder)
    assert tokens == gives_up(ALONE, folder)
    assert {*answered} == {3}, "rank 1 answered the operation that was given up"


@pytest.mark.slow
def test_float32_update_on_ranks_is_near_one_process_and_bit_identical_when_repeated(folder):
    cases = ["ppo", "bfloat16"]
    results = on_ranks(2, all_cases, folder, trained, [(case, torch.float32) for case in cases * 2])[0]
    found = results[: len(cases)]
    again = results[len(cases) :]
    assert largest(found[0]["weights"], trained(ALONE, folder, "ppo", torch.float32)["weights"]) <= 1e-5
    for one, other in zip(found, again, strict=True):
        assert largest(one["weights"], other["weights"]) == 0
        assert one["stats"] == other["stats"]
    (first, *_) = trained(ALONE, folder, "bfloat16", torch.float32)["stats"]
    norm = "train_optim/grad_norm"
    assert found[1]["stats"][0][norm] == pytest.approx(first[norm], rel=0.02)


@pytest.mark.parametrize(
    ("size", "case"),
    [pytest.param(size, case, marks=pytest.mark.slow) for size, case in ((2, "ppo"), (2, "lora"), (4, "ppo"))],
)
def test_generation_and_resume_on_ranks_match_one_process(folder, size, case):
    """Generates the same responses, and resumes from its own checkpoint bit for bit."""
    one = session(ALONE, folder, case)
    (found, *_) = on_ranks(size, session, folder, case)
    assert found["ended"] == one["ended"] == [len(PROMPTS)] * 2
    assert largest(found["weights at the end, resumed"], found["weights at the end"]) == 0
    assert found["failure"].startswith("rank 1: the policy's logits are not finite, so no token can be sampled; check")
    for name in one:
        if name.startswith("rows"):
            assert found[name] == one[name]
        elif name != "ended":
            assert largest(found[name], one[name]) <= 1e-4, name
    written = {path.suffix for path in (folder / f"written by {size}, {case}" / "2").rglob("*") if path.is_file()}
    assert written == {".safetensors", ".json"}
    theirs = AutoModelForCausalLM.from_pretrained(folder / f"written by {size}, {case}" / "policy").state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder / f"written by 1, {case}" / "policy").state_dict()
    assert largest([t.numpy() for t in theirs.values()], [ours[name].numpy() for name in theirs]) <= 1e-4


@pytest.mark.parametrize("template", ["keeps replies", "changes replies"])
def test_conversations_on_ranks_match_one_process(folder, template):
    """One template changes replies, so that each turn begins a row."""
    one = conversations(ALONE, folder / template)
    (found, _) = on_ranks(2, conversations, folder / template)
    rows = [row for conversation in one for row in conversation]
    for ours, theirs in zip((row for conversation in found for row in conversation), rows, strict=True):
        assert ours.pop("logprobs") == pytest.approx(theirs.pop("logprobs"), abs=1e-4)
        assert ours == theirs
    assert {bool(row["error"]) for row in rows} == {False, True}
    is_one = template != "changes replies"
    assert max(len(row["turns"]) for row in rows) == 1 + is_one
    assert (len(rows) == len(one)) == is_one


def after_an_abandoned_rollout(ranks, folder):
    policy, _ = begin(ranks, RunConfig(actor=settings_of(folder, "ppo", generation_batch_size=2)))
    if policy is None:
        return None
    policy.renew_generator()
    if isinstance(ranks, Ranks):
        with pytest.raises(asyncio.CancelledError):
            policy.generate([Prompt(str(i), "", np.asarray([20 + i])) for i in range(16)], seed=1, finished=give_up)
    rows = rows_of(policy.generate([Prompt(str(i), "", np.asarray([5, 6, 7 + i])) for i in range(16)], seed=2))
    return [row.tokens.tolist() for row in rows]


def test_cancelled_rollout_on_ranks_leaves_no_row_to_the_next(folder):
    assert on_ranks(2, after_an_abandoned_rollout, folder)[0] == after_an_abandoned_rollout(ALONE, folder)


def test_other_ranks_error_fails_only_the_operation_in_which_it_occurred():
    """Rank 0 may have given that operation up by then."""
    store = HashStore()
    first, second = (
        OtherSamplers(SimpleNamespace(rank=rank, size=2, connection=lambda name: PrefixStore(name, store)))
        for rank in range(2)
    )
    rows = [a_sample([5, 6, 7]), a_sample([5, 6])]
    errors = [RlhfError("no memory"), None, OSError("no file")]

    def fails(*_, **__):
        raise asyncio.CancelledError

    def zeros(part, **_):
        return [np.zeros(len(row.tokens), np.float32) for row in part]

    def zeros_or_error(part, **_):
        error = errors.pop(0)
        if error is not None:
            raise error
        return zeros(part)

    thread = threading.Thread(target=second.follow, args=(None, zeros_or_error))
    thread.start()
    try:
        with pytest.raises(asyncio.CancelledError):
            first.logprobs(fails, rows, reference=False)
        assert [len(each) for each in first.logprobs(zeros, rows, reference=False)] == [3, 2]
        with pytest.raises(RankFailed, match="rank 1: no file"):
            first.logprobs(zeros, rows, reference=False)
    finally:
        first._lane.announce(END)
        thread.join()


def test_all_ranks_fail_if_one_cannot_start_its_environment(folder):
    with pytest.raises(RuntimeError, match=r"rank 0: RankFailed: rank 1: environment.class .*: ValueError: no place"):
        on_ranks(2, conversations, folder / "keeps replies", "Unplaced")
