"""Imported when Python starts if PYTHONPATH has this folder: the process and its children get the simulated GPUs."""

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).resolve().parents[2])
if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)

from simulated_cuda.hook import simulate_on_import  # noqa: E402  # from the folder that was just added

simulate_on_import()
