"""`python -m serve_rendered`: `tools serve` on a repository already rendered, which saves importing transformers."""

import sys

import tools.render_configs

if __name__ == "__main__":
    tools.render_configs.render_repository = lambda config, out, **_: []
    from tools.serve import main

    sys.exit(main())
