"""What can be refused is refused in the caller's task, with the numbers, and leaves no trace."""

from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from kvpage import (
    DuplicateRequest,
    EngineBusy,
    RequestError,
    RequestTooLong,
    SamplingParams,
)
from kvpage.plan import StepPlan
from kvpage.request import EngineModel
from kvpage.testing import undisturbed
from tests.engine.conftest import Run
from tests.engine.runners import GEOMETRY, VOCAB_SIZE, GatedRunner
from tests.engine.scenes import (
    Scene,
    check_generates,
    check_nothing_left,
    fake_engine,
    scene,
    until,
)
from tests.engine.test_faults import TINY

LIMIT = GEOMETRY.max_model_len


# -- lengths ---------------------------------------------------------------------------------------


def test_the_longest_prompt_leaves_room_for_one_token(run: Run) -> None:
    """`max_model_len - 1` prompt tokens give one token, with or without `max_tokens`."""

    async def main() -> None:
        prompt = [1] * (LIMIT - 1)
        async with fake_engine() as engine:
            for max_tokens in (None, 1):
                completion = await engine.complete(prompt, SamplingParams(max_tokens=max_tokens))
                assert list(completion.token_ids) == undisturbed(prompt, 1)
                assert completion.finish_reason == "length"

    run(main)


@pytest.mark.parametrize("prompt_tokens", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_without_room_for_an_answer_is_refused(
    run: Run, prompt_tokens: int, max_tokens: int | None
) -> None:
    """From `max_model_len` prompt tokens on, with both numbers."""

    async def main() -> None:
        async with fake_engine() as engine:
            with pytest.raises(
                RequestTooLong,
                match=rf"the prompt has {prompt_tokens} tokens, and max_model_len is {LIMIT}: ",
            ):
                await engine.complete([1] * prompt_tokens, SamplingParams(max_tokens=max_tokens))
            await check_generates(engine)

    run(main)


def test_prompt_and_max_tokens_must_fit_together(run: Run) -> None:
    """The last `max_tokens` that fits is served whole; one more is refused with all numbers."""

    async def main() -> None:
        async with fake_engine() as engine:
            fits = await engine.complete([1] * 100, SamplingParams(max_tokens=LIMIT - 100))
            assert fits.usage.output_tokens == LIMIT - 100
            with pytest.raises(RequestTooLong, match=r"100 tokens and max_tokens is 29: .* 129,"):
                await engine.complete([1] * 100, SamplingParams(max_tokens=LIMIT - 99))

    run(main)


def test_without_max_tokens_a_request_ends_at_the_model_s_length(run: Run) -> None:
    """`max_tokens=None` generates up to `max_model_len`."""

    async def main() -> None:
        async with fake_engine() as engine:
            completion = await engine.complete([1, 2, 3])
            assert list(completion.token_ids) == undisturbed([1, 2, 3], LIMIT - 3)

    run(main)


def test_a_prompt_larger_than_the_pool_is_refused(run: Run) -> None:
    """A prompt that can never have its blocks never queues for them."""

    async def main() -> None:
        async with fake_engine(GatedRunner(TINY), geometry=TINY) as engine:
            with pytest.raises(RequestTooLong, match="has 17 tokens, and the pool has room for 16"):
                await engine.complete([1] * 17)
            await check_generates(engine)

    run(main)


def test_the_text_of_a_completion_is_the_whole_decoding(run: Run) -> None:
    """Joined texts of a stream, the text of a completion and the tokenizer agree."""

    async def main() -> None:
        async with scene() as at:
            params = SamplingParams(max_tokens=8)
            completion = await at.engine.complete("some text", params)
            streamed = [token async for token in at.engine.generate("some text", params)]
            expected = at.tokenizer.decode(completion.token_ids)
            assert completion.text == "".join(token.text for token in streamed) == expected

    run(main)


def test_only_the_last_token_tells_how_it_ended(run: Run) -> None:
    """`finish_reason`, `usage` and `timings` come with it; a stop token ends with `"stop"`."""
    expected = undisturbed([1, 2], 10)
    stop = expected[4]

    async def main() -> None:
        async with fake_engine() as engine:
            params = SamplingParams(max_tokens=10, stop_token_ids=[stop])
            *tokens, last = [token async for token in engine.generate([1, 2], params)]
            assert [token.index for token in (*tokens, last)] == list(range(5))
            assert {(t.finish_reason, t.usage, t.timings) for t in tokens} == {(None, None, None)}
            assert (last.id, last.finish_reason) == (stop, "stop")
            assert last.usage is not None
            assert (last.usage.prompt_tokens, last.usage.output_tokens) == (2, 5)
            assert last.timings is not None
            assert 0 <= last.timings.scheduled_s <= last.timings.first_token_s
            assert last.timings.first_token_s <= last.timings.total_s

    run(main)


# -- values ----------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty ids": ([], "the prompt is empty: it has no tokens"),
    "empty text": ("", "the prompt is empty: it has no tokens"),
    "negative id": ([1, -1], "token ids must be between 0 and 250, got -1"),
    "id beyond the vocabulary": ([1, 251], "token ids must be between 0 and 250, got 251"),
    "id beyond any integer": ([2**70], f"token ids must be between 0 and 250, got {2**70}"),
    "float": ([1.5], "a prompt is text, token ids or chat messages, got an item 1.5"),
    "bool": ([True], "a prompt is text, token ids or chat messages, got an item True"),
    "two texts": (["a", "b"], "a prompt is text, token ids or chat messages, got an item 'a'"),
    "None": (None, "a prompt is text, token ids or chat messages, got a NoneType"),
    "number": (5, "a prompt is text, token ids or chat messages, got a int"),
    "bytes": (b"ab", "a prompt is text, token ids or chat messages, got a bytes"),
    "iterator": (iter([1]), "a prompt is text, token ids or chat messages, got a list_iterator"),
    "no template": ([{"role": "user"}], "the tokenizer of fake has no chat template; give text"),
    "not encodable": ("\ud800", "the prompt cannot be encoded: UnicodeEncodeError: "),
}


