"""A user's own advantage function and loss: the documented ones train, and what is wrong is one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from live_system import make_checkpoint, make_tokenizer

from python_backend.config import ConfigError, RunConfig
from python_backend.config.required_files import check_files
from python_backend.errors import NotFinite, RlhfError
from tests.support.masked_loss import check_masked_loss, check_on_policy_gradient
from tests.support.policy_training import random_batch, trainable_policy, update_of
from tests.support.scored_rollout import make_batch, method_of, scored_rollout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def documented(tmp_path: Path) -> Path:
    """The example of the page, in a file."""
    section = PAGE.read_text().partition("## Your own advantage or loss")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    (tmp_path / "my_loss.py").write_text(code[1])
    return tmp_path / "my_loss.py"


@pytest.fixture(scope="module")
def policy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def written(folder: Path, body: str) -> str:
    """The spec of a function with this body, of `inputs`."""
    (folder / "mine.py").write_text(f"import torch\n\n\ndef mine(inputs):\n    {body}\n")
    return f"{folder / 'mine.py'}:mine"


def test_the_documented_loss_is_masked_and_trains(documented: Path, policy_checkpoint: Path):
    loss = method_of(loss=f"{documented}:loss").loss
    check_masked_loss(loss)
    check_on_policy_gradient(loss)
    policy = trainable_policy(checkpoint=policy_checkpoint, loss=f"{documented}:loss", lr=1e-2, minibatch_size=2)
    batch = random_batch([6, 5, 7, 4], prompt=2, seed=0)
    found = update_of(policy).run(batch, seed=0, kl_coef=0.0)
    assert found["train_optim/minibatches"] == 2
    assert 0 <= found["train_optim/truncated"] <= 1


def test_the_documented_advantage(documented: Path):
    settings = {"algorithm_name": "reinforce++", "whiten_advantages": False, "mask_unfinished": False, "kl_coef": 0.0}
    batch = make_batch(scored_rollout(), **settings, advantage=f"{documented}:advantage", responses_per_prompt=4)
    assert batch.advantages.amax(-1).tolist() == pytest.approx([1 - 2.5 / 4, 2 - 2.5 / 4, 0.0, 0.0])


ROWS = r"a tensor of shape \(2, 6\)"
LOSSES = [
    ("return inputs.mean(inputs.logprobs) * float('nan'), {}", NotFinite, "returned nan at optimizer step 0"),
    ("return inputs.logprobs, {}", RlhfError, rf"returned {ROWS}, {{}}, but it must return \(loss, metrics\)"),
    ("return inputs.mean(inputs.logprobs)", RlhfError, r"returned a tensor of shape \(\), but it must return"),
    ("return inputs.mean(inputs.logprobs), {'kept': inputs.mask}", RlhfError, rf"returned .*, {{kept: {ROWS}}}, but"),
    ("return inputs.mean(inputs.old_logprobs), {}", RlhfError, "returned .* that depends on inputs.logprobs"),
    ("return inputs.no_such_field, {}", RlhfError, r"failed: AttributeError: .*no_such_field.* \(mine.py:5\)"),
]


@pytest.mark.parametrize(("body", "kind", "problem"), LOSSES)
def test_a_wrong_loss_is_one_sentence_that_names_it(
    tmp_path: Path, policy_checkpoint: Path, body: str, kind: type[Exception], problem: str
):
    spec = written(tmp_path, body)
    policy = trainable_policy(checkpoint=policy_checkpoint, loss=spec, minibatch_size=2)
    before = [parameter.clone() for parameter in policy.model.parameters()]
    with pytest.raises(kind, match=rf"^actor\.algorithm\.loss: {re.escape(spec)} {problem}") as caught:
        update_of(policy).run(random_batch([6, 7], prompt=2, seed=0), seed=0, kl_coef=0.0)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(before, policy.model.parameters(), strict=True))


ADVANTAGES = [
    (
        "return inputs.spread(inputs.totals / 0), inputs.mask",
        r"returned a tensor of shape \(4, 5\) that is not finite, ",
    ),
    ("return inputs.totals, inputs.totals", r"returned a tensor of shape \(4,\), a tensor of shape \(4,\), but"),
    ("return inputs.mask", r"returned a tensor of shape \(4, 5\), but it must return \(advantages, returns\), two"),
    ("return inputs.nothing", r"failed: AttributeError: .*nothing.* \(mine.py:5\)"),
]


@pytest.mark.parametrize(("body", "problem"), ADVANTAGES)
def test_a_wrong_advantage_is_one_sentence_that_names_it(tmp_path: Path, body: str, problem: str):
    spec = written(tmp_path, body)
    with pytest.raises(RlhfError, match=rf"^actor\.algorithm\.advantage: {re.escape(spec)} {problem}"):
        make_batch(scored_rollout(), mask_unfinished=False, kl_coef=0.0, advantage=spec)


def test_a_missing_file_or_function_is_found_before_anything_starts(tmp_path: Path):
    written(tmp_path, "return 0")
    names = {"loss": f"{tmp_path}/mine.py:los", "advantage": f"{tmp_path}/none.py:mine"}
    config = RunConfig.model_validate({"actor": {"algorithm": names}})
    with pytest.raises(ConfigError) as caught:
        check_files(config, actor=True)
    text = str(caught.value)
    assert f"actor.algorithm.loss: {tmp_path}/mine.py has no 'los'; it defines mine" in text
    assert f"actor.algorithm.advantage: {tmp_path}/none.py does not exist" in text
