"""Sampling end to end: a tiny model in an engine, against transformers' `generate`, and itself."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper

from kvpage import AsyncEngine, Completion, Logprobs, RequestError, SamplingParams, StepFailed
from tests.engine import scenes
from tests.model.tiny import prompts, tiny_model

PROMPTS = prompts([1, 2, 7, 16, 17, 33, 5, 48, 12])
END = 77
PRINTABLE = tuple(range(97, 123))


class ByteTokenizer:
    """Bytes below 128 as tokens: a byte-level tokenizer without merges."""

    chat_template = None

    def __call__(self, text: str, **_options: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("ascii"))}

    def convert_tokens_to_ids(self, token: str) -> None:
        """No token has the name of a byte."""

    def decode(self, ids: Sequence[int], **_options: bool) -> str:
        return bytes(ids).decode("ascii")


@cache
def model() -> Any:
    """Llama, its logits made peakier, so that penalties and draws have something to work on."""
    tiny = tiny_model("llama")
    with torch.no_grad():
        tiny.lm_head.weight.mul_(12)
    return tiny


def engine(**settings: Any) -> AsyncEngine:
    return AsyncEngine(model=model(), tokenizer=ByteTokenizer(), block_size=8, **settings)


async def complete_all(
    served: AsyncEngine, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[Completion]:
    """All requests at once."""
    calls = [partial(served.complete, prompt, params) for prompt, params in requests]
    return await scenes.complete_all(served, calls)


# -- against transformers --------------------------------------------------------------------------


def generate(prompt: list[int], **options: Any) -> tuple[list[int], torch.Tensor]:
    """What transformers generates greedily, and its logits before any change: `[n, vocabulary]`."""
    output = model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


SAME_IN_BOTH: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"logit_bias": {5: 9.0, 7: -9.0}}, {"sequence_bias": [[[5], 9.0], [[7], -9.0]]}),
    ({"stop_token_ids": [END]}, {"eos_token_id": END}),
    ({"stop_token_ids": [END], "min_tokens": 9}, {"eos_token_id": END, "min_new_tokens": 9}),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME_IN_BOTH, ids=lambda options: str(options)[:40])
async def test_tokens_and_log_probabilities_equal_generate(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Greedy, all prompts at once; log-probabilities are of the model's own logits."""
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=4, **ours)
    async with engine() as served:
        completions = await complete_all(served, [(prompt, params) for prompt in PROMPTS])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens, logits = generate(prompt, **theirs)
        assert list(completion.token_ids) == tokens
        check_logprobs(completion.logprobs, logits, tokens, num_top=4)


