"""The rendered reference: there where the actor asks for it, under what the actor samples with; and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_system import make_checkpoint, make_tokenizer

from python_backend.checkpoints.inspection import fingerprint_weights
from python_backend.checkpoints.tokenization import fingerprint
from python_backend.config import ActorSection, ConfigError, RunConfig, load_config
from python_backend.config.sections import UNMEASURED
from python_backend.wire import contract
from tests.support.settings import nested
from tools import render_configs as render
from tools.calibrate.calibration import settle


def load(tmp_path: Path, **sections: dict[str, Any]) -> RunConfig:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({**sections, "actor": nested(ActorSection, sections.get("actor", {}))}))
    return load_config(path)


def rendered(config: RunConfig) -> Any:
    return render.parse_config(contract.REFERENCE, render.render_configs(config)[contract.REFERENCE])


def parameters(message: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in message.parameters.items()}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def test_it_is_rendered_only_where_the_actor_asks_for_it(tmp_path: Path) -> None:
    plain, with_it = RunConfig(), RunConfig.model_validate({"actor": {"kl": {"reference": "triton"}}})
    assert contract.REFERENCE not in render.render_configs(plain)
    assert set(render.render_configs(with_it)) - set(render.render_configs(plain)) == {contract.REFERENCE}
    render.render_repository(with_it, tmp_path)
    model = tmp_path / contract.REFERENCE / "1" / "model.py"
    assert "from python_backend.serving.reference import TritonPythonModel" in model.read_text()
    assert not render.check_repository(with_it, tmp_path)
    assert [drift.path for drift in render.check_repository(plain, tmp_path)] == [tmp_path / contract.REFERENCE]
    render.render_repository(plain, tmp_path)
    assert not (tmp_path / contract.REFERENCE).exists()
    (tmp_path / contract.REFERENCE).mkdir()
    (tmp_path / contract.REFERENCE / "config.pbtxt").write_text('name: "reference"')
    render.render_repository(plain, tmp_path)
    assert (tmp_path / contract.REFERENCE).is_dir()  # somebody else's


def test_names_dtypes_and_shapes_are_the_contracts(tmp_path: Path) -> None:
    from tritonclient.grpc import model_config_pb2 as pb

    for dtype in ("INT64", "INT32"):
        message = rendered(load(tmp_path, actor={"kl_reference": "triton"}, server={"tokens_dtype": dtype}))
        sides = [[(t.name, t.data_type, list(t.dims)) for t in side] for side in (message.input, message.output)]
        assert sides == [
            [(contract.TOKENS, getattr(pb, f"TYPE_{dtype}"), [-1]), (contract.SEQUENCE_LENGTHS, pb.TYPE_INT64, [1])],
            [
                (contract.LOGPROBS, pb.TYPE_FP32, [-1]),
                (contract.QUEUE_US, pb.TYPE_INT64, [1]),
                (contract.COMPUTE_US, pb.TYPE_INT64, [1]),
                (contract.UNNAMED, pb.TYPE_INT64, [1]),
            ],
        ]
        assert [t.name for t in message.input if t.allow_ragged_batch] == [contract.TOKENS]
        assert all(tensor.optional for tensor in message.input)
        assert message.HasField("dynamic_batching")


def test_it_is_what_the_actor_samples_with(tmp_path: Path, policy: Path) -> None:
    settings = {"kl_reference": "triton", "checkpoint": str(policy), "temperature": 0.7, "precision": "bfloat16"}
    found = parameters(rendered(load(tmp_path, actor=settings, reference={"workers": 3})))
    assert (found["checkpoint"], found["workers"], found["dtype"]) == (str(policy), "3", "bfloat16")
    assert (float(found["temperature"]), json.loads(found["banned_token_ids"])) == (0.7, [0, 2])
    assert found["checkpoint_fingerprint"] == fingerprint_weights(policy)
    assert found["tokenizer_fingerprint"] == fingerprint(make_tokenizer())


def test_a_reference_may_have_a_checkpoint_of_its_own(tmp_path: Path, policy: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "policy", make_tokenizer(), seed=4)
    actor = {"kl_reference": "triton", "checkpoint": str(policy)}
    found = parameters(rendered(load(tmp_path, actor=actor, reference={"checkpoint": str(other)})))
    assert found["checkpoint"] == str(other)
    assert found["checkpoint_fingerprint"] == fingerprint_weights(other) != fingerprint_weights(policy)
    assert json.loads(found["banned_token_ids"]) == [0, 2]


def test_the_checkpoint_follows_the_actors(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("actor: {policy: {checkpoint: a}}")
    assert load_config(path).reference.checkpoint == Path("a")
    assert load_config(path, ["actor.policy.checkpoint=b"]).reference.checkpoint == Path("b")
    assert load_config(path, ["reference.checkpoint=c"]).reference.checkpoint == Path("c")


def test_a_policy_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text('{"model_type": "llama"}')
    make_tokenizer().save_pretrained(tmp_path / "policy")
    actor = {"kl_reference": "triton", "checkpoint": str(tmp_path / "policy")}
    with pytest.raises(ConfigError, match=r"reference\.checkpoint: .* has no model\.safetensors"):
        rendered(load(tmp_path, actor=actor))


def test_it_is_measured_only_where_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"reward": UNMEASURED, "critic": UNMEASURED}
    monkeypatch.setattr("tools.calibrate.calibration._remembered", lambda role, *_: pytest.fail(role))
    assert settle(load(tmp_path, **others), print) == []
    with pytest.raises(pytest.fail.Exception, match="reference"):
        settle(load(tmp_path, actor={"kl_reference": "triton"}, **others), print)


def test_a_deterministic_run_fixes_it_too(tmp_path: Path) -> None:
    config = load(tmp_path, run={"deterministic": True}, actor={"kl_reference": "triton", "checkpoint": "a"})
    assert (config.reference.micro_batch_rows, config.reference.workers) == (1, 1)
    assert config.reference.checkpoint == Path("a")
    assert settle(config, print) == []
    with pytest.raises(ConfigError, match=r"reference\.micro_batch_rows: 8, but run\.deterministic: true needs 1"):
        load(tmp_path, run={"deterministic": True}, reference={"micro_batch_rows": 8})
