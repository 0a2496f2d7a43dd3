"""Grammars in the engine, with one that needs no library: who asks what, when, and how often."""

from functools import partial
from typing import Any

import anyio
import pytest

from kvpage import (
    AsyncEngine,
    Completion,
    PoolGeometry,
    RequestError,
    SamplingParams,
    StepFailed,
    StructuredOutputs,
)
from tests.engine import scenes
from tests.engine.runners import CharacterTokenizer, GatedRunner, SamplingRunner
from tests.engine.scenes import fake_engine
from tests.structured.stripes import BREAKS, StripeGrammars, striped

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
TIGHT = PoolGeometry(num_blocks=14, block_size=4, max_model_len=48)
ROOMY = PoolGeometry(num_blocks=64, block_size=4, max_model_len=128)
STRATEGIES = ("fixed", "dynamic", "contiguous:reserve=request")


def stripes(length: int, **options: Any) -> SamplingParams:
    outputs = StructuredOutputs(regex=str(length))
    return SamplingParams(**{"seed": 5, "structured_outputs": outputs, **options})


def engine(
    grammars: StripeGrammars | None = None, geometry: PoolGeometry = ROOMY, **settings: Any
) -> AsyncEngine:
    return fake_engine(
        SamplingRunner(geometry),
        geometry=geometry,
        tokenizer=CharacterTokenizer(),
        grammars=grammars or StripeGrammars(),
        **settings,
    )


async def complete_all(served: AsyncEngine, requests: list[SamplingParams]) -> list[Completion]:
    """All at once, in order."""
    return await scenes.complete_all(
        served, [partial(served.complete, PROMPT, params) for params in requests]
    )


@pytest.mark.parametrize("temperature", [0, 0.7, 5])
async def test_an_output_ends_with_its_grammar(temperature: float) -> None:
    """No end token, no length: it is complete."""
    async with engine() as served:
        completion = await served.complete(PROMPT, stripes(9, temperature=temperature))
    assert striped(completion.token_ids)
    assert len(completion.token_ids) == 9
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(("max_tokens", "reason"), [(8, "length"), (9, "stop"), (10, "stop")])
async def test_the_length_may_come_first(max_tokens: int, reason: str) -> None:
    """An output that is complete with its last token is complete."""
    async with engine() as served:
        completion = await served.complete(PROMPT, stripes(9, max_tokens=max_tokens))
    assert (completion.finish_reason, len(completion.token_ids)) == (reason, min(max_tokens, 9))


async def test_masks_of_a_step_are_computed_in_one_call() -> None:
    """Of the rows that have a grammar, and of no others."""
    grammars = StripeGrammars()
    free = SamplingParams(seed=1, max_tokens=7)
    async with engine(grammars) as served:
        await complete_all(served, [free] * 3)
        assert grammars.calls == []
        completion = await served.complete(PROMPT, stripes(7, n=3))
        assert len(completion.choices) == 3
    assert sum(grammars.calls) == 3 * 7
    assert grammars.calls[-1] == 2  # the first choice is a token ahead
    assert max(grammars.calls) == 3


@pytest.mark.parametrize("options", [{}, {"logit_bias": {7: 2.0}}])
async def test_a_row_with_a_grammar_changes_no_other(options: dict[str, Any]) -> None:
    """Equal seeds give a request without one what it gets alone, with rules of its own or not."""
    free = SamplingParams(seed=3, max_tokens=12, **options)
    async with engine() as served:
        alone = await served.complete(PROMPT, free)
        together = await complete_all(served, [stripes(12), free, free, stripes(6)])
    assert [one.token_ids for one in together[1:3]] == [alone.token_ids] * 2
    assert not striped(alone.token_ids)


