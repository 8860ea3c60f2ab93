"""Tests of `rlhf_triton.config`: one typed YAML, whose errors name key and value."""

import codecs
import contextlib
import re
from pathlib import Path

import pytest
import yaml

from rlhf_triton.config.actor import CORRECTION_CHOICES, needs_correction
from rlhf_triton.config.algorithms import ALGORITHMS, KL_ESTIMATORS, LOSSES
from rlhf_triton.config.keys import keys_of
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.other_names import ADVICE, OTHER_NAMES, hint_at
from rlhf_triton.config.rewards import RewardTerm, read_template
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.without_effect import effect_line, without_effect
from rlhf_triton.models.placement import device_of, devices_of, own_device

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path, text="", *overrides):
    path = tmp_path / "my.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides)


def listed(*names):
    """Return the names as an error message lists them."""
    return ", ".join(map(repr, names))


def dumped(config):
    return yaml.safe_dump(config.model_dump(mode="json", exclude={"report"}))


def test_empty_file_gives_valid_defaults_that_survive_a_round_trip(tmp_path):
    """pydantic does not check defaults: a round trip through YAML does."""
    assert load(tmp_path) == RunConfig() == load(tmp_path, dumped(RunConfig()))
    # As a resume and the report read the settings of a run.
    mixture = load(tmp_path, "rewards: {model: {weight: 2}, length: {function: mine.py:length}}")
    assert dumped(load(tmp_path, dumped(mixture))) == dumped(mixture)


@pytest.mark.parametrize(
    ("written", "high", "kl"),
    [
        ("{name: vapo}", 0.28, 0.0),
        ("{name: vapo, clip_ratio_high: null}", None, 0.0),
        ("{name: vapo, clip_ratio_high: 1.0}, kl: {coef: 0.1}", 1.0, 0.1),
        ("{name: ppo}", None, 0.01),
    ],
)
def test_yaml_values_override_an_algorithms_published_settings(tmp_path, written, high, kl):
    """A null is a value, too; so it is in sections that were validated before, and among overrides."""
    config = load(tmp_path, f"actor: {{algorithm: {written}}}")
    assert (config.actor.algorithm.clip_ratio_high, config.actor.kl.coef) == (high, kl)
    assert ("clip_ratio_high None (published: 0.28)" in config.published_choices) == ("null" in written)
    assert RunConfig(actor=config.actor).actor == config.actor
    overridden = load(tmp_path, f"actor: {{algorithm: {written}}}", "actor.algorithm.clip_ratio_high=null")
    assert overridden.actor.algorithm.clip_ratio_high is None


@pytest.mark.parametrize(
    ("host", "full"),
    [("127.1", "127.0.0.1"), ("0", "0.0.0.0"), ("::1", "::1"), ("localhost", "localhost"), ("127.1 ", "127.1 ")],
)
def test_short_ipv4_addresses_are_written_in_full(tmp_path, host, full):
    """gRPC and aiohttp refuse them, but tritonserver binds them: its start hung until `start_timeout_s`."""
    assert load(tmp_path, yaml.safe_dump({"server": {"host": host}})).server.grpc_url == f"{full}:8001"