def check_logprobs(
    found: Sequence[Logprobs], logits: torch.Tensor, tokens: list[int], *, num_top: int
) -> None:
    """Each is the token's own log-probability, and the largest ones in descending order."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    np.testing.assert_allclose([of_token.own for of_token in found], own, atol=2e-4)
    for row, of_token in zip(logprobs, found, strict=True):
        ids = [token for token, _ in of_token.top]
        values = [value for _, value in of_token.top]
        np.testing.assert_allclose(values, row.topk(num_top).values, atol=2e-4)
        np.testing.assert_allclose(values, row[ids], atol=2e-4)
        assert len(set(ids)) == num_top


@pytest.mark.parametrize("num_top", [0, 1, 3])
@pytest.mark.parametrize("budget", [1, 7, 512])
async def test_prompt_log_probabilities_equal_a_forward_pass(budget: int, num_top: int) -> None:
    """Whole or in chunks; the first token has none."""
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=num_top)
    async with engine(max_batch_tokens=budget) as served:
        completions = await complete_all(served, [(prompt, params) for prompt in PROMPTS])
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        check_prompt(completion, prompt, num_top)


def check_prompt(completion: Completion, prompt: list[int], num_top: int) -> None:
    first, *rest = completion.prompt_logprobs
    assert first is None
    with torch.no_grad():
        logits = model()(torch.tensor([prompt])).logits[0, :-1]
    known = [of_token for of_token in rest if of_token is not None]
    assert len(known) == len(prompt) - 1
    check_logprobs(known, logits, prompt[1:], num_top=num_top)


# -- whatever happens around a request -------------------------------------------------------------


def drop_vowels(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.index_fill(1, torch.tensor([ord(vowel) for vowel in "aeiou"]), -torch.inf)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "top_p": 0.9},
    {"temperature": 0, "logit_bias": {3: 4.0, 9: -50.0}, "frequency_penalty": 2.0},
    {"allowed_token_ids": PRINTABLE, "bad_words": ["e", "th"], "top_k": 20},
    {"allowed_token_ids": PRINTABLE, "logits_processors": [drop_vowels], "repetition_penalty": 1.2},
    {
        "logits_processors": [TemperatureLogitsWarper(0.5)],
        "stop_token_ids": [1, 2, 3],
        "min_p": 0.1,
    },
    {"allowed_token_ids": PRINTABLE, "stop": ["a", "qz"], "min_tokens": 4},
    {"logprobs": 2, "prompt_logprobs": 1, "temperature": 0.7},
    {"temperature": 0, "prompt_logprobs": 0, "min_tokens": 20, "stop_token_ids": list(range(60))},
]
REQUESTS = [
    (prompt, SamplingParams(seed=number, max_tokens=20, **kind))
    for number, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
]


def essence(completion: Completion) -> Any:
    """All that must not depend on circumstances; log-probabilities up to rounding."""

    def rounded(logprobs: Sequence[Logprobs | None]) -> list[Any]:
        return [None if of_token is None else round(of_token.own, 2) for of_token in logprobs]

    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        rounded(completion.logprobs),
        rounded(completion.prompt_logprobs),
    )


@cache
def undisturbed() -> list[Any]:
    """Each request alone in an engine of its own."""

    async def alone(prompt: list[int], params: SamplingParams) -> Completion:
        async with engine() as served:
            return await served.complete(prompt, params)

    return [essence(anyio.run(alone, *request)) for request in REQUESTS]


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "token by token": {"max_batch_tokens": 1},
    "in chunks": {"max_batch_tokens": 9},
    "preempted": {"kv_memory": "80 tokens", "max_model_len": 72, "prefix_cache": False},
    "preempted in chunks": {"kv_memory": "80 tokens", "max_model_len": 72, "max_batch_tokens": 9},
    "preempted and swapped": {"kv_memory": "80 tokens", "max_model_len": 72, "preempt": "swap"},
    "contiguous": {"allocator": "contiguous:reserve=request"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_comes_in_any_batch_and_under_preemption(name: str) -> None:
    """Penalties, rules, processors, log-probabilities, stop strings: nothing notices."""

    async def together() -> tuple[list[Any], int]:
        async with engine(**SETTINGS[name]) as served:
            completions = await complete_all(served, REQUESTS)
            return [essence(completion) for completion in completions], served.stats().preemptions

    found, preemptions = anyio.run(together)
    assert found == undisturbed()
    assert (preemptions > 0) == name.startswith("preempted")


def test_the_same_comes_from_a_warm_prefix_cache() -> None:
    """A second time, with the blocks of the first; prompt log-probabilities cannot use them."""

    async def twice() -> tuple[list[Any], list[int]]:
        async with engine() as served:
            await complete_all(served, REQUESTS)
            again = await complete_all(served, REQUESTS)
            return [essence(completion) for completion in again], [
                completion.usage.cached_tokens for completion in again
            ]

    found, cached = anyio.run(twice)
    assert found == undisturbed()
    wants_prompt = [params.prompt_logprobs is not None for _, params in REQUESTS]
    assert [tokens for tokens, wants in zip(cached, wants_prompt, strict=True) if wants] == [0, 0]
    assert sum(cached) > 0


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
async def test_prompt_log_probabilities_survive_preemption_in_the_prompt(preempt: str) -> None:
    """The first request's growth takes the blocks of the second, whose prompt is half computed."""
    growing, long = prompts([8, 48])
    slow = SamplingParams(temperature=0, max_tokens=40)
    watched = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    settings = {"kv_memory": "72 tokens", "max_model_len": 72, "max_batch_tokens": 3}
    async with engine(**settings, preempt=preempt) as served:
        with scenes.held(served):
            first = await served.generate(growing, slow).__aenter__()
            stream = await served.generate(long, watched).__aenter__()
        completion = Completion.of([token async for token in stream])
        await first.aclose()
    assert completion.usage.preemptions > 0
    check_prompt(completion, long, num_top=2)


