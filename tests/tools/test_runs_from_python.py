"""Files that `rlhf_triton.train`, `serve` and `Run` write and read, without the processes that they start."""

import contextlib
import enum
import functools
import itertools
import linecache
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import yaml
from messages import user
from recorded_run import RecordedRun
from synthetic_run import write_run

import rlhf_triton as rt
from rlhf_triton.config.loading import load_config
from rlhf_triton.errors import FunctionError
from rlhf_triton.rewards.function import load_function
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.run_lock import only_run, only_server, only_start, write_phase
from rlhf_triton.tools.api import runs
from rlhf_triton.tools.api.functions import function_spec
from rlhf_triton.tools.api.live_line import LiveLine
from rlhf_triton.tools.api.sections import new_folder

GROUPS = {"actor.algorithm.responses_per_prompt": 4}
CELLS = itertools.count()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Record how runs would be started, in the working directory `tmp_path`."""
    calls = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(rt.Run, "_start", lambda self, **given: calls.append(given))
    return calls


def cell(source, **known):
    """Execute a cell of a notebook; return what it defines."""
    name = f"<cell {next(CELLS)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    defined = {"__name__": "__main__", **known}
    exec(compile(source, name, "exec"), defined)
    return defined


# ---- the YAML of a run ----


def test_train_writes_the_yaml_that_it_runs(started, tmp_path):
    verdict = cell("def Verdict(sample):\n    return 1.0\n")["Verdict"]
    run = rt.train(
        "policy",
        prompts=["It is", [user("Hi")], {"prompt": "2 + 3 =", "answer": "5"}],
        reward=[verdict, ("models/reward", 0.5), ("rewards.py:verdict", 2)],
        algorithm={"name": "dapo", "clip_ratio": 0.1},
        steps=np.int64(7),
        validation=tmp_path / "held_out.jsonl",
        wait=False,
        **{
            "actor.optimizer.lr": 1e-5,
            "rewards.verdict.timeout_s": 1.5,
            "actor.generation": {"top_p": np.float64(0.9)},
        },
    )
    assert started == [{"wait": False}]
    assert run.path == tmp_path / "runs" / "train-1"
    written = yaml.safe_load(run.config_path.read_text())
    assert written == {
        "run": {"dir": str(run.path)},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "reward": {"model": str(tmp_path / "models" / "reward")},
        "rewards": {
            "verdict": {
                "function": f"{run.path}/functions/Verdict_function.py:Verdict",
                "weight": 1.0,
                "timeout_s": 1.5,
            },
            "model": {"weight": 0.5},
            "verdict_2": {"function": f"{tmp_path}/rewards.py:verdict", "weight": 2.0},
        },
        "actor": {
            "policy": {"model": str(tmp_path / "policy")},
            "prompts": {"path": str(run.path / "prompts.jsonl")},
            "validation": {"prompts": str(tmp_path / "held_out.jsonl")},
            "algorithm": {"name": "dapo", "clip_ratio": 0.1, "responses_per_prompt": 8},
            "steps": 7,
            "optimizer": {"lr": 1e-5},
            "generation": {"top_p": 0.9},
        },
    }
    assert load_config(run.config_path).actor.optimizer.lr == 1e-5
    rows = read_jsonl(run.path / "prompts.jsonl")
    assert rows == [{"text": "It is"}, {"messages": [user("Hi")]}, {"prompt": "2 + 3 =", "answer": "5"}]
    assert rt.train("policy", prompts="p.jsonl", reward="models/reward", **GROUPS).path.name == "train-2"


def test_a_function_with_the_name_of_another_metric_counts_under_a_name_of_its_own(started):
    run = rt.train("policy", prompts="p.jsonl", reward=["r.py:version", "r.py:is_missing"], **GROUPS)
    assert [*load_config(run.config_path).functions] == ["version_2", "is_missing_2"]


def test_a_critic_starts_from_the_policy_unless_another_model_is_given(started, tmp_path):
    for critic, expected in ((None, "policy"), ("critic", "critic")):
        run = rt.train("policy", prompts="p.jsonl", reward="reward", algorithm="sao", critic=critic)
        config = load_config(run.config_path)
        assert (config.critic.model, config.rewards) == (tmp_path / expected, None)


def test_settings_may_repeat_an_argument_or_name_the_algorithm(started, tmp_path):
    run = rt.train(
        "policy", prompts="p.jsonl", reward=("reward", np.float32(2)), steps=5, **{"actor.steps": np.int64(5)}
    )
    assert load_config(run.config_path).actor.algorithm.name == "grpo"
    run = rt.train(
        "policy", prompts=[{"prompt": "a", "n": np.int64(1)}], reward="reward", **{"actor.algorithm.name": "sao"}
    )
    assert load_config(run.config_path).actor.algorithm.name == "sao"
    assert read_jsonl(run.path / "prompts.jsonl") == [{"prompt": "a", "n": 1}]
    run = rt.train("policy", prompts="p.jsonl", reward="reward", algorithm={"clip_ratio": 0.1})
    assert load_config(run.config_path).actor.algorithm.name == "grpo", "settings without a name are of another one"


def test_texts_that_look_like_numbers_and_enums_are_written_as_texts(started):
    class Form(str, enum.Enum):
        TEXT = "089"

    texts = ["1e5", "12e4", "1.5e3", "089", "1_0", "0b1", "1:30", "é: #"]
    settings = {"run.run_id": Form.TEXT, "rewards.verdict.options": {"texts": texts, "numbers": [1e5, 1e-6, 7, True]}}
    config = load_config(rt.train("policy", prompts="p.jsonl", reward="rewards.py:verdict", **settings).config_path)
    assert config.run.run_id == "089"
    assert config.functions["verdict"].options == settings["rewards.verdict.options"]


def test_a_loss_may_be_given_as_a_function(started):
    loss = cell("def flat(inputs):\n    return 0 * inputs.ratio\n")["flat"]
    run = rt.train("policy", prompts="p.jsonl", reward="reward", algorithm={"name": "grpo", "loss": loss})
    assert load_config(run.config_path).actor.algorithm.loss == f"{run.path}/functions/flat_function.py:flat"
    assert (run.path / "functions" / "flat_function.py").is_file()


def test_a_data_set_is_written_as_parquet(started):
    class Dataset:
        def to_parquet(self, path):
            Path(path).write_text("rows")

    class Mixed:
        def to_parquet(self, path):
            raise TypeError("Expected bytes, got a 'int' object")

    with pytest.raises(rt.RlhfError, match=r"^prompts: Expected bytes, got a 'int' object; give rows that Parquet can"):
        rt.train("policy", prompts=Mixed(), reward="reward")

    class Transformed(Dataset, list[str]):
        format = {"type": "custom"}  # noqa: RUF012 -- as of `with_transform`, which its Parquet would lack

    run = rt.train("policy", prompts=Transformed(["a"]), reward="reward")
    assert load_config(run.config_path).actor.prompts.path.suffix == ".jsonl"
    run = rt.train("policy", prompts=Dataset(), reward="reward")
    assert load_config(run.config_path).actor.prompts.path == run.path / "prompts.parquet"
    assert (run.path / "prompts.parquet").read_text() == "rows"


def test_models_of_the_hub_are_downloaded(started, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / "hub" / name))
    run = rt.train("org/model", prompts="p.jsonl", reward="models/here")
    config = load_config(run.config_path)
    assert config.actor.policy.model == tmp_path / "hub" / "org" / "model"
    assert config.reward.model == tmp_path / "models" / "here", "a folder is taken for a name on the hub"

    def unreachable(name, **_):
        raise OSError("no such host") from ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(rt.RlhfError, match=r"actor.policy.model: org/model is no folder here, and cannot .*not known;"):
        rt.train("org/model", prompts="p.jsonl", reward="models/here")


CLOSURE = "def outer():\n    limit = 3\n    def inner(sample):\n        return limit\n    return inner\nf = outer()\n"
REFUSALS = [
    ({"prompts": None}, "^prompts: give texts, chats, dictionaries, a data set or a file"),
    ({"reward": None}, "^reward: give a function, the folder of a reward model, or a list of these"),
    ({"policy": object()}, "actor.policy.model: object, must be the folder of a model; `save_pretrained"),
    ({"prompts": [1]}, r"prompts\[0\]: 1, must be a text, the messages of a chat, or a dictionary"),
    ({"prompts": ["a", {"x": {1}}]}, r"prompts\[1\]: set cannot be sent as JSON"),
    ({"prompts": ["a\ud800"]}, r"prompts\[0\]: .*surrogates not allowed"),
    ({"steps": 6, "actor": {"steps": 5}}, "^actor.steps: 6 and 5 are given; give one of them"),
    (
        {"prompts": "p.jsonl", "actor.prompts.path": "q.jsonl"},
        "^actor.prompts.path: '/.*p.jsonl' and 'q.jsonl' are given",
    ),
    ({"algorithm": "sao", "actor.algorithm.name": "ppo"}, "^actor.algorithm.name: 'sao' and 'ppo' are given"),
    ({"run": {"dir": "elsewhere"}}, "^run.dir: '/.*train-1' and 'elsewhere' are given"),
    ({"reward": functools.partial(print, 1)}, "reward: partial is a partial, which cannot be written into the run's"),
    ({"prompts": []}, "prompts: there are no prompts; give texts"),
    (
        {"prompts": {"train": []}},
        "prompts: a dictionary with the splits train; give one of them, such as prompts.'train'.",
    ),
    ({"validation": 3}, "validation: 3, must be texts, chats"),
    ({"reward": ["a", "b"]}, "reward: .*/a and b are two models, but a server has one reward model"),
    ({"reward": [("a", "b")]}, "reward: the weight of 'a' is 'b', must be a number"),
    ({"reward": lambda sample: 1.0}, "reward: <lambda> is a lambda, which has no name; write it as a function"),
    ({"reward": cell(CLOSURE)["f"]}, "reward: inner uses 'limit' of the function around it, which the processes of"),
    ({"reward": "x.py:f", "learning_rate": 1e-4}, "unknown key learning_rate; did you mean actor.optimizer.lr?"),
    ({"algorithm": "grppo"}, "actor.algorithm.name: .* did you mean grpo"),
    ({"algorithm": 3}, "actor.algorithm is a section, not a value"),
    ({"actor.steps": object()}, "actor.steps: <object object at .* cannot be written into a YAML; give numbers"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSALS)
def test_a_wrong_argument_is_one_sentence_and_leaves_nothing(started, tmp_path, given, sentence):
    with pytest.raises(rt.RlhfError, match=sentence):
        rt.train(**{"policy": "policy", "prompts": ["a"], "reward": "reward", **given})
    assert not started
    assert not [*(tmp_path / "runs").iterdir()]


def test_the_folder_of_a_run_that_failed_after_its_checks_stays(started, monkeypatch):
    def fail(run, **_):
        write_phase(run.path, "training")
        raise rt.RlhfError("the disk is full")

    monkeypatch.setattr(rt.Run, "_start", fail)
    with pytest.raises(rt.RlhfError, match="the disk is full"):
        rt.train("policy", prompts="p.jsonl", reward="reward", dir="mine")
    assert rt.Run("mine").config_path.is_file()


def test_a_second_run_in_a_folder_changes_nothing_of_the_first(started, tmp_path):
    first = rt.train("policy", prompts="p.jsonl", reward="reward", dir="mine")
    before = first.config_path.read_text()
    with only_run(first.path):
        for again in (lambda: rt.train("other", prompts="p.jsonl", reward="reward", dir="mine"), first.resume):
            with pytest.raises(rt.RlhfError, match=r"another `rlhf-triton run` is running in .*mine \(process"):
                again()
        assert first.config_path.read_text() == before
    with only_server(tmp_path / "served"), pytest.raises(rt.RlhfError, match=r"another server is running in .*served"):
        rt.serve("reward", dir="served")
    Path("p.jsonl").touch()
    with pytest.raises(rt.RlhfError, match=r"dir: .*p.jsonl: File exists; name another folder"):
        rt.train("policy", prompts="p.jsonl", reward="reward", dir="p.jsonl")


def test_folder_stays_reserved_until_the_command_of_its_run_holds_it(started, monkeypatch):
    def begin(policy="policy"):
        return rt.train(policy, prompts="p.jsonl", reward="reward", dir="mine")

    def start(run, **_):
        before = run.config_path.read_text()
        for again in (lambda: begin("other"), run.resume):
            with pytest.raises(rt.RlhfError, match=r"another `rlhf_triton.train` is running in .*mine \(process"):
                again()
        assert run.config_path.read_text() == before

    monkeypatch.setattr(rt.Run, "_start", start)
    begin()
    begin()  # which has ended


def test_a_folder_in_which_another_run_starts_is_not_removed(tmp_path):
    with contextlib.ExitStack() as stack:

        def begin():
            with new_folder(tmp_path / "mine", "train") as folder:
                stack.enter_context(only_start(folder))
                raise rt.RlhfError("the other was faster")

        with pytest.raises(rt.RlhfError, match="the other was faster"):
            begin()
        assert (tmp_path / "mine").is_dir()


def test_resume_may_change_settings(started):
    run = rt.train("policy", prompts="p.jsonl", reward="reward", steps=5)
    assert run.resume(wait=False, accept_changes=True, **{"actor.steps": 9}) is run
    assert load_config(run.config_path).actor.steps == 9
    assert started[1] == {"wait": False, "arguments": ["--accept-changes"]}
    with pytest.raises(rt.RlhfError, match=r"run.yaml: actor.steps: .*greater than or equal to 1"):
        run.resume(**{"actor.steps": 0})
    assert load_config(run.config_path).actor.steps == 9


# ---- functions by value ----

NOTEBOOK = '''\
import collections
import importlib.util
import math as m
import re
from functools import lru_cache
from rlhf_triton import Sample as S

WORDS = ("the", "a")
NUMBER = re.compile(r"-?\\d+", re.IGNORECASE)
LIMITS = {"low": -1.5, "names": [True, None]}


@lru_cache
def count(text):
    """Count, or call itself."""
    return count("the") if not text else sum(word in WORDS for word in text.split())


def unused(sample):
    return undefined


aliased = count


def reward(sample: S, *, low=LIMITS["low"]) -> S:
    found = importlib.util.find_spec("json") and NUMBER.findall(sample.text)
    total = collections.Counter(found)["7"]
    return low + m.floor(total) + aliased(sample.text) + max([0 for _ in WORDS])
'''


def test_a_function_of_a_notebook_is_written_with_its_dependencies(tmp_path):
    files = {}
    spec = function_spec(cell(NOTEBOOK)["reward"], tmp_path, files)
    ((path, text),) = files.items()
    assert spec == f"{path}:reward"
    assert path.parent == tmp_path
    assert "unused" not in text
    path.write_text(text)
    code = f"import runpy; f = runpy.run_path({str(path)!r})['reward']; from rlhf_triton import Sample; " + (
        "print(f(Sample(text='the 7 a 7')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    assert float(done.stdout) == -1.5 + 2 + 2


def test_functions_of_modules_are_imported_by_their_name(tmp_path, monkeypatch):
    (tmp_path / "plain_rewards.py").write_text("def good(sample):\n    return 3.0\n")
    package = tmp_path / "own_package"
    package.mkdir()
    good = "from . import __name__ as base\n\ndef good(sample):\n    return len(base)\n"
    for name in ("__init__.py", "scores.py"):
        (package / name).write_text(good)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_package.scores
    import plain_rewards

    files = {}
    assert function_spec(plain_rewards.good, tmp_path, files) == f"{tmp_path}/plain_rewards.py:good"
    assert not files
    specs = [function_spec(module.good, tmp_path, files) for module in (own_package.scores, own_package)]
    for path, text in files.items():
        path.write_text(text)
    code = f"from rlhf_triton.rewards.function import load_function; print(*(load_function(s)(None) for s in {specs}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment, cwd=Path.cwd()
    )
    assert [*map(float, done.stdout.split())] == [len("own_package")] * 2


def test_a_function_with_the_signature_of_trl_and_one_within_a_function_travel(tmp_path):
    def lengths(completions: list[str], **_: Any) -> list[float]:  # the names of annotations travel, too
        return [float(len(text)) for text in completions]

    files = {}
    spec = function_spec(lengths, tmp_path, files)
    for path, text in files.items():
        path.write_text(text)
    assert load_function(spec)(rt.Sample("a text", metadata={"response": "text"})) == 4.0


def scores_of(functions, folder):
    """Return what the functions return for a sample after they have travelled."""
    files = {}
    specs = [function_spec(each, folder, files) for each in functions]
    for path, text in files.items():
        path.write_text(text)
    return [load_function(spec)(rt.Sample("a")) for spec in specs]


def test_a_class_of_a_notebook_travels(tmp_path, monkeypatch):
    """A notebook's `__main__` has no file, so `inspect` finds no source of its classes."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    source = (
        "from dataclasses import dataclass\nBASE = 2\n\n@dataclass\nclass Reward:\n    more: int = 1\n"
        "    def __call__(self, sample):\n        return BASE + self.more\n\nclass Empty:\n    pass\n"
    )
    defined = cell(source)
    assert scores_of([defined["Reward"]], tmp_path) == [3]
    with pytest.raises(FunctionError, match="the source of Empty cannot be read; put it into a file"):
        function_spec(defined["Empty"], tmp_path, {})