def test_short_ipv4_address_of_a_server_is_written_in_full(tmp_path):
    config = load(tmp_path, "trainer: {servers: ['127.1:80', '[::1]:80', 'dns:localhost:80']}")
    assert config.trainer.servers == ["127.0.0.1:80", "[::1]:80", "dns:localhost:80"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_yaml_files_in_configs_are_valid(path):
    assert without_effect(load_config(path)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {step: 3}", "unknown key actor.step; did you mean actor.steps?"),
        ("actr: {steps: 3}", "unknown key actr; did you mean actor?"),
        ("trainer: {publish: {evry: 3}}", "unknown key trainer.publish.evry; did you mean trainer.publish.every?"),
        ("run: {dir: }", "run.dir: must be a path (got None)"),
        ("report: my_report.py", "report: 'my_report.py' does not name a function; write path/to/file.py:name or"),
        (
            "zzz: 1",
            "unknown key zzz; known: run, server, reward, rewards, critic, reference, trainer, actor, environment, "
            "gateway, monitoring, report",
        ),
        ("1: 2", "my.yaml is not valid YAML: line 1: the key 1 must be text, but YAML reads it as int; put it in quot"),
        ("{rewards: {a: {options: {\non: 1}}}}", "line 2: the key rewards.a.options.on must be text, but YAML reads"),
        ("run: {dir: a}\nactor: {}\nrun: {seed: 1}", "line 3: run occurs twice, first in line 1; keep one of them"),
        ("actor:\n kl:\n  coef: 1\n  'coef': 1", "line 4: actor.kl.coef occurs twice, first in line 3"),
        ("actor: {prompts: {files: [{path: a}, {path: b, path: c}]}}", "actor.prompts.files.1.path occurs twice"),
        ("rewards: {a: {options: {b: [{c: {d: 1, d: 2}}]}}}", "line 1: rewards.a.options.b.0.c.d occurs twice"),
        (
            "reward: &a {threads: 1}\ncritic: {<<: *a, <<: *a}",
            "line 2: critic.<< occurs twice, first in line 2; writ",
        ),
        ("run: &a {dir: *a}", "line 1: run.dir contains itself; remove its alias"),
        ("run: {dir: a}\n---\nrun: {dir: b}", "line 2, column 1: a second document starts here, which would be"),
        ("run:\n\tdir: a", r"line 2, column 1: found character '\t' that cannot start any token; indent with spaces"),
        ("actor: {steps: 010}", "line 1, column 16: 010 starts with 0, which YAML 1.1 reads as octal"),
        ("actor: {max_minutes: 1:30}", "actor.max_minutes: must be a valid number (got '1:30')"),
        ("run: {dir: \0}", "my.yaml is not valid YAML: unacceptable character #x0000"),
        ("[" * 5000, "my.yaml is not valid YAML: the values are nested too deeply"),
        ("reward: {standardization: off}", "(got False)"),
        (
            "run: {run_id: no}",
            "YAML reads yes, no, on and off as true and false, so put such a text in quotes (got Fal",
        ),
        ("[]", "my.yaml must contain sections"),
        ("actor: {max_off_policy_steps: true}", "max_off_policy_steps: must be a number, not true or false (got True)"),
        ("actor: {max_minutes: yes}", "actor.max_minutes: must be a number, not true or false (got True)"),
        ("reward: {attribute_weights: [1, true]}", "reward.attribute_weights: must be a number, not true or false"),
        ("actor: {steps: 0}", "actor.steps: must be greater than or equal to 1 (got 0)"),
        ("actor: {optimizer: {lr: .nan}}", "actor.optimizer.lr: must be a finite number (got nan)"),
        (
            "actor: {algorithm: {clip_ratio: 1.5}}",
            "clip_ratio: must be less than or equal to 1",
        ),
        (
            "environment: {class: a.py:B, max_tokens: 512}",
            "environment.max_tokens (512), the limit of a whole conversation, must be above actor.prompts.max_tokens",
        ),
        (
            "{environment: {class: a.py:B, truncated: bootstrap}, actor: {algorithm: {name: reinforce++}}}",
            "environment.truncated is bootstrap, which needs a critic, but reinforce++ has none",
        ),
        (
            "{environment: {class: a.py:B}, actor: {rewards: {overlong_tokens: 2}}}",
            "actor.rewards.overlong_tokens cannot be used with an environment; remove one of them",
        ),
        (
            "{environment: {class: a.py:B}, actor: {prompts: {too_long: truncate}}}",
            "actor.prompts.too_long: truncate cannot be used with an environment; remove one of them",
        ),
        (
            "{environment: {class: a.py:B}, reward: {model: checkpoints/mine}}",
            "reward.model (checkpoints/mine) has no effect: with an environment, only its own rewards and the terms in",
        ),
        (
            "rewards: {a: {function: a.py:f, weight: 0}}",
            "rewards.a.weight is 0, so every reward would be 0; set at least one",
        ),
        (
            "rewards: {model: {weight: 0}, a: {function: a.py:f, weight: 0}}",
            "rewards.model.weight and rewards.a.weight are 0, so every reward would be 0",
        ),
        (
            "actor: {kl: {estimator: k9}}",
            f"actor.kl.estimator: must be one of {listed('auto', *KL_ESTIMATORS)} (got 'k9')",
        ),
        ("actor: {algorithm: {name: gpro}}", f"one of {listed(*ALGORITHMS)}; did you mean grpo? (got 'gpro')"),
        (
            "actor: {algorithm: {loss: cliped}}",
            f"actor.algorithm.loss: must be one of {listed('auto', *LOSSES)}, or path/to/file.py:name; did",
        ),
        ("actor: {algorithm: {loss: 'my loss:'}}", "'my loss:' does not name a function; write path/to/file.py:name"),
        (
            "actor: {optimizer: {kind: adamw_8bit}}",
            "actor.optimizer.kind: adamw_8bit needs CUDA, and actor.policy.device is cpu; set it to adamw",
        ),
        (
            "actor: {ranks: 2, policy: {device: cuda}, optimizer: {kind: adamw_8bit}}",
            "actor.optimizer.kind: adamw_8bit is not supported with actor.ranks above 1; set adamw",
        ),
        (
            "trainer: {optimizer: {kind: adamw_8bit}}",
            "trainer.optimizer.kind: adamw_8bit needs CUDA, and trainer.device is cpu; set it to adamw",
        ),
        (
            "trainer: {publish: {format: adapter}}",
            "trainer.publish.format: adapter needs trainer.lora_rank above 0; set it, or set merged",
        ),
        (
            "trainer: {lora_targets: [q_proj]}",
            "trainer.lora_targets ([q_proj]) needs trainer.lora_rank above 0; set it, or remove trainer.lora_targets",
        ),
        (
            "trainer: {freeze: ['*embed*']}",
            "'*embed*' is not a regular expression (nothing to repeat at position 0); give",
        ),
        ("trainer: {freeze: embed}", "trainer.freeze must be a list (got 'embed')"),
        ("actor: {generation: {batchsize: 1}}", "did you mean actor.generation.batch_size?"),
        ("reward: {checkpoint: a}", "unknown key reward.checkpoint; did you mean reward.model?"),
        ("model: a", "did you mean reward.model (to serve it) or actor.policy.model (to train it)?"),
        ("reward: {value_head_prefix: a}", "this project has no such setting: the head is found by config.json and"),
        ("actor: {policy: {load_in_8bit: true}}", "this project has no such setting: weights are float32 or bfloat16"),
        ("critic: {weight_decay: 1}", "unknown key critic.weight_decay; did you mean trainer.optimizer.weight_decay?"),
        ("run: {name: a}", "unknown key run.name; known: run.dir, run.run_id, "),
        ("actor: {algorithm: {name: GRPO}}", "; did you mean grpo? (got 'GRPO')"),
        ("actor: {trackers: [wandbb]}", "or 'wandb'; did you mean wandb? (got 'wandbb')"),
        ("actor: {trackers: [tensorboard]}", "; TensorBoard's files are always in run.dir/tensorboard (got 'tensor"),
        ("actor: {policy: {precision: bfloat61}}", "; did you mean bfloat16? (got 'bfloat61')"),
        (
            "actor: {algorithm: {name: DPO}}",
            "DPO trains on given answers, but this project on answers that the policy sampl",
        ),
        (
            "reward: {token_budget: lots}",
            "my.yaml: reward.token_budget: must be a valid integer (got 'lots')",
        ),
        ("reward: {standardization: on}", "must be 'model' or 'off' or a section with keys of mean, std; YAML reads y"),
        ("reward: {standardization: {meen: 1}}", "my.yaml: unknown key reward.standardization.meen; did you mean"),
        ("actor: 3", "actor is a section, not a value (got 3); its keys are ranks, steps,"),
        *(
            (text, f"section, not a value (got {value!r}); did you mean {key}?")
            for text, value, key in (
                ("actor: {prompts: a.jsonl}", "a.jsonl", "actor.prompts.path"),
                ("actor: {kl: 0.1}", 0.1, "actor.kl.coef"),
                ("reward: models/reward", "models/reward", "reward.model"),
                ("reward: 'my.py:share'", "my.py:share", "rewards.<name>.function"),
                ("rewards: {share: 'my.py:share'}", "my.py:share", "rewards.share.function"),
                ("rewards: {function: my.py}", "my.py", "rewards.<name>.function"),
                ("rewards: {mine: models/reward}", "models/reward", "reward.model"),
                ("rewards: {model: models/reward}", "models/reward", "reward.model"),
                ("rewards: {model: 0.5}", 0.5, "rewards.model.weight"),
            )
        ),
        ("rewards: {model: {path: a}}", "unknown key rewards.model.path; did you mean reward.model?"),
        ("rewards: {mine: {model: a}}", "unknown key rewards.mine.model; did you mean reward.model?"),
        ("rewards: {mine: {path: a.py}}", "unknown key rewards.mine.path; did you mean rewards.mine.function?"),
        ("reward: {function: 'a.py:f'}", "unknown key reward.function; did you mean rewards.<name>.function?"),
        ("run: {trace_endpoint: foo}", "run.trace_endpoint: must be a URL such as http://localhost:4318 (got 'foo')"),
        ("critic: {device: gpu}", "critic.device: must be cpu, cuda or cuda:N, such as cuda:0 (got 'gpu')"),
        ("run: {seed: 4294967296}", "run.seed: must be less than 4294967296"),
        ("run: {run_id: a b}", "run.run_id: use 1 to 64 letters, digits, '.', '_' or '-'"),
        ("server: {http_port: 70000}", "server.http_port: must be less than or equal to 65535 (got 70000)"),
        (
            "actor: {rollout_size: 9, algorithm: {responses_per_prompt: 2}}",
            "actor.rollout_size (9) is not a multiple of actor.algorithm.responses_per_prompt (2); set it to 8 or 10",
        ),
        ("actor: {algorithm: {name: grpo}}", "actor.algorithm.name: grpo compares the responses to a prompt"),
        (
            "actor: {algorithm: {name: rloo, responses_per_prompt: 2}, update: {epochs: 2}}",
            "actor.update.epochs (2): rloo's loss is on-policy",
        ),
        (
            "actor: {algorithm: {name: rloo, responses_per_prompt: 2}, max_off_policy_steps: 1}",
            "actor.max_off_policy_steps (1): rloo's loss is on-policy",
        ),
        (
            "actor: {ranks: 2, max_off_policy_steps: 2, algorithm: {old_logprobs: sampler}}",
            "actor.max_off_policy_steps (2): several ranks (actor.ranks: 2) generate at most one step ahead; set one",
        ),
        ("actor: {max_off_policy_steps: two}", "actor.max_off_policy_steps: must be a valid integer"),
        ("actor: {max_off_policy_steps: -1}", "actor.max_off_policy_steps: must be greater than or equal to 0"),
        *[
            (
                f"actor: {{algorithm: {{name: {name}, responses_per_prompt: 2}}, rewards: {{missing_eos_penalty: 1}}}}",
                f"actor.rewards.missing_eos_penalty (1) has no effect under {name} with actor.algorithm.mask_",
            )
            for name in ("rloo", "grpo", "reinforce++")
        ],
        (
            "actor: {algorithm: {name: gdpo, responses_per_prompt: 2}}",
            "gdpo standardises each of several rewards, but th",
        ),
        *(
            (
                "rewards: {model: {}, a: {function: a.py:f}}\n"
                f"actor: {{algorithm: {{name: gdpo, responses_per_prompt: 2}}, {setting}}}",
                f"{key} changes the sum of the rewards, but actor.algorithm.name: gdpo standardises each of them",
            )
            for setting, key in (
                ("rewards: {clip: 1}", "actor.rewards.clip"),
                ("kl: {penalty_in: reward}", "actor.kl.penalty_in: reward"),
            )
        ),
        *(
            (
                f"actor: {{algorithm: {{name: maxrl, responses_per_prompt: 2, mask_unfinished: false}}, {setting}}}",
                f"{key} makes scores of 0 negative, but actor.algorithm.name: maxrl divides by their mean",
            )
            for setting, key in (
                ("rewards: {normalization: batch}", "actor.rewards.normalization"),
                ("rewards: {missing_eos_penalty: 1}", "actor.rewards.missing_eos_penalty"),
                ("rewards: {overlong_tokens: 8}", "actor.rewards.overlong_tokens"),
                ("kl: {coef: 0.1, penalty_in: reward}", "actor.kl.penalty_in: reward"),
            )
        ),
        (
            "actor: {kl: {estimator: unbiased}}",
            "actor.kl.estimator: unbiased corrects the gradient of a KL in the loss",
        ),
        (
            "actor: {algorithm: {correction: {mode: binary_kl, level: geometric}}}",
            "actor.algorithm.correction.level (geometric) does not apply to mode: binary_kl, which has only an upper",
        ),
        (
            "actor: {algorithm: {correction: {mode: binary_tv, low: 0.1}}}",
            "actor.algorithm.correction.low (0.1) does not apply to mode: binary_tv",
        ),
        (
            "actor: {algorithm: {correction: {low: 3}}}",
            "correction.low (3) is above actor.algorithm.correction.high (2)",
        ),
        ("actor: {kl: {coef: 0, target: 6}}", "actor.kl.target (6) scales actor.kl.coef, which is 0 and stays 0"),
        (
            "trainer: {optimizer: {max_steps: 9}}",
            "trainer.optimizer.warmup_steps (10) is above trainer.optimizer.max_steps (9)",
        ),
        (
            "critic: {tensor_parallel: 2, instances: 3}",
            "critic.instances is 3, but critic.tensor_parallel (2) needs 1: all devices run each forward pass together",
        ),
        ("rewards: {a: {function: f.py:f, tensor_parallel: 2}}", "unknown key rewards.a.tensor_parallel"),
        (
            "actor: {policy: {precision: bfloat16}, kl: {reference: triton}}\nreference: {dtype: float32}",
            "dtype (float32) differs from actor.policy.precision (bfloat16)",
        ),
        *(
            (f"actor: {{steps: 10, prompts: {{files: {files}}}}}", message)
            for files, message in (
                ("[]", "actor.prompts.files is empty; list a file, or set actor.prompts.path"),
                ("[{path: x/a}, {path: x/../x/a}]", "actor.prompts.files: x/a occurs more than once; remove one"),
                ("[{path: a, weight: 0}]", "actor.prompts.files.0.weight: must be greater than 0"),
                ("[{weight: 1}]", "actor.prompts.files.0.path is missing"),
                ("[a]", "actor.prompts.files.0 is a section, not a value (got 'a'); its keys are path, weight"),
                ("{a: 1}", "actor.prompts.files must be a list (got {'a': 1})"),
                (
                    "[{path: a, wieght: 1}]",
                    "unknown key actor.prompts.files.0.wieght; did you mean actor.prompts",
                ),
                ("[{path: a}], path: b", "actor.prompts.path (b) and actor.prompts.files are both set"),
            )
        ),
        *(
            (f"rewards: {{a: {{function: 'a.py:b', options: {options}}}}}", message)
            for options, message in (
                ("{timeout_s: 3}", "'timeout_s': set timeout_s of the section instead"),
                ("{a b: 3}", "'a b': not a valid argument name"),
                ("{x: .nan}", "not expressible in JSON"),
                ("[1]", "rewards.a.options"),
            )
        ),
        ("rewards: {model: {groupwise: true}}", "'model' is the model of the section `reward`"),
        ("rewards: {model: {function: 'a:b'}}", "rewards.model.function: 'model' is the model of the section `reward`"),
        (
            "rewards: {Length: {function: 'a:b'}}",
            "rewards.Length: a name must have 1 to 40 characters from",
        ),
        (
            "actor.optimizer.lr: 1",
            "actor.optimizer.lr is a path of keys, for the command line; in a file, write actor: {optimizer: {lr: …}}",
        ),
        ("actor: {optimizer.lr: 1}", "actor.optimizer.lr is a path of keys"),
        *(
            (f"rewards: {{{name}: {{function: 'a:b'}}}}", f"rewards.{name}: train_rollouts/reward_{name} is another")
            for name in ("environment", "version", "length_missing")
        ),
        ("rewards: {length: {weight: 1}}", "rewards.length.function is missing; set it (only 'model'"),
        (
            "rewards: {length: {function: 'a:b', timeout_s: 90}}",
            "rewards.length.timeout_s (90) must be below actor.client.deadl",
        ),
        (
            "reward: {logit: {tokens: [yes]}}",
            "reward.logit.tokens: must be a number, not true or false; YAML reads yes and no as",
        ),
        ("a: [", "my.yaml is not valid YAML"),
        (b"\xff\xfe", "my.yaml is not valid YAML"),
    ],
)
def test_invalid_yaml_is_refused_by_key_and_value(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, text)


