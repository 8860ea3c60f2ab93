"""`python_backend.config`: one YAML, typed; what is wrong in it is said by key and value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from python_backend.config import ConfigError, RunConfig, load_config
from python_backend.config.required_files import check_critic, check_files
from tools.calibrate.calibration import settle

ROOT = Path(__file__).resolve().parents[2]


def load(tmp_path: Path, text: str | bytes = "", *overrides: str) -> RunConfig:
    path = tmp_path / "my.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path, overrides)


def test_an_empty_file_is_all_defaults(tmp_path: Path):
    assert load(tmp_path) == RunConfig()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_repositorys_own_files_are_valid(path: Path):
    load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {step: 3}", "unknown key actor.step; did you mean actor.steps?"),
        ("actor: {learing_rate: 1e-6}", "unknown key actor.learing_rate; did you mean actor.optimizer.lr?"),
        (
            "actor: {num_generations: 8}",
            "unknown key actor.num_generations; did you mean actor.algorithm.responses_per_prompt?",
        ),
        ("actr: {steps: 3}", "unknown key actr; did you mean actor?"),
        ("trainer: {publish: {evry: 3}}", "unknown key trainer.publish.evry; did you mean trainer.publish.every?"),
        ("actor: {client: {retry: 3}}", "unknown key actor.client.retry; did you mean actor.client.retries?"),
        ("report: my_report.py", "report: 'my_report.py' does not name a function; write path/to/file.py:name or"),
        ("reward: {standardization: {meen: 1}}", "did you mean reward.standardization.mean?"),
        (
            "zzz: 1",
            "unknown key zzz; known: run, server, reward, rewards, critic, reference, trainer, actor, gateway, "
            "monitoring, report",
        ),
        ("1: 2", "1: Keys should be strings"),
        ("actor: {steps: 0}", "actor.steps: Input should be greater than or equal to 1 (got 0)"),
        ("actor: {steps: many}", "actor.steps: Input should be a valid integer"),
        ("actor: {optimizer: {lr: .nan}}", "actor.optimizer.lr: Input should be a finite number (got nan)"),
        ("actor: {algorithm: {clip_ratio: 1}}", "actor.algorithm.clip_ratio: Input should be less than 1 (got 1)"),
        ("actor: {optimizer: {betas: [0.9, 1.0]}}", "actor.optimizer.betas.1: Input should be less than 1 (got 1.0)"),
        ("actor: {optimizer: {betas: [0.9]}}", "actor.optimizer.betas.1 is missing"),
        (
            "actor: {kl: {estimator: k9}}",
            "actor.kl.estimator: Input should be one of 'auto', 'k1', 'abs', 'k2', 'k3' (got 'k9')",
        ),
        ("actor: {algorithm: {name: gpro}}", "'rloo', 'grpo'; did you mean grpo? (got 'gpro')"),
        (
            "actor: {algorithm: {loss: cliped}}",
            "actor.algorithm.loss: Input should be one of 'auto', 'clipped', 'reinforce', or path/to/file.py:name; did",
        ),
        ("actor: {algorithm: {loss: 'my loss:'}}", "'my loss:' does not name a function; write path/to/file.py:name"),
        (
            "trainer: {attention: flash_attention_2}",
            "trainer.attention: flash_attention_2 needs CUDA, and trainer.device is cpu; set it to sdpa",
        ),
        (
            "actor: {policy: {attention: flash_attention_2, device: cuda, precision: float32}}",
            "actor.policy.attention: flash_attention_2 needs actor.policy.precision: bfloat16, not float32",
        ),
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
        ("trainer: {lora_targets: [q_proj]}", "need trainer.lora_rank above 0; set it, or remove them"),
        ("actor: {learning_rate: 1}", "unknown key actor.learning_rate; did you mean actor.optimizer.lr?"),
        ("actor: {lr: 1}", "unknown key actor.lr; did you mean actor.optimizer.lr?"),
        ("trainer: {lr: 1}", "unknown key trainer.lr; did you mean trainer.optimizer.lr?"),
        ("actor: {generation: {batchsize: 1}}", "did you mean actor.generation.batch_size?"),
        ("actor: {optimizer: {beta: 1}}", "did you mean actor.optimizer.betas?"),
        ("actor: {update: {batch_size: 1}}", "did you mean actor.update.minibatch_size?"),
        ("actor: {eval_steps: 1}", "did you mean actor.validation.every?"),
        ("actor: {mask_truncated_completions: true}", "did you mean actor.algorithm.mask_unfinished?"),
        ("actor: {kl_coef: 1}", "unknown key actor.kl_coef; did you mean actor.kl.coef?"),
        ("actor: 3", "actor is a section, not a value (got 3); its keys are ranks, steps,"),
        (
            "actor: {prompts: a.jsonl}",
            "actor.prompts is a section, not a value (got 'a.jsonl'); its keys are path, files, max_tokens, too_long",
        ),
        (
            "rewards: {share: 'my.py:share'}",
            "rewards.share is a section, not a value (got 'my.py:share'); its keys are weight, function,",
        ),
        ("run: {trace_endpoint: foo}", "run.trace_endpoint: must be a URL such as http://localhost:4318 (got 'foo')"),
        ("critic: {device: gpu}", "critic.device: String should match"),
        ("critic: {preferred_batch_size: [0]}", "critic.preferred_batch_size"),
        ("run: {seed: -1}", "run.seed: Input should be greater than or equal to 0 (got -1)"),
        ("run: {seed: 4294967296}", "run.seed: Input should be less than 4294967296"),
        ("run: {run_id: a b}", "run.run_id: use 1 to 64 letters, digits, '.', '_' or '-'"),
        ("server: {http_port: 70000}", "server.http_port: Input should be less than or equal to 65535 (got 70000)"),
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
            "actor: {algorithm: {name: rloo, responses_per_prompt: 2}, one_step_off_policy: true}",
            "actor.one_step_off_policy: rloo's loss is on-policy",
        ),
        *[
            (
                f"actor: {{algorithm: {{name: {name}, responses_per_prompt: 2}}, rewards: {{missing_eos_penalty: 1}}}}",
                f"actor.rewards.missing_eos_penalty (1) has no effect under {name} with actor.algorithm.mask_",
            )
            for name in ("rloo", "grpo", "reinforce++")
        ],
        ("actor: {kl: {coef: 0, target: 6}}", "actor.kl.target (6) scales actor.kl.coef, which is 0 and stays 0"),
        (
            "trainer: {optimizer: {max_steps: 100}}",
            "trainer.optimizer.warmup_steps (10) + trainer.optimizer.constant_steps (1000) is more than trainer.",
        ),
        (
            "critic: {tensor_parallel: 2, workers: 3}",
            "critic.workers is 3, but critic.tensor_parallel (2) needs 1: all devices run each forward pass together",
        ),
        ("reward: {tensor_parallel: 2, instances: 2}", "reward.instances is 2, but reward.tensor_parallel (2) needs 1"),
        ("reference: {tensor_parallel: 4, compile: true}", "reference.tensor_parallel (4) needs False"),
        ("rewards: {a: {function: f.py:f, tensor_parallel: 2}}", "unknown key rewards.a.tensor_parallel"),
        ("- 1", "my.yaml must contain sections"),
        ("a: [", "my.yaml is not valid YAML"),
        (b"\xff\xfe", "my.yaml is not valid YAML"),
    ],
)
def test_what_is_wrong_is_said_by_key_and_value(tmp_path: Path, text: str | bytes, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, text)


def test_all_problems_are_said_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "actor: {step: 3, optimizer: {lr: -1}}\nserver: {http_port: x}")
    assert [line.split("my.yaml: ")[1][:16] for line in str(caught.value).splitlines()] == [
        "server.http_port",
        "actor.optimizer.",
        "unknown key acto",
    ]


def test_a_missing_file_is_named(tmp_path: Path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"cannot read the configuration {path}")):
            load_config(path)


def test_overrides_win_over_the_file(tmp_path: Path):
    config = load(
        tmp_path,
        "actor: {steps: 3, optimizer: {lr: 0.1}}",
        "actor.steps=5",
        "actor.client.retries=0",
        "run.dir=runs/a=b",
        "trainer.optimizer.betas=[0.5, 0.6]",
        "actor.validation.prompts=null",
        "reward.standardization={mean: 1, std: 2}",
    )
    assert (config.actor.steps, config.actor.optimizer.lr, config.actor.client.retries) == (5, 0.1, 0)
    assert config.run.dir == Path("runs/a=b")
    assert config.trainer.optimizer.betas == (0.5, 0.6)
    assert config.reward.standardization.std == 2
    assert load(tmp_path, "actor:", "actor.steps=2").actor.steps == 2  # a section with nothing in it


def test_scientific_notation_is_a_number(tmp_path: Path):
    assert load(tmp_path, "actor: {optimizer: {lr: 1e-3}}").actor.optimizer.lr == 1e-3  # YAML 1.1 reads it as text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.steps", "override 'actor.steps' must have the form section.key=value"),
        ("=3", "override '=3' must have the form"),
        ("actor.steps=[", "override 'actor.steps=[': the value is not valid YAML"),
        ("actor.stepz=3", "override 'actor.stepz=3': unknown key actor.stepz; did you mean actor.steps?"),
        ("actr.steps=3", "override 'actr.steps=3': unknown key actr; did you mean actor?"),
        ("actor..steps=3", "override 'actor..steps=3': unknown key actor."),
        ("actor.steps=x", "override 'actor.steps=x': actor.steps: Input should be a valid integer"),
        (
            "actor.optimizer.min_lr=500",
            "override 'actor.optimizer.min_lr=500': actor.optimizer.min_lr (500) is above actor.optimizer.lr (9e-07)",
        ),
        ("run.dir.x=1", "override 'run.dir.x=1': 'dir' is a value, not a section"),
    ],
)
def test_overrides_are_refused_by_name(tmp_path: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, "run: {dir: here}", override)


@pytest.mark.parametrize(
    ("folder", "identity"), [("runs/demo", "demo"), ("my run!", "my-run-"), ("_._", "run"), ("x" * 99, "x" * 64)]
)
def test_the_run_is_named_by_its_folder(tmp_path: Path, folder: str, identity: str):
    config = load(tmp_path, "", f"run.dir={tmp_path / folder}")
    assert config.run.identity == identity
    assert load(tmp_path, "", f"run.run_id={identity}").run.identity == identity  # and may be written out


def sections_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += sections_of(field.annotation)
    return found


def test_every_key_has_a_default_and_says_what_it_is():
    for section in sections_of(RunConfig):
        for name, field in section.model_fields.items():
            assert not field.is_required(), f"{section.__name__}.{name}"
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            text = field.description or (field.annotation.__doc__ if is_section else None)
            assert text, f"{section.__name__}.{name}"


def test_the_defaults_are_valid_themselves(tmp_path: Path):
    """pydantic does not check defaults: a round trip through YAML does."""
    dumped = RunConfig().model_dump(mode="json", exclude={"report"})
    assert load(tmp_path, yaml.safe_dump(dumped)) == RunConfig()


def test_a_small_rollout_is_one_minibatch(tmp_path: Path):
    actors = [load(tmp_path, "", f"actor.rollout_size={size}").actor for size in (8, 32, 33)]
    assert [actor.is_one_update for actor in actors] == [True, True, False]
    assert [actor.optimizer_steps // actor.steps for actor in actors] == [1, 1, 2]


def test_what_is_wrong_in_the_file_is_not_blamed_on_an_override(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "actor: {step: 3}", "actor.steps=3", "actor.step_size=2")
    assert [line.rpartition(": unknown")[0].rpartition("/")[2] for line in str(caught.value).splitlines()] == [
        "my.yaml",
        "override 'actor.step_size=2'",
    ]


def test_an_override_of_one_section_leaves_its_alias_alone(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("reward: &same {threads: 2}\ncritic: *same\n")
    config = load_config(path, ["reward.checkpoint=a", "critic.checkpoint=b", "critic.threads=3"])
    assert (str(config.reward.checkpoint), str(config.critic.checkpoint)) == ("a", "b")
    assert (config.reward.threads, config.critic.threads) == (2, 3)


# ---- run.deterministic ----


@pytest.mark.parametrize(
    ("overrides", "precisions"),  # of reward, critic, reference, trainer and policy
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
def test_the_default_precision_is_bfloat16_on_gpus_alone(
    tmp_path: Path, overrides: tuple[str, ...], precisions: list[str]
):
    config = load(tmp_path, "{}", *overrides)
    served = [section.dtype for section in (config.reward, config.critic, config.reference)]
    assert [*served, config.trainer.precision, config.actor.policy.precision] == precisions
    assert ("bfloat16" in config.gpu_precisions) == ("bfloat16" in precisions)


def test_the_precision_of_models_on_gpus_is_printed_at_the_start(tmp_path: Path):
    config = load(tmp_path, "{}", "critic.device=cuda:2", "actor.policy={device: cuda, precision: float32}")
    assert config.gpu_precisions == "critic cuda:2 in bfloat16, actor.policy cuda in float32"
    assert load(tmp_path, "{}").gpu_precisions == ""


def test_a_deterministic_run_has_its_values_settled(tmp_path: Path):
    """Whoever loads it sees plain values, and nothing is left to be measured."""
    config = load(tmp_path, "run: {deterministic: true}", "critic.token_budget=333", "actor.max_staleness=0")
    assert (config.actor.max_staleness, config.actor.rewards.max_failed_fraction) == (0, 0)
    for section in (config.reward, config.critic):
        assert section.micro_batch_rows == 1
        assert settle(config, lambda line: pytest.fail(line)) == []
    assert (config.reward.token_budget, config.critic.token_budget) == (1024, 333)
    assert load(tmp_path, yaml.safe_dump(config.model_dump(mode="json", exclude={"report"}))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor.max_staleness=1",
            "actor.max_staleness: 1, but run.deterministic: true needs 0; remove actor.max_stale",
        ),
        ("trainer.publish.every=2", "trainer.publish.every: 2, but run.deterministic: true needs 1"),
        ("critic.micro_batch_rows=64", "critic.micro_batch_rows: 64, but run.deterministic: true needs 1"),
        ("reward.compile=true", "reward.compile: True, but run.deterministic: true needs False"),
        ("actor.policy.device=cuda", "actor.policy.device: 'cuda', but run.deterministic: true needs 'cpu'"),
    ],
)
def test_a_deterministic_run_refuses_what_would_change_bits(tmp_path: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, "run: {deterministic: true}", override)
    load(tmp_path, "", override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("trainer.device=cuda", "trainer.precision=bfloat16", "trainer.attention=flash_attention_2"),
            "trainer.attention: needs the package flash-attn, which is not installed; install it, or set sdpa",
        ),
        (
            ("trainer.device=cuda", "trainer.optimizer.kind=adamw_8bit"),
            "trainer.optimizer.kind: needs the package bitsandbytes, which is not installed; install it, or set adamw",
        ),
    ],
)
def test_a_package_that_is_not_installed_is_named_before_the_start(
    tmp_path: Path, overrides: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("python_backend.config.training.importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_critic(load(tmp_path, "", *overrides))
    actors = [
        f"actor.policy{item.removeprefix('trainer')}".replace("policy.optimizer", "optimizer") for item in overrides
    ]
    with pytest.raises(ConfigError, match=re.escape(message.partition(":")[2])):
        check_files(load(tmp_path, "", *actors), actor=True)


def names_elsewhere() -> dict[str, set[str]]:
    """Return {setting of another trainer: our keys for it} as docs/coming-from.md has them; no keys: none here."""
    named: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").splitlines():
        left, _, right = line.strip("| ").partition(" | ")
        keys = set(re.findall(r"(?:run|server|rewards?|critic|trainer|actor)\.[\w.<>]+\w", right))
        for setting in re.findall(r"`(?:--|\.)?([\w.]+)[`: ]", left):
            if keys or right.startswith("none"):
                named.setdefault(setting.rpartition(".")[2], set()).update(keys)
    values = {
        "reinforce",
        "rloo",
        "reinforce_baseline",
        "group_norm",
        "dr_grpo",
        "bnpo",
    }  # of settings, in the same column
    return {name: keys for name, keys in named.items() if name.islower() and name not in values}


@pytest.mark.parametrize("level", ["{%s: 1}", "actor: {%s: 1}", "actor: {algorithm: {%s: 1}}", "run: {%s: 1}"])
def test_names_of_other_trainers_get_the_right_hint(tmp_path: Path, level: str):
    named, wrong = names_elsewhere(), {}
    assert len(named) > 120
    for name, keys in named.items():
        try:
            load(tmp_path, level % name)
        except ConfigError as error:
            hints = {f"did you mean {key}?" for key in keys} or {"no such setting here"}
            if "unknown key" in str(error) and not any(hint in str(error) for hint in hints):
                wrong[name] = str(error)
    assert wrong == {}
