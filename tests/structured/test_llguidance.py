"""Structured outputs of a tiny random model with a real tokenizer: all that end are valid.

A random model says nothing sensible, so it wanders into every corner that a mask leaves open.
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import anyio
import attrs
import jsonschema_rs
import pytest
import torch
import transformers

from kvpage import (
    AsyncEngine,
    Completion,
    ConfigError,
    RequestError,
    SamplingParams,
    StructuredOutputs,
)
from kvpage.guided import LLGuidance
from kvpage.pretrained import default_model_path, load_pretrained
from kvpage.request import EngineModel
from tests.engine import scenes

pytest.importorskip("llguidance")
try:
    default_model_path()
except ConfigError as missing:
    pytestmark = pytest.mark.skip(reason=str(missing))

MAX_TOKENS = 64


@cache
def tokenizer() -> Any:
    """That of SmolLM2: 49,152 tokens of byte-level BPE."""
    return load_pretrained().tokenizer


@cache
def model() -> Any:
    """A llama that is as small as its vocabulary lets it be, with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=None,
    )
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        made.lm_head.weight.mul_(40)
    return made.eval()


def engine(**settings: Any) -> AsyncEngine:
    return AsyncEngine(model=model(), tokenizer=tokenizer(), **{"block_size": 8, **settings})


# -- random requests -------------------------------------------------------------------------------

REGEXES = (
    r"[a-z]{3,12}",
    r"(foo|bar)+baz?",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"[A-Z][a-z]+( [a-z]+){0,4}[.!?]",
    r"(ab|abc|abcd)",
    r"«[äöü]{1,5}»|\x{1F600}{1,3}",
)
GRAMMARS = (
    ('start: "<" word ("," word)* ">"\nword: /[a-z]{1,4}/', r"<[a-z]{1,4}(,[a-z]{1,4})*>"),
    ('root ::= "a" [bc]* "d"', r"a[bc]*d"),
)
CHOICES = ("yes", "no", "maybe so", "ÿes", 'say "yes"', "a\nb", "notice", "not")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema whose instances are not long."""
    nested = [an_object, an_array] * (4 if depth == 0 else depth < 3)
    return rng.choice([*SIMPLE, any_of, *nested])(rng, depth + 1)


def an_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "a b", "ключ", 'q"', "tags"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def an_array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    most = least + rng.randint(0, 2)
    items = random_schema(rng, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}


def an_integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def an_enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([1, "one", None, True, {"x": [1]}, 2.5], rng.randint(1, 4))}


SIMPLE: Sequence[Callable[[random.Random, int], dict[str, Any]]] = (
    an_integer,
    an_enum,
    lambda rng, _depth: {"type": "string", **rng.choice(STRINGS)},
    lambda rng, _depth: {"type": rng.choice(["boolean", "null"])},
    lambda rng, _depth: {"type": "number", "minimum": 0, "maximum": 1},
    lambda rng, _depth: {"const": rng.choice([0, "zero", [], {"a": 1}])},
)
STRINGS: Sequence[dict[str, Any]] = (
    {"maxLength": 12},
    {"minLength": 2, "maxLength": 8},
    {"pattern": "^[a-f0-9]{4}$"},
    {"format": "date"},
    {"format": "ipv4"},
)


CUTS: Sequence[dict[str, Any]] = ({}, {"top_k": 40}, {"top_p": 0.9}, {"frequency_penalty": 0.5})


@attrs.frozen
class Draw:
    """A request, and what its output must match."""

    params: SamplingParams
    regex: str | None = None
    schema: dict[str, Any] | None = None
    choice: Sequence[str] | None = None

    @classmethod
    def of(cls, number: int) -> "Draw":
        """The request of this number: half of all have a schema."""
        rng = random.Random(number)
        form: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        match number % 8:
            case 0:
                form["regex"] = expected["regex"] = rng.choice(REGEXES)
            case 2:
                form["choice"] = expected["choice"] = rng.sample(CHOICES, rng.randint(1, 5))
            case 4:
                form["grammar"], expected["regex"] = rng.choice(GRAMMARS)
            case _:
                form["json_schema"] = expected["schema"] = random_schema(rng)
        params = SamplingParams(
            structured_outputs=StructuredOutputs(**form),
            seed=number,
            max_tokens=MAX_TOKENS,
            temperature=rng.choice([0, 0.7, 1.0, 2.0]),
            **rng.choice(CUTS),
        )
        return cls(params, **expected)

    def check(self, completion: Completion) -> None:
        """An output that has ended is valid, its text being the whole of it."""
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "length":
            return
        if self.schema is not None:
            jsonschema_rs.validate(self.schema, json.loads(completion.text))
        elif self.choice is not None:
            assert completion.text in self.choice
        else:
            assert re.fullmatch(python_regex(self.regex or ""), completion.text)


def python_regex(regex: str) -> str:
    return regex.replace(r"\x{1F600}", "\N{GRINNING FACE}")


PROMPT = "Say something:"


async def complete_all(served: AsyncEngine, draws: Sequence[Draw]) -> list[Completion]:
    """All at once."""
    calls = [partial(served.complete, PROMPT, draw.params) for draw in draws]
    return await scenes.complete_all(served, calls)


async def test_every_output_that_ends_is_valid() -> None:
    """Draws of schemas, expressions, choices, grammars and parameters."""
    draws = [Draw.of(number) for number in range(120)]
    async with engine() as served:
        completions = await complete_all(served, draws)
    for draw, completion in zip(draws, completions, strict=True):
        draw.check(completion)
    ended = [completion.finish_reason == "stop" for completion in completions]
    assert sum(ended) > 0.8 * len(ended)


@cache
def alone() -> list[tuple[tuple[int, ...], str]]:
    """Some requests, one after another."""

    async def run() -> list[Completion]:
        async with engine() as served:
            return [await served.complete(PROMPT, draw.params) for draw in SOME]

    return [(one.token_ids, one.text) for one in anyio.run(run)]


SOME = [Draw.of(number) for number in range(1, 16)]
SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"max_batch_tokens": 9},
    "preempted": {"kv_memory": "160 tokens", "max_model_len": 120},
    "dynamic": {"allocator": "dynamic"},
    "contiguous": {"allocator": "contiguous:reserve=request"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_comes_in_any_batch_and_under_preemption(name: str) -> None:
    """Grammars notice neither company, nor chunks, nor the strategy, nor lost blocks."""

    async def together() -> tuple[list[Completion], int]:
        async with engine(**SETTINGS[name]) as served:
            return await complete_all(served, SOME), served.stats().preemptions

    found, preemptions = anyio.run(together)
    assert [(one.token_ids, one.text) for one in found] == alone()
    assert (preemptions > 0) == (name == "preempted")


async def test_the_end_token_comes_only_where_the_grammar_allows_it() -> None:
    """However much it is favoured; and where it is the only way on, it comes."""
    eos = tokenizer().eos_token_id
    outputs = StructuredOutputs(regex=r"[ab]{6}\n?")
    eager = SamplingParams(structured_outputs=outputs, logit_bias={eos: 90.0}, max_tokens=30)
    async with engine() as served:
        ended = await served.complete(PROMPT, eager)
        bare = await served.complete(PROMPT, attrs.evolve(eager, ignore_eos=True))
    assert re.fullmatch("[ab]{6}", ended.text)
    assert ended.token_ids[-1] == eos
    assert bare.finish_reason == "stop"


async def test_log_probabilities_are_of_the_model_not_of_the_grammar() -> None:
    """As everywhere else: before all changes."""
    params = SamplingParams(
        structured_outputs=StructuredOutputs(choice=["yes"]), logprobs=0, temperature=0
    )
    async with engine() as served:
        completion = await served.complete(PROMPT, params)
    assert completion.text == "yes"
    assert all(of_token.own < -0.1 for of_token in completion.logprobs)


REFUSED = [
    ({"json_schema": {"type": "bogus"}}, "json_schema cannot be used: Invalid type: bogus"),
    ({"json_schema": {"$ref": "#/x"}}, "json_schema cannot be used: Pointer '/x' does not exist"),
    ({"json_schema": {"unevaluatedItems": {}}}, "Unimplemented keys"),
    ({"regex": "(ab"}, "regex cannot be used: at 1(8): invalid regex"),
    ({"regex": r"a[^\s\S]"}, "regex cannot be used: no token can follow"),
    ({"grammar": "start: foo"}, 'grammar cannot be used: at 1(8): unknown name: "foo"'),
    ({"grammar": "((("}, "grammar cannot be used: "),
]


async def test_nonsense_is_refused_with_llguidance_s_reason() -> None:
    """In the caller's task, in one line; nothing is computed for it."""
    async with engine() as served:
        for form, sentence in REFUSED:
            outputs = StructuredOutputs(**form)  # type: ignore[arg-type]
            with pytest.raises(RequestError) as refusal:
                await served.complete(PROMPT, SamplingParams(structured_outputs=outputs))
            assert sentence in str(refusal.value)
            assert "\n" not in str(refusal.value)
        assert served.stats().steps == 0