def test_all_config_problems_are_reported_together_with_their_source(tmp_path):
    text = "actor: {step: 3, optimizer: {lr: -1}}\nserver: {http_port: x}"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, "actor.steps=3", "actor.step_size=2")
    lines = [line.rpartition("/")[2] for line in str(caught.value).splitlines()]
    assert sorted(line[: len("my.yaml: unknown key actor.step")] for line in lines) == [
        "my.yaml: actor.optimizer.lr: mu",
        "my.yaml: server.http_port: must",
        "my.yaml: unknown key actor.step",
        "override 'actor.step_size=2': u",
    ]
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"cannot read the configuration {path}")):
            load_config(path)


def test_overrides_win_over_the_file(tmp_path):
    config = load(
        tmp_path,
        "actor: {steps: 3, optimizer: {lr: 1e-3}}",
        "actor.steps=4",
        "actor.steps=5",
        "actor.client.max_outage_s=0",
        "run.dir=runs/a=b",
        "trainer.freeze=[a, b]",
        "actor.validation.prompts=null",
        "reward.standardization={mean: 1, std: 2}",
    )
    assert (config.actor.steps, config.actor.optimizer.lr, config.actor.client.max_outage_s) == (5, 1e-3, 0)
    assert config.run.dir == Path("runs/a=b")
    assert config.trainer.freeze == ("a", "b")
    assert config.reward.standardization.std == 2
    assert load(tmp_path, "actor:", "actor.steps=2").actor.steps == 2  # a section with nothing in it


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.steps", "override 'actor.steps' must have the form section.key=value"),
        ("=3", "override '=3' must have the form"),
        ("actor.steps=[", "override 'actor.steps=[': the value is not valid YAML"),
        ("actor={steps: 1, steps: 2}", "the value is not valid YAML: line 1: steps occurs twice"),
        ("actor.stepz=3", "override 'actor.stepz=3': unknown key actor.stepz; did you mean actor.steps?"),
        ("actr.steps=3", "override 'actr.steps=3': unknown key actr; did you mean actor?"),
        ("actor..steps=3", "override 'actor..steps=3': unknown key actor."),
        ("actor.steps=x", "override 'actor.steps=x': actor.steps: must be a valid integer"),
        (
            "actor.optimizer.min_lr=500",
            "override 'actor.optimizer.min_lr=500': actor.optimizer.min_lr (500) is above actor.optimizer.lr (9e-07)",
        ),
        ("run.dir.x=1", "override 'run.dir.x=1': 'dir' is a value, not a section"),
    ],
)
def test_invalid_overrides_are_refused_by_name(tmp_path, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, "run: {dir: here}", override)