class StrictTokenizer:
    """Like the usual tokenizers, refuses text that is no Unicode."""

    def __call__(self, prompt: str) -> dict[str, list[int]]:
        return {"input_ids": list(prompt.encode())}


@pytest.mark.parametrize(("prompt", "sentence"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_prompt_that_makes_no_sense_is_refused(prompt: Any, sentence: str) -> None:
    """Each in one clear sentence."""
    model = EngineModel("fake", VOCAB_SIZE, tokenizer=StrictTokenizer())
    with pytest.raises(RequestError) as refusal:
        model.encode(prompt)
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize(
    "prompt", [[7, 8], (7, 8), np.array([7, 8]), np.array([7, 8], np.uint8), range(7, 9)]
)
def test_token_ids_come_in_any_sequence(prompt: Any) -> None:
    """Lists, tuples, ranges and arrays of integers are prompts."""
    assert EngineModel("fake", VOCAB_SIZE).encode(prompt).tolist() == [7, 8]


def test_text_needs_a_tokenizer() -> None:
    """An engine without one says what it takes instead."""
    with pytest.raises(RequestError, match="no tokenizer: give the prompt as token ids"):
        EngineModel("fake", VOCAB_SIZE).encode("text")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "priority": ({"priority": "high"}, "priority must be a whole number, got 'high'"),
    "stop id": (
        {"params": SamplingParams(stop_token_ids=(3, 2**40))},
        f"stop_token_ids has token id {2**40}; the vocabulary has 251 tokens",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_an_argument_that_would_trouble_the_engine_stops_short_of_it(
    run: Run, arguments: dict[str, Any], sentence: str
) -> None:
    """It is refused in the caller's task, and the engine serves the next request."""

    async def main() -> None:
        async with fake_engine() as engine:
            with pytest.raises(RequestError) as refusal:
                await engine.complete([1, 2], **arguments)
            assert str(refusal.value) == sentence
            await check_generates(engine)

    run(main)


# -- ids and places --------------------------------------------------------------------------------


def test_an_id_is_refused_while_it_is_open_and_free_afterwards(run: Run) -> None:
    """A duplicate leaves the first request alone; the id works again after the end."""

    async def main() -> None:
        async with scene(free_steps=0) as at:
            params = SamplingParams(max_tokens=3)
            first = await at.engine.generate([1, 2], params, request_id="mine").__aenter__()
            with pytest.raises(DuplicateRequest, match="a request 'mine' is still open"):
                await at.engine.complete([1, 2], request_id="mine")
            at.let_go()
            assert [token.id async for token in first] == undisturbed([1, 2], 3)
            await check_nothing_left(at.engine, "mine")

    run(main)


def test_a_refused_request_does_not_hold_its_id(run: Run) -> None:
    """The id of a request that was refused at submission can be used at once."""

    async def main() -> None:
        async with fake_engine() as engine:
            with pytest.raises(RequestError):
                await engine.complete([], request_id="mine")
            await check_generates(engine, "mine")

    run(main)


def test_a_full_queue_raises_if_told_to(run: Run) -> None:
    """`when_busy="raise"`: `EngineBusy` with the number, until a place is free."""

    async def main() -> None:
        async with scene(free_steps=0, max_num_seqs=1, max_waiting=1, when_busy="raise") as at:
            async with at.engine.generate([1], SamplingParams(max_tokens=1)):
                await at.runner.gate.held()
                async with at.engine.generate([2], SamplingParams(max_tokens=1)):
                    with pytest.raises(EngineBusy, match="1 requests are waiting already"):
                        await at.engine.complete([3])
            at.let_go()
            await check_nothing_left(at.engine, "again")

    run(main)


def test_a_full_queue_makes_others_wait_in_order(run: Run) -> None:
    """`when_busy="wait"`: everybody is served, in the order of coming."""
    runner, started = runner_that_notes_prompts()

    async def main() -> None:
        async with scene(runner, max_num_seqs=1, max_waiting=1) as at:

            async def complete(number: int) -> None:
                await at.engine.complete([number], SamplingParams(max_tokens=2))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(complete, 0)
                await at.runner.gate.held()
                tasks.start_soon(complete, 1)
                await until(lambda: at.engine._gate._num_waiting == 1)
                for number in (2, 3, 4):
                    tasks.start_soon(complete, number)
                    await until(partial(waits_at_the_entrance, at, number - 1))
                at.let_go()

    run(main)
    assert started == [0, 1, 2, 3, 4]


def test_urgent_requests_overtake_the_queue(run: Run) -> None:
    """A lower `priority` runs first; equal ones in the order of coming."""
    runner, started = runner_that_notes_prompts()

    async def main() -> None:
        async with scene(runner, max_num_seqs=1) as at, AsyncExitStack() as streams:
            for number, priority in enumerate((0, 5, 5, -1)):
                params = SamplingParams(max_tokens=2)
                stream = at.engine.generate([number], params, priority=priority)
                await streams.enter_async_context(stream)
                if number == 0:
                    await at.runner.gate.held()
            at.let_go()
            await at.engine.idle()

    run(main)
    assert started == [0, 3, 1, 2]


def runner_that_notes_prompts() -> tuple[GatedRunner, list[int]]:
    """A runner, held at its first step, and prompts' first tokens as they start."""
    started: list[int] = []

    def note(plan: StepPlan) -> None:
        started.extend(plan.token_ids[plan.positions == 0].tolist())

    return GatedRunner(free_steps=0, watch=note), started


def waits_at_the_entrance(at: Scene, number: int) -> bool:
    return len(at.engine._gate._waiters) == number


def test_who_never_reads_holds_up_nobody(run: Run) -> None:
    """A stream without a reader runs to its end, and others beside it and after it do too."""

    async def main() -> None:
        async with fake_engine(max_num_seqs=2) as engine:
            silent = await engine.generate([1, 2], SamplingParams(max_tokens=100)).__aenter__()
            for _ in range(5):
                await check_generates(engine)
            await engine.idle()
            assert engine.stats().requests_finished == 6
            assert [token.id async for token in silent] == undisturbed([1, 2], 100)

    run(main)
