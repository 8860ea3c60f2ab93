"""`tools run` after an error: it says how to get at the policy that the run has reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_system import Checkpoints, make_run

from python_backend.errors import RlhfError
from python_backend.store.durable import write_json
from tools import run


@pytest.mark.parametrize(("left", "says"), [(0, "export"), (5, "export"), (7, "from_pretrained")])
def test_the_newest_policy_is_named_after_an_error(
    tmp_path: Path,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: int,
    says: str,
) -> None:
    """The checkpoint is of step 7; `policy/` is missing, of an earlier stop, or of that step, too."""
    config = make_run(tmp_path / "a run", checkpoints)
    folder = config.config.run.dir

    def execute(_: run.Run) -> None:
        (folder / "checkpoints" / "actor" / "7").mkdir(parents=True)
        if left:
            (folder / "policy").mkdir()
            write_json(folder / "policy" / "policy.json", {"step": left})
        raise RlhfError("the actor was killed")

    monkeypatch.setattr(run.Run, "execute", execute)
    assert run.main(["--config", str(config.path)]) == 2
    shown = capsys.readouterr()
    assert "error: the actor was killed" in shown.err
    (line,) = [line for line in shown.out.splitlines() if line.startswith("policy: ")]
    assert says in line
    if says == "export":
        assert line == f"policy: python -m tools export '{folder}' writes that of step 7 as a Hugging Face folder"