@pytest.mark.parametrize(
    ("folder", "identity"), [("runs/demo", "demo"), ("my run!", "my-run-"), ("_._", "run"), ("x" * 99, "x" * 64)]
)
def test_run_identity_defaults_to_the_folder_name(tmp_path, folder, identity):
    config = load(tmp_path, "", f"run.dir={tmp_path / folder}")
    assert config.run.identity == identity
    assert load(tmp_path, "", f"run.run_id={identity}").run.identity == identity  # and may be written out


def test_override_of_one_section_does_not_change_its_yaml_alias(tmp_path):
    overrides = ["reward.model=a", "critic.model=b", "critic.threads=3"]
    config = load(tmp_path, "reward: &same {threads: 2}\ncritic: *same\n", *overrides)
    found = [(str(section.model), section.threads) for section in (config.reward, config.critic)]
    assert found == [("a", 2), ("b", 3)]


def test_yaml_merge_keys_and_yaml_1_2_numbers_are_supported(tmp_path):
    text = (
        "reward: &a {threads: 2, instances: 3}\ncritic: &b {<<: *a, threads: 4}\n"
        "reference: {<<: [*b, *a], instances: 9}\n"
    )
    config = load(tmp_path, text)
    sections = (config.reward, config.critic, config.reference)
    assert [(each.threads, each.instances) for each in sections] == [(2, 3), (4, 3), (4, 9)]
    values = "{a: 1e-6, b: 1:30, c: .5, d: 1_000, e: -0x10, f: 0, g: 1e, h: '010', i: 1.2.3, j: 2e5, k: 0.5}"
    config = load(tmp_path, f"rewards: {{a: {{function: 'a.py:f', options: {values}}}}}")
    found = [*config.functions["a"].options.values()]
    assert found == [1e-6, "1:30", 0.5, 1000, -16, 0, "1e", "010", "1.2.3", 2e5, 0.5]