def test_copied_function_keeps_its_default_argument(tmp_path):
    made = cell(
        "LIMIT = 1\ndef of_name(s, limit=LIMIT):\n    return limit\nLIMIT = limit = 5\n"
        "def make(limit):\n    def f(s, *, limit: int = limit):\n        return limit\n    return f\n"
    )
    assert scores_of([made["of_name"], made["make"](4), made["make"](3)], tmp_path) == [1, 4, 3]


def test_copied_function_keeps_what_was_evaluated_when_it_was_defined(tmp_path):
    made = cell(
        "K = 1\ndef first(s, k=K):\n    return k\n"
        "def doubled(s, *, k=('é', K * 2),\n    m = K):\n    return k[1] + m\n"
        "def before(s):\n    return 'before'\nzeroth = before\nK = 10\n"
        "def both(s, k=K):\n    return first(s) + k + K\n"
        "K = 100\ndef before(s):\n    return 'now'\n"
        "def renamed(s):\n    return float(zeroth(s) == 'before' and before(s) == 'now')\n"
    )
    names = ["both", "doubled", "renamed"]
    expected = [1 + 10 + 100, 2 + 1, 1]
    assert [made[name](None) for name in names] == expected
    assert scores_of([made[name] for name in names], tmp_path) == expected


WRAPPER = (
    "import functools\ndef same(f):\n    return f\n"
    "def half(f):\n    @functools.wraps(f)\n    def halved(s):\n        return f(s) / 2\n    return halved\n"
)


