"""The tests of this folder need simulated cards: `make test-device` runs them, other commands do not collect them."""

import sys

collect_ignore_glob = [] if "simulated_cuda.plugin" in sys.modules else ["test_*.py"]