GROUPS = "actor.algorithm={name: grpo, responses_per_prompt: 2}"
FUNCTION = "rewards={f: {function: a.py:f}}"
WITHOUT_EFFECT = {  # overrides, of which the last have no effect, the number of these, and why
    "the critic": ([GROUPS, "critic.model=a", "trainer.optimizer.lr=1"], 2, "grpo has no critic"),
    "its age": ([GROUPS, "actor.max_staleness=2"], 1, "no critic; actor.max_off_policy_steps bounds the age of resp"),
    "no factors": (
        [
            *("actor.max_off_policy_steps=1", "actor.algorithm.correction.mode=none"),
            "actor.algorithm.correction.high=3",
        ],
        1,
        "actor.algorithm.correction.mode is none",
    ),
    "its metrics": ([GROUPS, "monitoring.trainer_port=9"], 1, "grpo has no critic"),
    "the reward model": ([FUNCTION, "reward.device=cuda", "reward.process.mark=x"], 2, "no reward model is served"),
    "the reference": (
        ["reference.threads=2", "reference.model=a"],
        1,
        "actor.kl.reference is actor: the initial policy",
    ),
    "no KL": (["actor.kl.coef=0", "actor.kl.estimator=k2", "actor.kl.penalty_in=loss"], 2, "actor.kl.coef is 0"),
    "lambda": (["actor.algorithm.name=reinforce++", "actor.algorithm.lam=0.5"], 1, "advantages have no lambda"),
    "clip": (
        ["actor.algorithm={name: rloo, responses_per_prompt: 2}", "actor.algorithm.clip_ratio=0.1"],
        1,
        "the loss reinforce has no probability ratio",
    ),
    "a gate": (
        ["actor.algorithm={name: flash_reinforce}", "actor.update.epochs=2", "actor.algorithm.clip_ratio=0.1"],
        1,
        "the loss flash_reinforce has only an upper bound",
    ),
    "one minibatch": (
        ["actor.rollout_size=8", "actor.algorithm.clip_ratio=0.1", "actor.update.max_kl=0.1"],
        2,
        "every probability ratio is 1; set actor.update.minibatch_size below actor.rollout_size (8)",
    ),
    "validation": (["actor.validation.every=2", "actor.validation.greedy=true"], 2, "validation.prompts is not set"),
    "vLLM": (["actor.generation.vllm.servers=['a:1']"], 1, "actor.generation.engine is slots"),
    "LoRA": (["actor.policy.lora_alpha=2"], 1, "actor.policy.lora_rank is 0"),
    "every token": (["reward.process={granularity: token}", "reward.process.separator=x"], 1, "granularity is token"),
    "ports": (["monitoring.host=a"], 1, "neither monitoring.actor_port nor trainer_port is set"),
    "bits": (["run.deterministic=true", "critic.token_budget=9"], 1, "each row is scored alone"),
}


@pytest.mark.parametrize(("overrides", "count", "why"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT.keys())
def test_settings_without_effect_are_listed_with_the_reason(tmp_path, overrides, count, why):
    assert without_effect(load(tmp_path, "", *overrides[:-count])) == []
    config = load(tmp_path, "", *overrides)
    keys = sorted(override.partition("=")[0] for override in overrides[-count:])
    (found,) = without_effect(config)
    assert found.startswith(f"{', '.join(keys)}")
    assert why in found
    assert effect_line(config) == f"settings without effect in this run: {found}"
    assert without_effect(RunConfig.model_validate(config.model_dump(mode="json"))) == []  # not written by the user


def test_clip_ratio_does_not_set_the_bound_of_a_gate(tmp_path):
    given = [
        "actor.algorithm={name: flash_reinforce, clip_ratio: 0.2}",
        "actor.algorithm={name: flash_reinforce, clip_ratio_high: 0.01}",
    ]
    assert [load(tmp_path, "", each).actor.algorithm.clip[1] for each in given] == [0.003, 0.01]


@pytest.mark.parametrize(
    ("algorithm", "needs"),
    [
        ("{name: ppo}", True),
        ("{name: grpo, responses_per_prompt: 2}", True),
        ("{name: grpo, responses_per_prompt: 2, loss: dppo}", True),
        ("{name: rloo, responses_per_prompt: 2, old_logprobs: sampler}", True),  # its loss has no ratio
        ("{name: ppo, loss: 'a.py:f'}", True),
        ("{name: ppo, correction: {mode: none}}", False),
        ("{name: sao}", False),
        ("{name: sao, old_logprobs: recomputed}", True),
        ("{name: flash_reinforce}", False),
        ("{name: ppo, old_logprobs: sampler}", False),
        ("{name: grpo, responses_per_prompt: 2, loss: dppo, old_logprobs: sampler}", False),
    ],
)
def test_loss_without_a_ratio_to_the_sampler_needs_a_correction(tmp_path, algorithm, needs):
    assert needs_correction(load(tmp_path, f"actor: {{algorithm: {algorithm}}}").actor) is needs


def test_choosing_a_correction_is_enough_and_names_existing_choices(tmp_path):
    vllm = "generation: {engine: vllm, vllm: {servers: ['a:1']}}"
    for mode in ("clip", "mask", "binary_kl", "binary_tv", "none"):
        assert mode in CORRECTION_CHOICES
        config = load(tmp_path, f"actor: {{{vllm}, algorithm: {{correction: {{mode: {mode}}}}}}}")
        assert not needs_correction(config.actor)


@pytest.mark.parametrize(
    ("correction", "upper"),
    [
        ("{}", 2),
        ("{mode: mask}", 2),
        ("{mode: binary_kl}", 0.05),
        ("{mode: binary_kl, level: sequence}", 0.003),
        ("{mode: binary_tv}", 0.2),
        ("{mode: binary_kl, high: 0.1}", 0.1),
    ],
)
def test_upper_bound_of_a_correction_is_as_published_for_its_mode(tmp_path, correction, upper):
    vllm = "generation: {engine: vllm, vllm: {servers: ['a:1']}}"
    found = load(tmp_path, f"actor: {{{vllm}, algorithm: {{correction: {correction}}}}}")
    assert found.actor.algorithm.correction.upper == upper


def test_an_unused_reward_model_is_refused(tmp_path):
    message = "`rewards` lists the terms that count, and `rewards` has no term `model`; add rewards.model: {weight"
    for model in ("checkpoints/reward", "checkpoints/mine"):  # the default, too
        with pytest.raises(ConfigError, match=re.escape(f"reward.model ({model}) has no effect: {message}")):
            load(tmp_path, f"reward: {{model: {model}}}", FUNCTION)
    load(tmp_path, "reward: {model: checkpoints/mine}", FUNCTION, "rewards.model={}")
    load(tmp_path, "rewards: {model: {weight: 2}}")
    load(tmp_path, "environment: {class: a.py:B}\nrewards: {a: {function: a.py:f, weight: 0}}")


# ---- run.deterministic ----


@pytest.mark.parametrize(
    ("overrides", "precisions"),  # precisions of reward, critic, reference, trainer and policy
    [
        ((), ["float32"] * 5),
        (("reward.device=cuda", "trainer.device=cuda:1"), ["bfloat16", "float32", "float32", "bfloat16", "float32"]),
        (
            ("actor.policy.device=cuda:3", "actor.kl.reference=triton", "critic.device=cuda", "critic.dtype=float32"),
            ["float32", "float32", "bfloat16", "float32", "bfloat16"],
        ),
        (
            ("trainer={device: cuda, precision: auto}", "actor.policy={device: cuda, precision: float32}"),
            ["float32", "float32", "float32", "bfloat16", "float32"],
        ),
    ],
)
def test_default_precision_is_bfloat16_only_on_gpus(tmp_path, overrides, precisions):
    config = load(tmp_path, "{}", *overrides)
    served = [section.dtype for section in (config.reward, config.critic, config.reference)]
    assert [*served, config.trainer.precision, config.actor.policy.precision] == precisions
    assert ("bfloat16" in config.gpu_precisions) == ("bfloat16" in precisions)
    config = load(tmp_path, "{}", "actor.kl.reference=triton", "actor.policy.precision=bfloat16")
    assert config.reference.dtype == "bfloat16", "the reference's dtype is not the policy's"


def test_deterministic_fixes_dependent_settings(tmp_path):
    """Readers of the configuration see plain values, and no setting is left to be measured."""
    config = load(tmp_path, "run: {deterministic: true}", "critic.threads=3", "actor.max_staleness=0")
    assert (config.actor.max_staleness, config.actor.rewards.max_failed_fraction) == (0, 0)
    for section in (config.reward, config.critic):
        assert section.token_budget == 1
    assert (config.reward.threads, config.critic.threads) == (1, 3)
    assert load(tmp_path, dumped(config)) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor.max_staleness=1",
            "actor.max_staleness: 1, but run.deterministic: true needs 0; remove actor.max_stale",
        ),
        ("actor.policy.device=cuda", "actor.policy.device: 'cuda', but run.deterministic: true needs 'cpu'"),
    ],
)
def test_deterministic_run_refuses_settings_that_change_results(tmp_path, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, "run: {deterministic: true}", override)
    load(tmp_path, "", override)


