"""`python serve_rendered.py`: `rlhf-triton serve` on a rendered repository, which saves importing transformers.

With `--unchecked` as the first argument it does not check the checkpoints that the configuration names, either.
"""

import sys

import rlhf_triton.tools.checks.preflight
import rlhf_triton.tools.render_configs

UNCHECKED = "--unchecked"

if __name__ == "__main__":
    rlhf_triton.tools.render_configs.render_repository = lambda config, out, **_: []
    arguments = sys.argv[1:]
    if arguments[:1] == [UNCHECKED]:
        rlhf_triton.tools.checks.preflight.check = lambda config, command: []
        arguments = arguments[1:]
    from rlhf_triton.tools.serve import main

    sys.exit(main(arguments))
