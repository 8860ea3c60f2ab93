"""Agents with the clients of OpenAI and Anthropic, in an environment that has them: vLLM's.

Arguments: the gateway's address, and a word to say. Each client has a session of two calls, `openai`, `openai-stream`,
`anthropic` and `anthropic-stream`.
"""

import sys
from collections.abc import Callable


def main() -> None:
    """Have all sessions."""
    import anthropic
    import openai

    url, word = sys.argv[1:]

    def of_openai(name: str, stream: bool) -> Callable[[list[dict[str, str]]], str]:
        chat = openai.OpenAI(base_url=f"{url}/sessions/{name}/v1", api_key="none").chat.completions

        def ask(messages: list[dict[str, str]]) -> str:
            found = chat.create(model="policy", messages=messages, max_tokens=12, stream=stream)
            if not stream:
                return str(found.choices[0].message.content)
            return "".join(part.choices[0].delta.content or "" for part in found)

        return ask

    def of_anthropic(name: str, stream: bool) -> Callable[[list[dict[str, str]]], str]:
        calls = anthropic.Anthropic(base_url=f"{url}/sessions/{name}", api_key="none").messages

        def ask(messages: list[dict[str, str]]) -> str:
            if not stream:
                return str(calls.create(model="policy", messages=messages, max_tokens=12).content[0].text)
            with calls.stream(model="policy", messages=messages, max_tokens=12) as found:
                return "".join(found.text_stream)

        return ask

    for client in (of_openai, of_anthropic):
        for stream in (False, True):
            ask, messages = (
                client(client.__name__[3:] + "-stream" * stream, stream),
                [{"role": "user", "content": word}],
            )
            for _ in range(2):
                messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": word}]


if __name__ == "__main__":
    main()