def test_deterministic_run_refuses_an_environment_whose_turns_vllm_generates(tmp_path):
    generation = "actor.generation={engine: vllm, vllm: {servers: ['a:1']}}"
    overrides = ["environment.class=a.py:B", "actor.algorithm.old_logprobs=sampler", generation]
    load(tmp_path, "", *overrides)
    with pytest.raises(ConfigError, match=r"run\.deterministic: with an environment, vLLM's turns differ"):
        load(tmp_path, "run: {deterministic: true}", *overrides)


def test_prompts_come_from_path_or_files(tmp_path):
    config = load(tmp_path, "actor: {prompts: {files: [{path: a}, {path: b, weight: 2}]}}")
    assert load(tmp_path, dumped(config)) == config
    prompts = load(tmp_path, "actor: {prompts: {files: [], path: a.jsonl}}").actor.prompts
    (source,) = prompts.sources
    assert prompts.paths == {"actor.prompts.path": source.path} == {"actor.prompts.path": Path("a.jsonl")}


# ---- GPUs ----

LAYOUTS = {  # overrides -> what the error says; None: accepted
    "all roles on the only GPU": (
        ["reward.device=cuda", "critic.device=cuda", "trainer.device=cuda", "actor.policy.device=cuda:0"],
        None,
    ),
    "ranks of actor and trainer from the same GPU on": (
        ["actor.policy.device=cuda", "actor.ranks=4", "trainer.device=cuda", "trainer.ranks=2"],
        r"trainer.device \(cuda:0 to cuda:1\) and actor.policy.device \(cuda:0 to cuda:3\) share cuda:0, cuda:1; ",
    ),
    "ranks beside each other": (
        [
            *("actor.policy.device=cuda", "actor.ranks=4", "trainer.device=cuda:4", "trainer.ranks=2"),
            *("reward.device=cuda:6", "critic.device=cuda:7"),
        ],
        None,
    ),
    "a served model inside the actor's range": (
        ["actor.policy.device=cuda:2", "actor.ranks=2", "critic.device=cuda:3"],
        r"critic.device \(cuda:3\) and actor.policy.device \(cuda:2 to cuda:3\) share cuda:3; ",
    ),
    "a served model on every GPU": (
        ["actor.policy.device=cuda:6", "actor.ranks=2", "reward.device=cuda"],
        r"reward.device \(every GPU\) and actor.policy.device \(cuda:6 to cuda:7\) share cuda:6, cuda:7; ",
    ),
    "tensor parallelism": (
        ["critic.device=cuda:2", "critic.tensor_parallel=4", "trainer.device=cuda:5"],
        r"critic.device \(cuda:2 to cuda:5\) and trainer.device \(cuda:5\) share cuda:5; ",
    ),
    "vLLM": (
        [
            *("actor.generation.engine=vllm", "actor.generation.vllm.cuda_devices='2, 3'"),
            *("actor.policy.device=cuda", "actor.ranks=4"),
        ],
        r"actor.policy.device \(cuda:0 to cuda:3\) and actor.generation.vllm.cuda_devices .* share cuda:2, cuda:3; ",
    ),
    "machines of their own": (
        [
            *("actor.client.servers=[a:8000]", "actor.policy.device=cuda", "actor.ranks=8"),
            *("trainer.device=cuda", "trainer.ranks=8", "reward.device=cuda", "critic.device=cuda:1"),
        ],
        None,
    ),
    "on the CPU": (["actor.ranks=4", "trainer.ranks=4", "reward.device=cuda"], None),
}


