"""No model ever sends an output that its caller did not request: inside Triton's stub that is memory corruption.

`Call.answer` tells why. The empty request stands for any that leaves out the one output of a model.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import reward_functions
from live_system import Checkpoints, LiveRun, make_run, random_rows, scoring_inputs, training_inputs
from triton_python_backend_utils import InferenceResponse, Request

from python_backend.store.journal_entry import Result
from python_backend.wire.contract import UNNAMED, WHOLE, outputs_of, texts_array
from tools.render_configs import FUNCTION_MODULE, MODULES, parse_config, render_configs
from trainer.publish import initialise_store

KINDS = {
    "reward_checkpoint": "reward",
    "reward_function_length": "function",
    "reward_mixture": "mixture",
    **{name: name for name in ("critic", "critic_train", "critic_save", "reference")},
}
OUTPUTS = {
    model: tuple(output.name for output in outputs_of(kind, traits=(WHOLE,)) if output.name != UNNAMED)
    for model, kind in KINDS.items()
}
ENSEMBLES = {"critic_infer", "reward_model"}
REQUESTED = [
    pytest.param(model, requested, id=f"{model}-{'+'.join(requested) or 'none'}")
    for model, outputs in OUTPUTS.items()
    for count in range(len(outputs) + 1)
    for requested in itertools.combinations(outputs, count)
]
ROWS = random_rows([3, 7], seed=1)
COLUMN = np.asarray([[0.5], [1.5]], np.float32)
SCORING = {**scoring_inputs(ROWS), "prompt_lengths": np.asarray([[1], [2]])}
INPUTS = {
    "critic_train": training_inputs(seed=2),
    "critic_save": {"dummy_var": np.zeros(1, np.int64)},
    "reward_mixture": {
        "component_model": COLUMN,
        "component_length": COLUMN,
        "error_length": texts_array(["", "no score"]),
    },
}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> LiveRun:
    """A run whose repository holds every model there is."""
    rewards = {
        "model": {"weight": 1.0},
        "length": {"function": f"{reward_functions.__file__}:num_tokens"},
    }
    run = make_run(tmp_path_factory.mktemp("run"), checkpoints, actor={"kl_reference": "triton"}, rewards=rewards)
    initialise_store(run.store, run.config.critic, run_id=run.run_id)
    return run


@pytest.fixture(scope="module")
def models(run: LiveRun) -> Iterator[dict[str, Any]]:
    """Each model, loaded from its rendered configuration into this process."""
    interval = sys.getswitchinterval()
    loaded: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for model, text in render_configs(run.config).items():
            if model in ENSEMBLES:
                continue
            module = importlib.import_module(MODULES.get(model, FUNCTION_MODULE))
            for importer in (
                module,
                importlib.import_module("python_backend.serving.torch_scoring"),
            ):  # it cannot be taken back
                patch.setattr(importer, "keep_freed_memory", lambda: None, raising=False)
            config = parse_config(model, text)
            declared = {output.name for output in config.output} - {UNNAMED}
            assert declared == set(OUTPUTS[model]), model
            loaded[model] = module.TritonPythonModel()
            parameters = {key: {"string_value": item.string_value} for key, item in config.parameters.items()}
            arguments = {"model_config": json.dumps({"name": model, "parameters": parameters})}
            loaded[model].initialize({**arguments, "model_instance_name": f"{model}_0_0"})
        yield loaded
        for model in loaded.values():
            getattr(model, "finalize", lambda: None)()
    sys.setswitchinterval(interval)


def answer_to(model: Any, request: Request, run: LiveRun) -> InferenceResponse:
    """The model's answer; what it journals is done at once."""
    assert model.execute([request]) is None
    for entry in run.journal.entries():
        if run.journal.result(entry) is None:
            digest = run.journal.load(entry)[1] if entry.kind == "train" else None
            run.journal.finish(entry, Result(entry.name, 1, loss_mean=0.25, digest=digest))
    return request.responses.get(timeout=PATIENCE_S)


@pytest.mark.parametrize(("model", "requested"), REQUESTED)
def test_exactly_the_requested_outputs_are_sent(
    models: dict[str, Any], run: LiveRun, model: str, requested: tuple[str, ...]
) -> None:
    request = Request(INPUTS.get(model, SCORING), requested)
    response = answer_to(models[model], request, run)
    assert response.error is None
    assert set(response.outputs) == set(requested)
    for name in {"queue_us", "compute_us"} & {*requested}:
        assert (response.outputs[name].dtype, response.outputs[name].shape) == (np.int64, (2, 1))
        assert (response.outputs[name] > 0).all()
    assert request.num_looks_at_outputs <= 1  # each builds a new set of strings


@pytest.mark.parametrize("model", ["critic", "reference", "reward_checkpoint"])
def test_a_request_that_names_no_outputs_gets_no_optional_ones(
    models: dict[str, Any], run: LiveRun, model: str
) -> None:
    """Triton then names all that the configuration declares."""
    response = answer_to(models[model], Request(SCORING, (*OUTPUTS[model], UNNAMED)), run)
    assert set(response.outputs) == set(OUTPUTS[model]) - {"probabilities", "queue_us", "compute_us"}


def test_all_models_are_tested(models: dict[str, Any]) -> None:
    assert set(models) == set(OUTPUTS)


@pytest.mark.parametrize("requested", [["after_critic"], ["weights_version"]])  # the first: `rewards` of critic_infer
def test_the_critic_runs_for_values_alone(
    models: dict[str, Any], run: LiveRun, monkeypatch: pytest.MonkeyPatch, requested: list[str]
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("no forward is needed")

    monkeypatch.setattr(models["critic"].served, "forward", fail)
    response = answer_to(models["critic"], Request(SCORING, requested), run)
    assert {name: array.tolist() for name, array in response.outputs.items()} == {requested[0]: [[0], [0]]}
    refused = answer_to(models["critic"], Request(SCORING, ["values"]), run)
    assert refused.error == "INTERNAL: AssertionError: no forward is needed"
