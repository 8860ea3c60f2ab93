"""`critic.pretrain`: the critic is trained before version 0, once and bit-identically, or refused with one sentence."""

import codecs
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from critic_training import payload
from safetensors.torch import load_file
from settings import nested
from sidecar_rig import Killed, Rig, kill_at
from tiny_checkpoints import save_tiny
from tiny_tokenizers import POSITIONS, VOCAB, make_text_tokenizer, save_chat_policy
from versions import flip, reseal, tensor_types

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import CriticSection, TrainerSection
from rlhf_triton.errors import RlhfError
from rlhf_triton.models.modeling import load_critic, quiet_transformers
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.critic_update import CriticUpdate, TrainingRow, split_rows
from rlhf_triton.trainer.pretraining import explained_by, pretrained
from rlhf_triton.trainer.publish import initialise_store, initialise_stores
from rlhf_triton.trainer.training_set import packed, read_rows, rows_of_file, split
from rlhf_triton.wire.contract import Limits

STEPS = 6  # steps of an earlier run, 32 rows each
TRAINING = {
    "lr": 1e-2,
    "warmup_steps": 0,
    "max_steps": 100,
    "global_batch_size": 8,
}
LIMITS = Limits(VOCAB, POSITIONS)
quiet_transformers()


def save_critic_of(folder, family="llama"):
    """Save a Llama critic with a tokenizer of this family."""
    save_tiny(folder, "llama", "critic", vocab_size=VOCAB, max_position_embeddings=POSITIONS)
    make_text_tokenizer(family).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with `critic` and two runs with journals: `a`, and `b` with other old values."""
    root = tmp_path_factory.mktemp("pretraining")
    save_critic_of(root / "critic")
    earlier_run(root / "a", root / "critic")
    earlier_run(root / "b", root / "critic", change=lambda step: replace(step, prev_values=step.prev_values + 7))
    return root


def earlier_run(folder, critic, change=lambda step: step):
    """Write version 0 and the journal of a run: the return of a token is 1 if it is even, else 0."""
    initialise_store(WeightsStore(folder / "weights" / "critic"), CriticSection(model=critic), run_id="earlier")
    journal = Journal(folder / "journal", "earlier")
    for step in range(1, STEPS + 1):
        journal.accept_training(change(payload(32, seed=step)), run_id="earlier", step=step)
    return journal


def config_of(folder, critic, pretrain, **trainer):
    return RunConfig.model_validate(
        {
            "run": {"dir": folder, "run_id": "run"},
            "critic": {"model": critic, "pretrain": list(map(str, pretrain))},
            "trainer": nested(TrainerSection, {**TRAINING, **trainer}),
            "server": {"grpc_port": 1},
        }
    )


def version(config, number=0):
    tensors = load_file(WeightsStore(config.run.weights_dir).folder(number) / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def lines_of(config):
    return read_jsonl(config.run.dir / "critic_metrics.jsonl")


# ---- what is trained ----


@pytest.mark.device
def test_pretraining_fits_the_returns_of_an_earlier_run(root, tmp_path):
    config, again, other = (
        config_of(tmp_path / name, root / "critic", [root / run])
        for name, run in (("one", "a"), ("two", "a"), ("three", "b"))
    )
    for each in (config, again, other):
        initialise_stores(each)
    store = WeightsStore(config.run.weights_dir)
    assert (store.current(), store.versions()) == (0, [0])
    assert (store.manifest(0).made_from or {})["critic.pretrain"] == [str(root / "a")]
    assert tensor_types(store.folder(0)) == tensor_types(root / "a" / "weights" / "critic" / "0")
    assert torch.equal(version(config), version(again)), "the same files give other weights"
    assert torch.equal(version(config), version(other)), "the old values of another critic change the result"
    (line,) = lines_of(config)
    assert (line["step"], line["weights_version"]) == (0, 0)
    training, held_out = split(read_rows(config, LIMITS), config.run.seed)
    assert (line["pretrain/rows"], line["pretrain/held_out_rows"]) == (len(training), len(held_out))
    assert line["pretrain/optimizer_steps"] == 3 * -(-len(training) // TRAINING["global_batch_size"])
    for folder, key in ((root / "critic", "explained_variance_before"), (store.folder(0), "explained_variance")):
        assert line[f"pretrain/{key}"] == pytest.approx(explained_by(load_critic(folder), held_out, 64), abs=1e-4)
    assert line["pretrain/explained_variance_before"] < 0.05
    assert line["pretrain/explained_variance"] > 0.5


def test_pretraining_ignores_ppo_settings(root, tmp_path):
    """Value clip and epochs have no effect; LoRA and frozen weights do."""
    given = [root / "a"]
    plain = config_of(tmp_path / "plain", root / "critic", given)
    clipped = config_of(tmp_path / "clipped", root / "critic", given, clip_value=0.01, epochs=3)
    lora = config_of(
        tmp_path / "lora", root / "critic", given, lora_rank=2, publish_format="adapter", freeze=["score", "mlp"]
    )
    for each in (plain, clipped, lora):
        initialise_stores(each)
    assert torch.equal(version(plain), version(clipped))
    manifest = WeightsStore(lora.run.weights_dir).manifest(0)
    types = tensor_types(lora.run.weights_dir / "0")
    assert (manifest.base, {dtype for dtype, _ in types.values()}) == (None, {"F32"})
    start, after = (
        load_file(folder / "model.safetensors")
        for folder in (root / "a" / "weights" / "critic" / "0", lora.run.weights_dir / "0")
    )
    assert {name for name in start if not torch.equal(start[name], after[name])} == {
        name for name in start if "self_attn" in name
    }


def test_split_holds_out_a_tenth_of_the_prompts():
    def row(prompt, response):
        tokens = np.array([*prompt, response, 9])
        mask = np.array([0.0] * (len(prompt) - 1) + [0.5, 1.0], np.float32)
        return TrainingRow(tokens, mask, mask, mask)

    rows = [row([7] * (number % 20 + 1), response=number) for number in range(60)]  # 20 prompts, 3 responses each
    training, held_out = split(rows, seed=1)
    prompts = [{each.tokens.size for each in side} for side in (training, held_out)]
    assert (len(training), len(held_out), len(prompts[1])) == (54, 6, 2)
    assert not prompts[0] & prompts[1]
    assert prompts[1] != {each.tokens.size for each in split(rows, seed=2)[1]}
    assert [len(side) for side in split(rows[:3], seed=0)] == [2, 1]
    unpacked = list(split_rows(packed(rows[:3])))
    assert [each.tokens.tolist() for each in unpacked] == [each.tokens.tolist() for each in rows[:3]]
    assert not any(each.prev_values.any() for each in unpacked)


def test_pretraining_explained_variance_matches_hand_computed_values():
    class Values:
        def values(self, rows):
            return [np.arange(row.size, dtype=np.float32) for row in rows]

    def row(*returns):
        mask = np.array([0, 1, 1], np.float32)
        return TrainingRow(np.zeros(4, np.int64), np.array([99, *returns], np.float32), mask, mask)

    # Values are 1 and 2; errors are 0, 0, 1, -1, so that 1 - 0.5 / 0.5 = 0.
    assert explained_by(Values(), [row(1, 2), row(2, 1)], 100) == pytest.approx(1 - 0.5 / 0.25)
    assert explained_by(Values(), [row(1, 2), row(3, 4)], 4) == pytest.approx(1 - 1 / 1.25)
    assert explained_by(Values(), [row(3, 3)], 4) == 0


# ---- exactly once ----


def pretraining_rig(folder, root, **settings):
    rig = Rig(folder, root / "critic", **{**TRAINING, **settings})
    rig.config = config_of(folder, root / "critic", [root / "a"], **{**TRAINING, **settings})
    return rig


def two_steps_and_a_rewind(rig):
    """Train two steps, rewind them and stop; return their losses, and the weights of versions 0 and 2."""
    rig.begin()
    try:
        losses = [rig.answer(rig.send(step)).loss_mean for step in (1, 2)]
        rig.rewind(0)
        assert torch.equal(rig.weights(), version(rig.config))
    finally:
        rig.close()
    return losses, version(rig.config), version(rig.config, 2)


@pytest.fixture(scope="module")
def calm(root, tmp_path_factory):
    """Return the results of a run with undisturbed pretraining."""
    rig = pretraining_rig(tmp_path_factory.mktemp("calm"), root, publish={"keep": 100})
    initialise_stores(rig.config)
    return two_steps_and_a_rewind(rig)


@pytest.mark.parametrize(
    ("owner", "name", "when", "call"),
    [
        (CriticUpdate, "train", "after", 5),
        (WeightsStore, "add", "before", 1),
        (WeightsStore, "add", "after", 1),
        (WeightsStore, "set_current", "before", 1),
        (CheckpointFolder, "steps", "before", 1),
    ],
)
def test_pretraining_after_a_crash_is_bit_identical(root, tmp_path, monkeypatch, calm, owner, name, when, call):
    """Pretraining is repeated until version 0 is written, and not after that."""
    rig = pretraining_rig(tmp_path, root, publish={"keep": 100})
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, when, call=call)
        assert isinstance(rig.start().ended(), Killed)
    written = rig.store.versions() == [0]
    assert written == ((name, when) not in (("train", "after"), ("add", "before")))
    trained = []
    monkeypatch.setattr("rlhf_triton.trainer.publish.pretrained", counted(trained))
    losses, first, last = two_steps_and_a_rewind(rig)
    assert losses == calm[0]
    assert trained == ([] if written else ["run"])
    assert torch.equal(first, calm[1])
    assert torch.equal(last, calm[2])


def counted(calls):
    def count(*args, **kwargs):
        calls.append("run")
        return pretrained(*args, **kwargs)

    return count


def test_changed_critic_or_its_settings_are_refused_after_version_0(root, tmp_path):
    initialise_stores(config_of(tmp_path, root / "critic", []))
    shutil.copytree(root / "critic", tmp_path / "other")
    initialise_stores(config_of(tmp_path, tmp_path / "other", []))  # the same model at another place
    config = config_of(tmp_path, root / "critic", [])
    critic = config.critic.model_copy(update={"standardization": "off"})
    with pytest.raises(CheckpointError, match=r"critic\.standardization is off, but was model when version 0"):
        initialise_stores(config.model_copy(update={"critic": critic}))
    with pytest.raises(CheckpointError, match=r"critic\.pretrain is .*, but was \[\] when version 0 in .* was made"):
        initialise_stores(config_of(tmp_path, root / "critic", [root / "a"]))
    edit = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**edit, "reward_standardization": {"mean": 1}}))
    with pytest.raises(CheckpointError, match=r"critic\.model is .*other, but was another model when"):
        initialise_stores(config_of(tmp_path, tmp_path / "other", []))


def test_store_of_release_0_1_0_knows_its_critic(root, tmp_path):
    config = config_of(tmp_path, root / "critic", [])
    initialise_stores(config)
    store = WeightsStore(config.run.weights_dir)
    made_from = store.manifest(0).made_from
    made_from["critic.model"][0] = made_from["critic.model"][0].partition(".")[0]
    reseal(store.folder(0), made_from=made_from)
    initialise_stores(config)
    made_from["critic.model"][0] = "other weights"
    reseal(store.folder(0), made_from=made_from)
    with pytest.raises(CheckpointError, match=r"critic\.model is .*critic, but was another model when"):
        initialise_stores(config)


def test_pretraining_reads_the_journal_of_a_real_sidecar(root, tmp_path, monkeypatch):
    """The journal ends with a critic_save, after which the run itself needs no entry; failed steps are left out."""
    monkeypatch.setattr("rlhf_triton.trainer.critic_checkpoints.ARCHIVE_ENTRIES", 3)
    rig = Rig(tmp_path / "earlier", root / "critic", **TRAINING)
    rig.begin()
    damaged = rig.send(1)
    rig.answer(damaged)
    for step in range(2, 7):
        rig.answer(rig.journal.accept_training(payload(32, seed=step), run_id="run", step=step))
    config = config_of(tmp_path / "next", root / "critic", [tmp_path / "earlier"])
    with pytest.raises(RlhfError, match="is in training; stop it first"):
        initialise_stores(config)
    rig.save()
    rig.stop()
    assert rig.journal.entries() == []
    assert [path.name for path in rig.journal.training_files()] == [f"{step:08d}.train" for step in (4, 5, 6)]
    initialise_stores(config)
    (line,) = lines_of(config)
    assert line["pretrain/explained_variance"] > 0.3
    rig.close()


# ---- what is refused ----


def no_run(folder):
    shutil.rmtree(folder / "weights")


def flipped(folder):
    flip(folder / "journal" / "earlier" / "entries" / "00000003.train")


def empty(folder):
    shutil.rmtree(folder / "journal")


def without_tokenizer(folder):
    reseal(folder / "weights" / "critic" / "0", tokenizer=None)


SPOILED = {
    no_run: r"is not the folder of a run with a critic: version 0 is not in the weights store; remove it",
    flipped: r"00000003\.train is damaged: its content has digest .*; restore the file, or remove .* from the list",
    empty: r"has no rows to train on \(a run keeps only its last steps\)",
    without_tokenizer: r"the tokenizer of .*spoiled differs from .*critic's or is unknown",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_pretraining_refuses_a_damaged_or_foreign_run_and_writes_nothing(root, tmp_path, spoil):
    shutil.copytree(root / "a", tmp_path / "spoiled")
    spoil(tmp_path / "spoiled")
    assert_refused(config_of(tmp_path / "run", root / "critic", [root / "b", tmp_path / "spoiled"]), SPOILED[spoil])


def test_pretraining_refuses_a_critic_that_does_not_fit_the_rows(root, tmp_path):
    save_critic_of(tmp_path / "other tokenizer", "qwen2")
    save_tiny(tmp_path / "no tokenizer", "llama", "critic", vocab_size=VOCAB, max_position_embeddings=POSITIONS)
    save_tiny(tmp_path / "few positions", "llama", "critic", vocab_size=VOCAB, max_position_embeddings=9)
    make_text_tokenizer("llama").save_pretrained(tmp_path / "few positions")
    messages = {
        "other tokenizer": "the tokenizer of .*a differs from .*other tokenizer's or is unknown",
        "no tokenizer": "the tokenizer of .*a differs from .*no tokenizer's or is unknown",
        "few positions": r"00000001\.train does not fit .*few positions: tokens\[\d+\]: \d+ tokens, .* 9 positions",
    }
    for name, message in messages.items():
        assert_refused(config_of(tmp_path / f"run {name}", tmp_path / name, [root / "a"]), message)


def assert_refused(config, message):
    with pytest.raises(RlhfError, match=rf"^critic\.pretrain: .*{message}") as refused:
        initialise_stores(config)
    assert "\n" not in str(refused.value)
    assert WeightsStore(config.run.weights_dir).versions() == []
    assert not (config.run.dir / "critic_metrics.jsonl").exists()


# ---- files of responses and returns ----

MESSAGES = [{"role": "user", "content": "good day"}]


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_pretraining_file_rows_are_tokenised_like_the_actors(root, tmp_path):
    """BOS before a text, none before a chat; EOS after a text response; a return for each token of the response."""
    tokenizer = make_text_tokenizer("llama")
    hello, reply = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello", "a good film"))
    file = write(
        tmp_path / "data.jsonl",
        {"prompt": "hello", "response": "a good film", "return": 2},
        {"prompt": MESSAGES, "response": "a good film</s>", "return": -0.5, "more": None},
        "",
        {"prompt": [5, 6, 7], "response": [8, 9], "return": 1.5},
    )
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())  # as some editors save it
    rows = read_rows(config_of(tmp_path / "run", root / "critic", [file]), LIMITS)
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompts = [
        [tokenizer.bos_token_id, *hello],
        tokenizer(chat, add_special_tokens=False)["input_ids"],
        [5, 6, 7],
    ]
    responses = [[*reply, tokenizer.eos_token_id]] * 2 + [[8, 9]]
    for row, prompt, response, target in zip(rows, prompts, responses, (2, -0.5, 1.5), strict=True):
        assert row.tokens.tolist() == [*prompt, *response]
        assert row.mask.tolist() == [0] * (len(prompt) - 1) + [1] * len(response)
        assert row.returns.tolist() == [0] * (len(prompt) - 1) + [target] * len(response)
    bare = config_of(tmp_path / "run", root / "critic", [file])
    actor = bare.actor.model_copy(
        update={"prompts": bare.actor.prompts.model_copy(update={"add_special_tokens": False})}
    )
    assert read_rows(bare.model_copy(update={"actor": actor}), LIMITS)[0].tokens.tolist() == [*hello, *responses[0]]


@pytest.mark.parametrize(
    ("prompt", "end"), [("hello", "<|endoftext|>"), (MESSAGES, "<|im_end|>"), ([5, 6], "<|endoftext|>")]
)
def test_pretraining_chat_response_ends_with_the_templates_end_token(tmp_path, prompt, end):
    tokenizer = save_chat_policy(tmp_path / "critic", eos_token="<|endoftext|>")
    file = write(tmp_path / "data.jsonl", {"prompt": prompt, "response": "a good film", "return": 2})
    [(_, payload)] = rows_of_file(file, tmp_path / "critic", special=True)
    assert tokenizer.decode(payload.tokens).endswith(f"a good film{end}")


def test_pretraining_runs_from_the_last_rows_to_the_first(root, tmp_path):
    """A policy's first responses resemble those of a new run; later ones have other returns."""
    rows = [{"prompt": [5, row % 9 + 6], "response": [7], "return": int(row >= 200)} for row in range(400)]
    config = config_of(tmp_path / "run", root / "critic", [write(tmp_path / "data.jsonl", *rows)], lr=0.05)
    initialise_stores(config)
    critic = load_critic(WeightsStore(config.run.weights_dir).folder(0))
    values = np.array([values[1] for values in critic.values([np.array([5, prompt + 6]) for prompt in range(9)])])
    assert values.mean() < 0.25  # shuffled: 0.5