# -- stop strings ----------------------------------------------------------------------------------


async def test_stop_strings_cut_the_text_and_nothing_of_them_is_shown() -> None:
    """Every substring of the undisturbed text, at its beginning, at its end, over tokens."""
    free = SamplingParams(temperature=0, max_tokens=12, allowed_token_ids=PRINTABLE)
    async with engine() as served:
        whole = await served.complete(PROMPTS[3], free)
        assert len(whole.text) == 12
        stops = {whole.text[i : i + n] for n in (1, 2, 3, 12) for i in range(13 - n)}
        params = [attrs.evolve(free, stop=(stop, "never")) for stop in sorted(stops)]
        completions = await complete_all(served, [(PROMPTS[3], of_one) for of_one in params])
    for of_one, completion in zip(params, completions, strict=True):
        stop = of_one.stop[0]
        begins = whole.text.index(stop)
        assert completion.text == whole.text[:begins]
        assert completion.finish_reason == "stop"
        assert completion.token_ids == whole.token_ids[: begins + len(stop)]
        assert completion.usage.output_tokens == begins + len(stop)


async def test_what_was_held_back_for_a_stop_string_comes_with_the_last_token() -> None:
    """A beginning that the end of the output cuts short is text."""
    free = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=PRINTABLE)
    async with engine() as served:
        whole = await served.complete(PROMPTS[4], free)
        params = attrs.evolve(free, stop=(whole.text[-2:] + "?",))
        tokens = [token async for token in served.generate(PROMPTS[4], params)]
    assert [token.text for token in tokens] == [*whole.text[:4], "", whole.text[4:]]
    assert tokens[-1].finish_reason == "length"


# -- failures --------------------------------------------------------------------------------------


def fail_later(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if input_ids.shape[1] >= 6:
        raise ValueError("boom")
    return scores


FAILING: list[tuple[dict[str, Any], str]] = [
    (
        {"logits_processors": [fail_later], "stop_token_ids": range(90, 99)},
        "a logits processor failed: ValueError: boom",
    ),
    ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2}, "there is no token to"),
]


@pytest.mark.parametrize(("kind", "sentence"), FAILING, ids=["processor", "nothing allowed"])
async def test_a_request_that_cannot_be_sampled_fails_alone(
    kind: dict[str, Any], sentence: str
) -> None:
    """The others of the same step get their tokens, in the right order; its blocks come back."""
    others = [PROMPTS[1], PROMPTS[5]]
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=0)
    async with engine() as served:
        expected = await complete_all(served, [(prompt, params) for prompt in others])
        found: list[Completion] = []

        async def spoil() -> None:
            with pytest.raises(StepFailed, match=sentence):
                await served.complete(PROMPTS[0], attrs.evolve(params, **kind))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(spoil)
            found += await complete_all(served, [(prompt, params) for prompt in others])
        await served.idle()
        stats = served.stats()
    assert [essence(completion) for completion in found] == [essence(one) for one in expected]
    assert (stats.pool.used_blocks, stats.requests_failed) == (0, 1)


async def test_what_the_model_does_not_know_is_refused_at_submission() -> None:
    """In the caller's task, as the vocabulary and the room are the engine's."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"stop_token_ids": [128]}, "stop_token_ids has token id 128"),
        ({"logit_bias": {128: 1}}, "logit_bias has token id 128"),
        ({"allowed_token_ids": [500]}, "allowed_token_ids has token id 500"),
        ({"min_tokens": 300}, "min_tokens is 300"),
        ({"bad_words": ["é"]}, "the bad word 'é' cannot be encoded"),
    ]
    async with engine() as served:
        for values, sentence in refused:
            with pytest.raises(RequestError, match=sentence):
                await served.complete([1], SamplingParams(**values))
    async with AsyncEngine(model=model(), kv_memory="512 tokens") as served:
        for params in (SamplingParams(stop="a"), SamplingParams(bad_words="a")):
            with pytest.raises(RequestError, match=r"no tokenizer: (stop|bad_words) needs one"):
                await served.complete([1], params)