@pytest.mark.parametrize("allocator", STRATEGIES)
@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_preemption_does_not_show(allocator: str, prefix_cache: bool) -> None:
    """The grammar stays where it was while tokens are computed again."""
    requests = [
        stripes(25),
        stripes(25, n=3, temperature=0.5),
        stripes(25, temperature=0),
        stripes(25, seed=8, logit_bias={4: 3.0, 5: 3.0}, frequency_penalty=1.0),
    ]
    async with engine() as roomy:
        expected = [await roomy.complete(PROMPT, params) for params in requests]
    async with engine(
        geometry=TIGHT, max_batch_tokens=7, allocator=allocator, prefix_cache=prefix_cache
    ) as tight:
        found = await complete_all(tight, requests)
        preemptions = tight.stats().preemptions
    assert [every(completion) for completion in found] == [every(one) for one in expected]
    assert preemptions > 0 or allocator.startswith("contiguous")


def every(completion: Completion) -> list[Any]:
    """All choices of a completion."""
    return [(choice.token_ids, choice.finish_reason) for choice in completion.choices]


async def test_choices_go_their_own_ways() -> None:
    """Each has a matcher of its own."""
    async with engine() as served:
        completion = await served.complete(PROMPT, stripes(11, n=4, temperature=3))
    outputs = {choice.token_ids for choice in completion.choices}
    assert len(outputs) == 4
    assert all(striped(output) and len(output) == 11 for output in outputs)


async def test_other_rules_narrow_the_grammar() -> None:
    """Allowed tokens and biases choose among what the grammar allows."""
    evens = tuple(range(0, 251, 8)) + tuple(range(1, 251, 4)) + tuple(range(2, 251, 4))
    params = stripes(3, allowed_token_ids=evens, logit_bias={249: 60.0})
    async with engine() as served:
        first, second, _ = (await served.complete(PROMPT, params)).token_ids
    assert (first % 8, second) == (0, 249)


async def test_a_stop_text_may_end_it_earlier() -> None:
    """What the request asks for besides still holds."""
    async with engine() as served:
        whole = await served.complete(PROMPT, stripes(9))
        cut = await served.complete(PROMPT, stripes(9, stop=[whole.text[4]]))
        late = await served.complete(PROMPT, stripes(9, stop=[whole.text[4]], min_tokens=9))
    assert (cut.text, cut.finish_reason) == (whole.text[:4], "stop")
    assert late.text == whole.text


async def test_where_rules_leave_nothing_of_the_grammar_the_request_fails() -> None:
    """Its own alone."""
    params = stripes(9, allowed_token_ids=[0, 4, 8])
    async with engine() as served:
        with pytest.raises(StepFailed, match="no token to choose"):
            await served.complete(PROMPT, params)
        assert (await served.complete(PROMPT, stripes(4))).finish_reason == "stop"


async def test_a_grammar_that_fails_ends_its_own_request() -> None:
    """With its reason; the others of the step go on."""
    outcome: list[Any] = []

    async def doomed() -> None:
        outputs = StructuredOutputs(choice=[BREAKS])
        with pytest.raises(StepFailed) as failure:
            await served.complete(PROMPT, SamplingParams(structured_outputs=outputs))
        outcome.append(str(failure.value))

    async with engine() as served, anyio.create_task_group() as tasks:
        tasks.start_soon(doomed)
        [completion] = await complete_all(served, [stripes(12)])
    assert outcome == ["the output cannot be continued by its grammar: too hard"]
    assert len(completion.token_ids) == 12


async def test_a_runner_that_ignores_grammars_is_found_out() -> None:
    """Its request fails with the token that has no place."""
    runner = GatedRunner(ROOMY)
    async with fake_engine(runner, geometry=ROOMY, grammars=StripeGrammars()) as served:
        with pytest.raises(StepFailed, match="cannot be continued by its grammar: token"):
            await served.complete(PROMPT, stripes(20))
        await served.idle()
        assert served.stats().pool.used_blocks == 0


async def test_what_cannot_be_compiled_is_refused_in_the_caller_s_task() -> None:
    """Nothing was done for it."""
    params = SamplingParams(structured_outputs=StructuredOutputs(grammar="x"))
    async with engine() as served:
        with pytest.raises(RequestError, match="stripes only"):
            await served.complete(PROMPT, params)
        assert served.stats().steps == 0
