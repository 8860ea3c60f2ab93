"""The names that `import rlhf_triton as rt` provides."""

import subprocess
import sys

import pytest

import rlhf_triton as rt

PUBLIC = """
AdvantageInputs AsyncCriticClient AsyncRewardClient ClientSettings ContractError CriticClient Environment
EnvironmentLost LossInputs ReportSection RequestFailed RequestRefused RewardClient RlhfError RowScores RowValues Run
Sample Scores ServerFailed Services TrainAnswer count serve train
"""


def test_public_names_match_the_frozen_list():
    """A name that is added or removed changes what users may rely on."""
    assert rt.__all__ == dir(rt) == PUBLIC.split()
    for name in rt.__all__:
        assert getattr(rt, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'Rewardclient'"):
        rt.Rewardclient  # noqa: B018


def test_importing_the_package_imports_nothing_else():
    code = "import sys; import rlhf_triton; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"asyncio", "numpy", "pydantic", "torch"} & {*loaded} == set()