@pytest.mark.parametrize(("overrides", "error"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_roles_with_several_gpus_must_not_overlap_with_others(tmp_path, overrides, error):
    with pytest.raises(ConfigError, match=error) if error else contextlib.nullcontext():
        load(tmp_path, yaml.safe_dump({"run": {"dir": str(tmp_path)}}), *overrides)


def test_role_occupies_consecutive_gpus_from_its_device(tmp_path, monkeypatch):
    assert devices_of("cuda", 2) == ("cuda:0", "cuda:1")
    assert devices_of("cuda:4", 4) == ("cuda:4", "cuda:5", "cuda:6", "cuda:7")
    assert (devices_of("cuda:1"), devices_of("cpu", 2), device_of("cpu", 3)) == (("cuda:1",), ("cpu", "cpu"), "cpu")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda:4") == "cuda:7"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # on several nodes: the GPUs of each
    config = load(tmp_path, "actor: {ranks: 16, policy: {device: cuda}}\ntrainer: {ranks: 2, device: 'cuda:8'}\n")
    places = {place.key: place.gpus for place in config.places}
    assert places["actor.policy.device"] == devices_of("cuda", 8)
    assert places["trainer.device"] == ("cuda:8", "cuda:9")


# ---- names of other trainers ----


VALUES = {
    "bnpo",
    "cispo",
    "dr_grpo",
    "grpo",
    "luspo",
    "none",
    "reinforce",
    "reinforce_baseline",
    "group_norm",
    "rloo",
    "serve_rm",
    "vespo",
}


def names_elsewhere():
    """Return {setting of another trainer: our keys for it} from docs/coming-from.md; the set may be empty.

    Dotted names of OpenRLHF and verl are complete; of NeMo-Aligner's names only the last part is used.
    """
    named = {}
    is_verl = False
    for line in (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").splitlines():
        is_verl |= line == "## verl"
        left, _, right = line.strip("| ").partition(" | ")
        keys = set(re.findall(r"(?:run|server|rewards?|reference|critic|trainer|actor|environment)\.[\w.<>]+\w", right))
        for dashes, setting in re.findall(r"`(?:(--)|\.)?([\w.]+)[`: ]", left):
            if keys or right.startswith(("none", "always")):
                named.setdefault(setting if dashes or is_verl else setting.rpartition(".")[2], set()).update(keys)
    return {name: keys for name, keys in named.items() if name.islower() and name not in VALUES}


@pytest.mark.parametrize("level", ["{%s: 1}", "actor: {%s: 1}", "actor: {algorithm: {%s: 1}}"])
def test_keys_of_other_trainers_get_the_right_hint(tmp_path, level):
    named = names_elsewhere()
    wrong = {}
    assert len(named) > 200
    for name, keys in named.items():
        if "." in name and level != "{%s: 1}":
            continue
        try:
            load(tmp_path, level % name.replace(".", ": {") + "}" * name.count("."))
        except ConfigError as error:
            hints = [rf"(did you mean|or) {re.escape(key)}[? ]" for key in keys] or ["no such setting"]
            if "unknown key" in str(error) and not any(re.search(hint, str(error)) for hint in hints):
                wrong[name] = str(error)
    assert wrong == {}


ELSEWHERE = {  # our key, "" for none, None for no guess -> names in TRL 1.16, OpenRLHF 0.11 and verl 0.9, by hand
    "actor.policy.model": "actor.model_name_or_path actor_rollout_ref.model.path",
    "critic.model": "critic.model_name_or_path critic.model.path",
    "reward.device": "reward.num_gpus_per_node reward.reward_model.n_gpus_per_node",
    "reward.model": "reward.model_name_or_path reward.reward_model.model_path reward_model.model.path",
    "rewards.<name>.function": "reward_funcs reward.remote_url reward.custom_reward_function.path",
    "actor.prompts.path": "train_dataset data.prompt_dataset data.train_files",
    "actor.prompts.max_tokens": "data.max_len data.max_prompt_length actor_rollout_ref.rollout.prompt_length",
    "actor.prompts.too_long": "data.truncation data.filter_overlong_prompts",
    "actor.validation.prompts": "eval_dataset eval.dataset data.val_files",
    "actor.validation.every": "eval_strategy eval.steps trainer.test_freq",
    "actor.validation.greedy": "actor_rollout_ref.rollout.val_kwargs.do_sample",
    "actor.rollout_size": "generation_batch_size rollout.batch_size data.train_batch_size",
    "actor.update.minibatch_size": "per_device_train_batch_size train.batch_size ppo_mini_batch_size",
    "actor.update.minibatch_size (OpenRLHF) or actor.rollout_size (verl)": "train_batch_size",
    "actor.update.epochs": "num_iterations train.max_epochs actor_rollout_ref.actor.ppo_epochs",
    "trainer.epochs": "critic.ppo_epochs",
    "trainer.global_batch_size": "critic.ppo_mini_batch_size",
    "trainer.token_budget": "critic.ppo_micro_batch_size_per_gpu critic.use_dynamic_bsz",
    "trainer.clip_value": "critic.value_clip critic.cliprange_value",
    "trainer.lora_rank": "critic.model.lora_rank critic.model.lora.rank",
    "trainer.optimizer.lr": "critic.adam.lr critic.optim.lr critic_lr",
    "trainer.optimizer.min_lr": "critic.min_lr_ratio critic.lr_scheduler",
    "trainer.ranks": "critic.num_gpus_per_node critic.strategy",
    "actor.policy.token_budget": (
        "train.micro_batch_size rollout.micro_batch_size actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    ),
    "actor.policy.precision": "dtype bf16 ds.param_dtype actor_rollout_ref.actor.fsdp_config.dtype",
    "actor.policy.lora_rank": "lora_r actor.policy.lora peft_config ds.lora.rank actor_rollout_ref.model.lora.rank",
    "actor.policy.lora_targets": "lora_target_modules ds.lora.target_modules",
    "actor.policy.gradient_checkpointing": "actor.gradient_checkpointing_enable enable_gradient_checkpointing",
    "actor.generation.engine": "use_vllm vllm.num_engines actor_rollout_ref.rollout.name",
    "actor.generation.max_new_tokens": "max_completion_length rollout.max_new_tokens max_response_length",
    "actor.generation.batch_size": "per_device_eval_batch_size rollout.vllm_generate_batch_size",
    "actor.generation.temperature": "temperature rollout.temperature actor_rollout_ref.rollout.temperature",
    "actor.algorithm.name": "scale_rewards algo.advantage.estimator algorithm.adv_estimator adv_estimator",
    "actor.algorithm.responses_per_prompt": "num_generations rollout.n_samples_per_prompt actor_rollout_ref.rollout.n",
    "actor.algorithm.clip_ratio": "epsilon actor.eps_clip actor_rollout_ref.actor.clip_ratio_low",
    "actor.algorithm.entropy_bonus": "entropy_coef actor.entropy_coef actor_rollout_ref.actor.entropy_coeff",
    "actor.algorithm.gamma": "algo.advantage.gamma algorithm.gamma",
    "actor.algorithm.loss": "actor.policy_loss_type actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor.algorithm.max_resampled": "algo.dynamic_filtering_enable algorithm.filter_groups.enable",
    "actor.algorithm.correction": "algo.advantage.is_correction_enable algo.advantage.is_correction_type",
    "actor.algorithm.correction.high": "vllm_importance_sampling_cap algorithm.rollout_correction.rollout_is_threshold",
    "actor.kl.coef": "beta algo.kl.init_coef actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef",
    "actor.kl.penalty_in": "algo.kl.use_loss use_kl_loss algorithm.use_kl_in_reward",
    "actor.optimizer.lr": "learning_rate learing_rate actor.adam.lr actor_rollout_ref.actor.optim.lr actor.optim.lr",
    "actor.optimizer.grad_clip": "max_grad_norm actor.max_norm actor_rollout_ref.actor.optim.clip_grad",
    "actor.steps": "num_train_epochs train.num_episodes trainer.total_epochs",
    "actor.checkpoint_every": "save_strategy ckpt.save_steps trainer.save_freq",
    "actor.ranks": "fsdp actor.num_nodes trainer.n_gpus_per_node",
    "actor.trackers": "report_to logger.wandb.key trainer.logger",
    "run.dir": "output_dir ckpt.output_dir trainer.default_local_dir",
    "run.run_id": "run_name trainer.experiment_name",
    "run.seed": "train.seed data.seed",
    "environment.max_turns": "max_tool_calling_iterations actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "": (
        "entropy_coef_min vllm_tensor_parallel_size lora_dropout adam_beta1 do_train project actor.adam.betas "
        "reward.learning_rate reward.num_iterations critic.veomni "
        "critic.adam.eps train.colocate_all train.enable_ema ref.offload eval.n_samples_per_prompt data.max_samples "
        "vllm.sync_backend ds.packing_samples ds.tensor_parallel_size algo.dynamic_filtering_range "
        "critic.loss_agg_mode data.image_key actor_rollout_ref.rollout.mode actor_rollout_ref.rollout.val_kwargs.n "
        "actor_rollout_ref.ref.fsdp_config.seed actor_rollout_ref.rollout.trace.project_name critic.model.lora.dtype "
        "reward_model.model.fsdp_config.fsdp_size "
        "reward.reward_model.rollout.temperature reward.reward_model.rollout.n critic.checkpoint.save_contents "
        "distillation.distillation_loss.clip_ratio_high trainer.project_name trainer.balance_batch"
    ),
    None: "eval_delay local_rank actor.policy.local_rank run.load_format actor.checkpoint_engine type",
}


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in ELSEWHERE.items() for name in names.split()])
def test_names_and_paths_of_other_trainers_lead_to_our_key(tmp_path, key, name):
    hint = f"did you mean {key}?" if key else "known: " if key is None else "this project has no such setting"
    with pytest.raises(ConfigError, match=rf"unknown key {re.escape(name)}; {re.escape(hint)}"):
        load(tmp_path, "{}", f"{name}=1")


VALUES_ELSEWHERE = {  # our value of a key, "" for no guess -> values of that setting in TRL, OpenRLHF and verl, by hand
    ("actor.algorithm.name", "ppo"): "gae PPO",
    ("actor.algorithm.name", "grpo"): "group_norm grpo_vectorized gpro",
    ("actor.algorithm.name", "rloo"): "rloo_vectorized",
    ("actor.algorithm.name", "reinforce++"): "reinforce reinforce_plus_plus",
    ("actor.algorithm.name", "reinforce++-baseline"): "reinforce_baseline reinforce_plus_plus_baseline",
    ("actor.algorithm.name", ""): "remax opo sapo xpo gpg grpo_passk",
    ("actor.algorithm.loss", "clipped"): "ppo vanilla grpo dapo",
    ("actor.algorithm.loss", ""): "clip_cov kl_cov sapo luspo vespo geo_mean gpg",
    ("actor.algorithm.loss_mean", "token"): "token-mean dapo bnpo",
    ("actor.algorithm.loss_mean", "sequence"): "seq-mean-token-mean grpo",
    ("actor.algorithm.loss_mean", "constant"): "dr_grpo seq-mean-token-sum-norm",
    ("actor.kl.estimator", "k1"): "kl",
    ("actor.kl.estimator", "k2"): "mse",
    ("actor.kl.estimator", "k3"): "low_var_kl",
    ("actor.kl.estimator", ""): "full",
    ("actor.optimizer.kind", "adamw"): "adamw_torch adamw_torch_fused AdamW",
    ("actor.optimizer.kind", ""): "muon adafactor",
    ("actor.policy.precision", "bfloat16"): "bf16",
    ("actor.policy.precision", "float32"): "fp32",
    ("actor.generation.engine", ""): "hf sglang trtllm",
}


@pytest.mark.parametrize(
    ("key", "ours", "value"),
    [(key, ours, value) for (key, ours), values in VALUES_ELSEWHERE.items() for value in values.split()],
)
def test_values_of_other_trainers_lead_to_ours(tmp_path, key, ours, value):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "{}", f"{key}={value}")
    assert ("did you mean" in str(error.value)) is bool(ours)
    assert not ours or f"; did you mean {ours}? (got {value!r})" in str(error.value)