LINE = {"prompt": [5, 6], "response": [7], "return": 1}
BAD_LINES = {
    "line 2 is not JSON in UTF-8": "{",
    "line 2 is not an object with `prompt` and `response` and `return`": "[1]",
    r"line 2 must have a prompt \(text, messages or token ids\), .* got {\"prompt\": \[\]": {**LINE, "prompt": []},
    "line 2 must have .* a response": {**LINE, "response": [7, "x"]},
    "line 2 must have .*a return .a finite number.*Infinity": {**LINE, "return": float("inf")},
    "line 2 must have .*a return": {**LINE, "return": 10**400},
    "line 2 must have .*a return .a finite number.*true": {**LINE, "return": True},
    r"line 2 does not fit .*critic: tokens\[0, 0\]: 999": {**LINE, "prompt": [999]},
    "line 2 does not fit .*critic: .* 100 tokens": {**LINE, "response": [7] * 98},
    "line 2: prompt is a text that contains messages; store": {**LINE, "prompt": str([{"role": "user"}])},
    "line 2: prompt ends with the assistant's answer": {
        **LINE,
        "prompt": [*MESSAGES, {"role": "assistant", "content": "a"}],
    },
    r"line 2: prompt\[0\]: the role 'human' is neither one of": {**LINE, "prompt": [{"role": "human", "content": "a"}]},
}


@pytest.mark.parametrize("message", BAD_LINES)
def test_pretraining_file_errors_name_the_line(root, tmp_path, message):
    file = write(tmp_path / "data.jsonl", LINE, BAD_LINES[message])
    assert_refused(config_of(tmp_path / "run", root / "critic", [file]), message)


def test_unusable_pretraining_file_is_refused_by_name(root, tmp_path):
    for name, lines, message in (
        ("missing", None, r"missing cannot be read: .* No such file"),
        ("empty", [], "empty has no rows to train on"),
        ("same", [LINE, {**LINE, "response": [8]}], "all rows have the same prompt, but one prompt must be held out"),
    ):
        file = tmp_path / name if lines is None else write(tmp_path / name, *lines)
        assert_refused(config_of(tmp_path / "run", root / "critic", [file]), message)


def test_diverging_returns_end_pretraining_with_an_error(root, tmp_path):
    lines = [{**LINE, "prompt": [5, 6 + number], "return": 1e30} for number in range(9)]
    config = config_of(tmp_path / "run", root / "critic", [write(tmp_path / "data.jsonl", *lines)])
    assert_refused(config, r"the critic's gradients are not finite: .*; lower trainer\.optimizer\.lr")