def test_functions_of_one_name_do_not_replace_each_other(tmp_path):
    functions = [cell(f"def score(s):\n    return {n}\n")["score"] for n in (1, 2, 1)]
    assert scores_of(functions, tmp_path) == [1, 2, 1]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "x = object()\ndef f(s):\n    return g(s)\ndef g(s):\n    return x",
            "f uses 'x', which is a object, which cann",
        ),
        ("def f(s):\n    return y", "f uses 'y', which its module does not define; put it into a file"),
        ("g = lambda s: 1\ndef f(s):\n    return g(s)", "f uses 'g', which is a lambda, which has no name; write it"),
        (
            "class C:\n    def m(self, s):\n        return 1\nf = C().m",
            "m is a method of a C, whose state the processes of a run cannot receive",
        ),
        ("class C:\n    def __call__(self, s):\n        return 1\nf = C()", "C is a C, which cannot be written into"),
        (
            f"{WRAPPER}def g(s):\n    return 1\nf = half(g)",
            "g is wrapped by a call, which its source does not have; write the wrapper as a decorator (@), or as a",
        ),
        (
            f"{WRAPPER}def g(s):\n    return 1\ng = half(g)\ndef f(s):\n    return g(s)",
            "f uses 'g', which is wrapped by",
        ),
        (
            f"{WRAPPER}@same\ndef g(s):\n    return 1\nf = half(g)",
            "g is wrapped by a call, which its source does not have",
        ),
        ("x = float('nan')\ndef f(s):\n    return x", "f uses 'x', which is a float, which cannot be written"),
    ],
)
def test_functions_that_other_processes_cannot_receive_are_named(tmp_path, source, sentence):
    with pytest.raises(FunctionError, match=re.escape(sentence)):
        function_spec(cell(source)["f"], tmp_path, {})