def test_a_grammar_is_compiled_once() -> None:
    """And each request gets a matcher of its own."""
    grammars = LLGuidance(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])
    wanted = StructuredOutputs(regex="[ab]c")
    first, second = (grammars.compile(wanted) for _ in range(2))
    [a, b] = (tokenizer().convert_tokens_to_ids(letter) for letter in "ab")
    assert not first.accept(a)
    assert not second.accept(b)
    assert second.failure is None
    assert first.accept(a)
    assert first.failure is not None


def test_tokenizers_that_llguidance_cannot_use_are_refused() -> None:
    """None at all, and one that is not of the `tokenizers` library."""
    wanted = StructuredOutputs(regex="a")
    for given, sentence in ((None, "has no tokenizer"), (object(), "cannot use this model's")):
        with pytest.raises(RequestError, match=sentence):
            EngineModel("m", 300, tokenizer=given).grammars.compile(wanted)


def test_without_the_extra_the_request_is_refused() -> None:
    """The sentence says what to install."""
    program = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from kvpage import StructuredOutputs, RequestError\n"
        "from kvpage.guided import LLGuidance\n"
        "try: LLGuidance(object(), 9, ()).compile(StructuredOutputs(regex='a'))\n"
        "except RequestError as refusal: print(refusal)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "structured_outputs needs llguidance: pip install 'kvpage[guided]'\n"
