"""The chat prompts of `make demo-llm`: enough of them, and no topic on both sides."""

from __future__ import annotations

from examples.demo.chats import HELD_OUT_TOPICS, PHRASINGS, SYSTEM, TRAINING_TOPICS, chats


def test_there_are_enough_prompts_and_held_out_ones_have_other_topics() -> None:
    training, held_out = list(chats(TRAINING_TOPICS, "train")), list(chats(HELD_OUT_TOPICS, "validation"))
    assert len(training) >= 256
    assert len(held_out) >= 256
    assert not set(TRAINING_TOPICS) & set(HELD_OUT_TOPICS)
    for part, topics in ((training, TRAINING_TOPICS), (held_out, HELD_OUT_TOPICS)):
        questions = [line["messages"][-1]["content"] for line in part]
        assert len(set(questions)) == len({line["prompt_id"] for line in part}) == len(part) == len(topics) * 6


def test_a_prompt_is_a_chat_with_a_system_message() -> None:
    first = next(chats(["the moon"], "train"))
    question = {"role": "user", "content": PHRASINGS[0].format("the moon")}
    assert first == {"messages": [{"role": "system", "content": SYSTEM}, question], "prompt_id": "train-00000"}