def test_a_function_without_a_source_is_refused(tmp_path):
    known = {"__name__": "__main__"}
    exec("def f(sample):\n    return 1.0", known)
    with pytest.raises(
        FunctionError, match=r"f: the source of f cannot be read; put it into a file, and give its name"
    ):
        function_spec(known["f"], tmp_path, {})


def test_a_class_of_a_script_travels(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom rlhf_triton.tools.api.functions import function_spec\n"
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Part:\n    one: int = 1\n"
        "    none: int = dataclasses.field(default=0, init=False)\n"
        "BASE = 2\nclass Base:\n    more = BASE\nclass Reward(Base):\n    once = 1\n    twice = once + 1\n"
        "    def __init__(self):\n        super().__init__()\n"
        "    def __call__(self, sample, base=BASE):\n        return self.more + self.twice + Part().one + base\n"
        "BASE = 100\nBase.more = 3\n"
        "files = {}\nfunction_spec(Reward, Path(sys.argv[1]), files)\n"
        "for path, text in files.items():\n    path.write_text(text)\n"
    )
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, cwd=Path.cwd(), env=_importable())
    assert runpy.run_path(str(tmp_path / "Reward_function.py"))["Reward"]()(None) == 3 + 2 + 1 + 2


def _importable():
    return {**os.environ, "PYTHONPATH": str(Path(rt.__file__).parents[1])}


