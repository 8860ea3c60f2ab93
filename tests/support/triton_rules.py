"""Rules of the rendered configurations that Triton's protobuf cannot express."""

from collections.abc import Mapping
from typing import Any

from rlhf_triton.config import ConfigError
from rlhf_triton.wire.contract import TOKENS


def check_rules(configs: Mapping[str, Any]) -> None:
    """Check names, ragged inputs, batch sizes and the ensembles' wiring. Raises ConfigError."""
    for model, config in configs.items():
        if config.name != model:
            raise ConfigError(f"{model}/config.pbtxt: name is {config.name!r}, but must be {model!r}")
        if config.platform == "ensemble":
            _check_ensemble(configs, model)
        elif config.max_batch_size:
            _check_batching(model, config)


def _check_batching(model: str, config: Any) -> None:
    for tensor in config.input:
        if tensor.name == TOKENS and not tensor.allow_ragged_batch:
            raise ConfigError(
                f"{model}/config.pbtxt: input {tensor.name} needs allow_ragged_batch: true, or requests "
                "of different lengths never share a batch"
            )
    if not config.HasField("dynamic_batching"):
        raise ConfigError(f"{model}/config.pbtxt: dynamic_batching is missing; add it to the template")


def _check_ensemble(configs: Mapping[str, Any], model: str) -> None:
    whole = configs[model]
    ours = {tensor.name: tensor for tensor in [*whole.input, *whole.output]}
    before: set[str] | None = None
    given = {tensor.name for tensor in whole.input}
    for step in whole.ensemble_scheduling.step:
        part = configs[step.model_name]
        if part.platform == "ensemble":
            raise ConfigError(
                f"{model}/config.pbtxt: step {step.model_name} is itself an ensemble: a request with a string as "
                "sequence_id would crash tritonserver 2.51"
            )
        if before is not None and not before & set(step.input_map.values()):
            raise ConfigError(
                f"{model}/config.pbtxt: step {step.model_name} uses no output of the previous step, so Triton "
                "runs the two concurrently, which can deadlock tritonserver when one of them fails"
            )
        unknown = sorted(set(step.input_map.values()) - given)
        if unknown:
            raise ConfigError(
                f"{model}/config.pbtxt: {step.model_name} takes {unknown[0]}, which is neither an input nor an output "
                "of an earlier step; see tools/templates/ensemble.pbtxt.j2"
            )
        before = set(step.output_map.values())
        given |= before
        if part.max_batch_size < whole.max_batch_size:
            raise ConfigError(f"{model}: max_batch_size {whole.max_batch_size} exceeds that of {step.model_name}")
        for mapping, tensors in ((step.input_map, part.input), (step.output_map, part.output)):
            theirs = {tensor.name: tensor for tensor in tensors}
            for key, value in mapping.items():
                known = theirs.get(key)
                # A tensor between two steps is not declared: it has the type of the step that first uses it.
                if known is None or _type(ours.setdefault(value, known)) != _type(known):
                    raise ConfigError(f"{model}/config.pbtxt: {step.model_name} has no tensor {key} of this type")
    missing = [tensor.name for tensor in whole.output if tensor.name not in given]
    if missing:
        raise ConfigError(f"{model}/config.pbtxt: no step produces output {missing[0]}; see tools/served_rewards.py")


def _type(tensor: Any) -> tuple[int, list[int]]:
    return tensor.data_type, list(tensor.dims)
