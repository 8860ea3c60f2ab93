"""Loads a served model from its rendered configuration into the test's own process."""

import contextlib
import importlib
import json
import sys

import pytest

from rlhf_triton.tools.render_configs import module_of, parse_pbtxt, render_configs


@contextlib.contextmanager
def served_model(config, model, *, before_load=lambda: None, **args):
    """Serve `model` until the block ends.

    Args:
        before_load: called after the configuration was rendered.
        args: further arguments that Triton passes to `initialize`.
    """
    interval = sys.getswitchinterval()
    rendered = parse_pbtxt(model, render_configs(config)[model])
    parameters = {key: {"string_value": item.string_value} for key, item in rendered.parameters.items()}
    before_load()
    module = importlib.import_module(module_of(model))
    served = module.TritonPythonModel()
    with pytest.MonkeyPatch.context() as patch:
        torch_scoring = importlib.import_module("rlhf_triton.python_backend.serving.torch_scoring")
        for importer in (module, torch_scoring):  # it cannot be taken back
            patch.setattr(importer, "keep_freed_memory", lambda: None, raising=False)
        patch.setattr(torch_scoring.signal, "alarm", lambda seconds: None)  # after the device was lost
        served.initialize(
            {
                "model_config": json.dumps({"name": model, "parameters": parameters}),
                "model_instance_name": f"{model}_0_0",
                **args,
            }
        )
        try:
            yield served
        finally:
            served.finalize()
            sys.setswitchinterval(interval)