def test_every_key_in_a_section_of_another_trainer_gets_its_own_line(tmp_path):
    text = (
        "actor_rollout_ref: {actor: {ppo_epochs: 2, optim: {lr: 1e-6}}, rollout: {n: 5}}\nchat_template_kwargs: {a: 1}"
    )
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, "critic.model.path=a")
    assert [line.partition(": unknown key ")[2] for line in str(error.value).splitlines()] == [
        "critic.model.path; did you mean critic.model?",
        "actor_rollout_ref.actor.ppo_epochs; did you mean actor.update.epochs?",
        "actor_rollout_ref.actor.optim.lr; did you mean actor.optimizer.lr?",
        "actor_rollout_ref.rollout.n; did you mean actor.algorithm.responses_per_prompt?",
        "chat_template_kwargs; this project has no such setting: give them as a column of the prompts, or in a "
        "request's metadata",
    ]


@pytest.mark.parametrize("section", ["", "actor.", "trainer.", "critic.", "reward.", "reference."])
def test_hints_name_only_keys_that_exist(section):
    valid = [*keys_of(RunConfig, ""), *(f"rewards.<name>.{key}" for key in RewardTerm.model_fields)]
    hints = [hint_at(section + name, valid) or "" for name in OTHER_NAMES]
    named = {*re.findall(r"(?<![\w./])[a-z]+\.[\w.<>]+\w", " ".join((*hints, *ADVICE)))}
    assert len(named) > 80
    assert named - {*valid} == {"config.json", "sample.metadata"}


def test_hidden_variables_excludes_only_the_functions_own_key(tmp_path):
    text = (
        "{server: {training_key_env: A}, gateway: {key_env: B}, "
        "rewards: {judge: {function: 'a.py:f', options: {api_key_env: C}}}}"
    )
    config = load(tmp_path, text)
    hidden = {*config.hidden_variables({})}
    assert hidden >= {"A", "B", "C"}
    assert hidden - {*config.hidden_variables({"api_key_env": "C"})} == {"C"}


def test_byte_order_mark_of_a_template_file_is_not_part_of_the_template(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_bytes(codecs.BOM_UTF8 + b"{{ response }}")
    assert read_template(str(file)) == "{{ response }}"