# ---- a run's folder ----


def test_metrics_have_our_names_and_those_of_trl(tmp_path):
    run = rt.Run(RecordedRun(tmp_path / "run").start().steps(1, 2, 3).finished(3))
    metrics = run.metrics
    assert metrics["step"].tolist() == [1, 2, 3]
    np.testing.assert_allclose(metrics["reward"], [0.1, 0.2, 0.3], atol=1e-6)
    assert metrics["reward"] is metrics["train_rollouts/rewards"]
    assert metrics["reward_std"].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert (metrics["completions/mean_length"] > 0).all()
    assert {each.dtype for each in metrics.values()} == {np.dtype(np.float64)}
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train_rollouts/useful_prompts": 0.25, "text": "x"}\n')
    later = run.metrics
    assert np.isnan(later["reward"]).tolist() == [False, False, False, True]
    assert later["frac_reward_zero_std"][3] == 0.75
    assert "kl" not in later, "there is a KL without a reference"
    assert "text" not in later


def test_metrics_before_the_first_step_have_an_empty_reward(tmp_path):
    run = rt.Run(write_run(tmp_path / "run"))
    (run.path / "metrics.jsonl").write_text("")
    assert {name: values.shape for name, values in run.metrics.items() if "/" not in name} == {
        "step": (0,),
        "reward": (0,),
    }


