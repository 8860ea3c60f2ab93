"""`python -m serve_rendered`: `rlhf-triton serve` on a rendered repository, which saves importing transformers."""

import sys

import rlhf_triton.tools.render_configs

if __name__ == "__main__":
    rlhf_triton.tools.render_configs.render_repository = lambda config, out, **_: []
    from rlhf_triton.tools.serve import main

    sys.exit(main())
