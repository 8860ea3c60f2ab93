"""Groups of samples as records: every field of every row comes back bit for bit."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.actor.data.rollout_rows import Group, RolloutRow, Score
from rlhf_triton.actor.data.sample_records import describe_damage, group_of, record_of
from rlhf_triton.store.record_log import DamagedRecord, RecordLog, read_records

TEXT = st.text(max_size=4)
FLOAT = st.floats(width=32)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | FLOAT | TEXT, lambda inner: st.lists(inner, max_size=2))


def arrays(kind, size):
    values = st.integers(0, 2**40) if kind == "int64" else None
    return hnp.arrays(kind, size, elements=values)


@st.composite
def scores(draw, size):
    fields = {
        "reward": FLOAT,
        "outcome": FLOAT,
        "steps": st.none() | arrays("float32", size),
        "ends": st.none() | arrays("bool", size),
        "values": st.none() | arrays("float32", size),
        "version": st.integers(-1, 9),
        "components": st.dictionaries(TEXT, FLOAT, max_size=2),
        "reward_version": st.none() | st.integers(0, 9),
        "failure": TEXT,
        "weights": st.dictionaries(TEXT, FLOAT, max_size=2),
    }
    assert set(fields) == {field.name for field in dataclasses.fields(Score)}
    return Score(**{name: draw(values) for name, values in fields.items()})


TURNS = st.builds(SampledTurn, st.integers(0, 9), st.integers(0, 9), FLOAT, st.integers(0, 9))


@st.composite
def rows(draw, prompts):
    size = draw(st.integers(1, 4))
    logprobs = draw(st.none() | arrays("float32", size))
    fields = {
        "prompt": st.sampled_from(prompts),
        "tokens": arrays("int64", size),
        "sampled": arrays("bool", size),
        "ended": st.booleans(),
        "logprobs": st.just(logprobs),
        "policy_steps": st.none() | arrays("int64", size),
        "turns": st.none() | st.lists(TURNS, max_size=2).map(tuple),
        "messages": st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2).map(tuple),
        "num_prompt_messages": st.integers(0, 3),
        "truncated": TEXT,
        "error": TEXT,
        "restarts": st.integers(0, 3),
        "policy_logprobs": st.just(logprobs) | arrays("float32", size),
        "ref_logprobs": st.none() | arrays("float32", size),
        "score": scores(size),
    }
    assert set(fields) == {field.name for field in dataclasses.fields(RolloutRow)}
    return RolloutRow(**{name: draw(values) for name, values in fields.items()})


@st.composite
def groups(draw):
    prompt = st.builds(
        Prompt, TEXT, TEXT, arrays("int64", 3), st.dictionaries(TEXT, JSON, max_size=2), st.integers(0, 3), TEXT
    )
    prompts = draw(st.lists(prompt, min_size=1, max_size=2))
    conversations = st.lists(st.lists(rows(prompts), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3)
    return Group(tuple(draw(conversations)), number=2)


def bits(value):
    """Every bit and type of a value."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return {name: bits(part) for name, part in vars(value).items()}
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return repr(value)


@given(groups())
def test_group_is_restored_bit_for_bit(group):
    found = group_of(record_of(group, step=1, number=2))
    assert bits(found) == bits(group)
    for rows, expected in zip(found.conversations, group.conversations, strict=True):
        for row, old in zip(rows, expected, strict=True):
            if old.logprobs is not None and old.policy_logprobs is old.logprobs:
                assert (row.policy_logprobs is row.logprobs) or bits(row.policy_logprobs) == bits(row.logprobs)


def test_turn_of_an_older_record_may_have_a_copy_of_its_tokens():
    turn = SampledTurn(1, 3, 0.5, 2)
    row = dataclasses.replace(a_group().conversations[0][0], turns=(turn,))
    record = record_of(Group(((row,),)))
    record.header["rows"][0]["turns"][0]["tokens"] = [1, 2]
    assert group_of(record).conversations[0][0].turns == (turn,)


def a_group():
    def row(prompt, size):
        numbers = np.arange(size, dtype=np.float32)
        score = Score(reward=1.0, values=numbers + 0.5, version=3)
        return RolloutRow(
            prompt=prompt,
            tokens=np.arange(size) + 7,
            sampled=numbers > 1,
            ended=True,
            logprobs=numbers,
            policy_logprobs=numbers,
            score=score,
        )

    prompt = Prompt("p7", "hello", np.arange(2))
    return Group(tuple((row(prompt, size),) for size in (5, 3, 4)))


@pytest.mark.parametrize(("row", "name"), [(0, "tokens"), (1, "logprobs"), (2, "score.values"), (1, "sampled")])
def test_one_flipped_bit_names_the_step_the_sample_and_the_field(row, name, tmp_path):
    log = RecordLog(tmp_path)
    record = record_of(a_group(), step=4, number=9)
    log.append(4, lambda: [record]).result()
    log.close()
    begin = [0, 5, 8][row]
    column = record.arrays[name]
    path = tmp_path / "4" / "1"
    data = bytearray(path.read_bytes())
    assert data.count(column.tobytes()) == 1
    data[data.index(column.tobytes()) + begin * column.itemsize] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedRecord) as caught:
        [*read_records(tmp_path, 4)]
    assert describe_damage(caught.value.payload) == f"step 4, group 9, sample {row} (prompt p7): `{name}`"


def test_log_probs_that_are_the_same_array_are_stored_once():
    record = record_of(a_group(), step=4, number=9)
    assert "policy_logprobs" not in record.arrays
    ((row,), *_) = group_of(record).conversations
    assert row.policy_logprobs is row.logprobs