def test_samples_report_and_curves_of_a_finished_run(tmp_path):
    run = rt.Run(write_run(tmp_path / "run"))
    assert len(run.samples("before")) == len(run.samples()) == 30
    assert run.samples("training") == []
    assert run.metrics["rewards/words/mean"][0] == pytest.approx(0.2)
    assert run.report().read_text().startswith("<!doctype html>")
    figure = run.plot()
    assert len(figure.axes) > 4
    assert figure._repr_svg_().startswith("<?xml")
    assert 'width="100%"' in figure._repr_svg_(), "the figure can be wider than a notebook's cell"
    with pytest.raises(rt.RlhfError, match="when: 'later', must be 'before', 'after' or 'training'"):
        run.samples("later")
    with pytest.raises(rt.RlhfError, match="has no policy yet: the first checkpoint is written"):
        run.policy_path  # noqa: B018
    with pytest.raises(rt.RlhfError, match=r"run.yaml is missing, because a command started this run; resume"):
        run.resume()


def test_the_policy_is_the_newest_and_can_be_uploaded(tmp_path, monkeypatch):
    run = rt.Run(write_run(tmp_path / "run"))
    (run.path / "policy").mkdir()
    assert run.policy_path == run.path / "policy"
    calls = []
    api = types.SimpleNamespace(
        create_repo=lambda name, **given: calls.append((name, given)),
        upload_folder=lambda **given: calls.append(("upload", given)),
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    assert run.push_to_hub("org/mine") == "https://huggingface.co/org/mine"
    assert calls[0] == ("org/mine", {"private": True, "exist_ok": True})
    assert calls[1] == ("upload", {"repo_id": "org/mine", "folder_path": str(run.path / "policy")})
    (run.path / "checkpoints" / "actor" / "5").mkdir(parents=True)
    (run.path / "export" / "step-5").mkdir(parents=True)
    assert run.policy_path == run.path / "export" / "step-5", (
        "the policy is not of the last checkpoint before the failure"
    )
    (run.path / "checkpoints" / "actor" / "6").mkdir(parents=True)
    with pytest.raises(rt.RlhfError, match="6"):
        run.policy_path  # noqa: B018


def test_a_folder_that_is_no_run_or_is_deleted_is_one_sentence(tmp_path):
    with pytest.raises(rt.RlhfError, match="is not a run's folder: it has neither"):
        rt.Run(tmp_path)
    folder = write_run(tmp_path / "run")
    run = rt.Run(folder)
    folder.rename(tmp_path / "elsewhere")
    for read in (lambda: run.metrics, run.samples, run.report, run.plot, run.status, lambda: run.policy_path):
        with pytest.raises(rt.RlhfError, match=f"{folder} is missing: name the folder of a run"):
            read()


def test_a_run_whose_folder_is_deleted_meanwhile_says_so(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    run = rt.Run(folder)
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"]) as process:
        process.wait()
    monkeypatch.setitem(runs._started, run.path, process)
    with pytest.raises(
        rt.RlhfError, match=r"^the run ended with exit code 2, and files of .*run were deleted meanwhile$"
    ):
        run.wait()
    run.log_path.parent.mkdir()
    run.log_path.touch()
    with pytest.raises(rt.RlhfError, match=r"^the run ended with exit code 2; its log is .*run.log$"):
        run.wait()


def test_ctrl_c_says_how_to_resume_before_it_waits_for_the_end(tmp_path, monkeypatch, capsys):
    """A second one, meanwhile, ends the waiting."""
    run = rt.Run(write_run(tmp_path / "run"))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        runs, "start_bound", lambda *_: types.SimpleNamespace(pid=0, poll=lambda: None, returncode=None)
    )
    monkeypatch.setattr(rt.Run, "config_path", tmp_path)
    monkeypatch.setattr(rt.Run, "wait", interrupt)
    monkeypatch.setattr(rt.Run, "stop", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run._start(wait=True)
    assert capsys.readouterr().err == f"stopping; {run!r}.resume() goes on from the newest checkpoint\n"


RUNNING = """
import signal, sys
from pathlib import Path
from rlhf_triton.store.run_lock import only_run, write_phase
folder = Path(sys.argv[1])
with only_run(folder):
    write_phase(folder, "training: grpo")
    signal.sigwait({signal.SIGINT})
    (folder / "logs" / "run.log").write_text("[0:01] stopping\\nerror: the disk is full;\\nmake room\\n")
"""


def test_a_run_that_another_process_has_started_is_found_and_stopped(tmp_path, capsys):
    run = rt.Run(RecordedRun(tmp_path / "run").start().steps(1).finished(1))
    (run.path / "logs").mkdir()
    assert not run.is_running
    run.stop()
    command = [
        sys.executable,
        "-c",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})" + RUNNING,
    ]
    with subprocess.Popen([*command, str(run.path)], env=_importable()) as process:
        while not run.is_running or "training" not in (run.path / "run.lock").read_text():
            assert process.poll() is None
        assert "running: training: grpo" in run.status()
        run.stop()
        assert process.wait() == 0
    assert not run.is_running
    run.wait()  # what it wrote before is of no interest


