"""The YAML configuration as typed sections. Unknown keys are rejected; the command line can override values.

Each process uses `run` and its own section. Models inside tritonserver do not read the YAML: their settings are
rendered into config.pbtxt.
"""
