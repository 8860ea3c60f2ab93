"""Rules of the rendered configurations that Triton's protobuf cannot express."""

from rlhf_triton.wire.contract import TOKENS


def check_rules(configs):
    """Check names, ragged inputs, batch sizes and the ensembles' wiring."""
    for model, config in configs.items():
        assert config.name == model
        if config.platform == "ensemble":
            _check_ensemble(configs, model)
        elif config.max_batch_size:
            # Without it, requests of different lengths never share a batch.
            assert all(tensor.allow_ragged_batch for tensor in config.input if tensor.name == TOKENS), model
            assert config.HasField("dynamic_batching"), model


def _check_ensemble(configs, model):
    whole = configs[model]
    ours = {tensor.name: tensor for tensor in [*whole.input, *whole.output]}
    before = None
    given = {tensor.name for tensor in whole.input}
    for step in whole.ensemble_scheduling.step:
        part = configs[step.model_name]
        where = f"{model}: {step.model_name}"
        assert part.platform != "ensemble", f"{where}: a text as sequence_id would crash tritonserver 2.51"
        taken = set(step.input_map.values())
        assert before is None or before & taken, f"{where} runs beside the step before, which can deadlock tritonserver"
        assert taken <= given, f"{where} takes what is neither an input nor an output of an earlier step"
        before = set(step.output_map.values())
        given |= before
        assert part.max_batch_size >= whole.max_batch_size, where
        for mapping, tensors in ((step.input_map, part.input), (step.output_map, part.output)):
            theirs = {tensor.name: tensor for tensor in tensors}
            for key, value in mapping.items():
                # A tensor between two steps is not declared: it has the type of the step that first uses it.
                assert _type(ours.setdefault(value, theirs[key])) == _type(theirs[key]), f"{where}: {key}"
    assert given >= {tensor.name for tensor in whole.output}, f"{model}: no step produces an output"


def _type(tensor):
    return tensor.data_type, list(tensor.dims)