def test_waiting_for_another_processes_run_raises_its_error(tmp_path, monkeypatch, capsys):
    run = rt.Run(RecordedRun(tmp_path / "run").start().steps(1).finished(1))
    run.log_path.parent.mkdir()
    states = iter([True, False])

    def is_running(_):
        run.log_path.write_text("step 1/2  reward\n  | actor: slow\nother\nerror: the disk is full;\nmake room\n")
        return next(states)

    monkeypatch.setattr(rt.Run, "is_running", property(is_running))
    with pytest.raises(rt.RlhfError, match=r"^the disk is full;\nmake room$"):
        run.wait()
    assert capsys.readouterr().err == "step 1/2  reward\nactor: slow\n"


def test_waiting_for_a_run_that_was_resumed_elsewhere_does_not_raise_an_earlier_error(tmp_path, monkeypatch):
    run = rt.Run(RecordedRun(tmp_path / "run").start().steps(1).finished(1))
    monkeypatch.setitem(runs._started, run.path, types.SimpleNamespace(poll=lambda: 2, returncode=2))
    with only_run(run.path):
        monkeypatch.setattr(rt.Run, "is_running", property(lambda _: False))
        run.wait()
    run.wait()


def test_the_live_line_is_updated_in_a_notebook(monkeypatch, capsys):
    shown = []
    ipython = types.SimpleNamespace(
        get_ipython=lambda: types.SimpleNamespace(kernel=1),
        display=types.SimpleNamespace(
            display=lambda *_, **__: types.SimpleNamespace(update=lambda x, raw: shown.append(x))
        ),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with LiveLine() as line:
        line.show("step 1")
        line.show("step 1")
        line.show("step 2")
        line.keep("a warning")
    assert shown == [{"text/plain": "step 1"}, {"text/plain": "step 2"}]
    assert capsys.readouterr().err == "a warning\n"
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with LiveLine() as line:
        line.show("step 1")
        line.keep("a warning")
    assert capsys.readouterr().err == "\r\x1b[Kstep 1\r\x1b[Ka warning\n\r\x1b[Kstep 1\n"
