"""A chat with `kvpage serve`, or with any program here that mounts OpenAI's API.

pip install openai
python openai_client.py http://127.0.0.1:8000/v1 'Name three colours.'
"""

import sys
from collections.abc import Iterator

from openai import OpenAI


def answer(url: str, question: str, api_key: str = "none") -> Iterator[str]:
    """The answer of the first model there, piece by piece."""
    client = OpenAI(base_url=url, api_key=api_key)
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], stream=True
    )
    with stream:  # leaving it early stops the generation
        for chunk in stream:
            yield chunk.choices[0].delta.content or ""


if __name__ == "__main__":
    for text in answer(*sys.argv[1:]):
        print(text, end="", flush=True)
    print()
