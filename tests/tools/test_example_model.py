"""`rlhf-triton example-model`: its folders work everywhere, without a warning."""

import logging
from pathlib import Path

from transformers import AutoTokenizer

from rlhf_triton.models.modeling import load_critic, load_reward
from rlhf_triton.tools import doctor
from rlhf_triton.tools.checks.findings import Level
from rlhf_triton.tools.example_model import main
from rlhf_triton.tools.server.ports import PORT_KEYS

PPO = """
run: {dir: runs/mine}
reward: {model: models/reward}
critic: {model: models/policy}
actor: {policy: {model: models/policy}, prompts: {path: prompts.jsonl}}
"""


def test_example_model_writes_a_usable_reward_and_policy(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    assert main(["models"]) == 0
    assert "models/reward (random weights: scores mean nothing)" in capsys.readouterr().out
    Path("prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "What is 2 + 3?"}]}\n')
    Path("ppo.yaml").write_text(PPO)
    found = list(doctor.findings(Path("ppo.yaml"), [f"server.{key}=0" for key in PORT_KEYS]))
    assert [str(finding) for finding in found if finding.level is not Level.OK] == []
    tokenizer = AutoTokenizer.from_pretrained("models/reward")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Ä?"}], tokenize=False)
    rows = [tokenizer(part, return_tensors="np")["input_ids"][0] for part in (text, text[:-2])]
    assert [tokenizer.decode(row) for row in rows] == [text, text[:-2]]
    assert tokenizer.convert_ids_to_tokens(rows[0][:5]) == ["<|im_start|>", *"user"]
    with caplog.at_level(logging.WARNING):
        scores = load_reward(Path("models/reward")).score(rows)[:, 0]
        values = load_critic(Path("models/policy")).values(rows)
    assert abs(scores[0] - scores[1]) > 0.01
    assert not any(row.any() for row in values), "a new head gives values other than 0"
    # Not those of a thread that another test has left.
    assert not [record for record in caplog.records if record.name.startswith("rlhf_triton.python_backend")]
    assert main(["models"]) == 2
    assert capsys.readouterr().err == "error: models/reward exists; choose another folder than models, or remove it\n"
