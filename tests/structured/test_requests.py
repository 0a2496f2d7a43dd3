"""What a request may ask for; refusals without any library."""

from typing import Any

import pytest

from kvpage import RequestError, SamplingParams, StructuredOutputs

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json_schema, regex, choice and grammar, got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"regex": ""}, "regex must be a text that is not empty"),
    ({"regex": 7}, "regex must be a text that is not empty, got 7"),
    ({"grammar": ""}, "grammar must be a text that is not empty"),
    ({"choice": []}, "choice is empty: there is nothing to generate"),
    ({"choice": "yes"}, "choice must be several texts, got 'yes'"),
    ({"choice": ["yes", ""]}, "choice must be a text that is not empty, got ''"),
    ({"choice": [1]}, "choice must be a text that is not empty, got 1"),
    ({"choice": 3}, "choice must be several texts, got 3"),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": "[1]"}, "json_schema must be a JSON object, got [1]"),
    ({"json_schema": 3}, "json_schema must be a mapping or JSON text, got 3"),
    ({"json_schema": {"type": object()}}, "json_schema is not JSON"),
    ({"json_schema": "[" * 100_000}, "json_schema is not JSON"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_makes_no_sense_is_refused_at_construction(
    given: dict[str, Any], sentence: str
) -> None:
    """In one sentence that names the argument."""
    with pytest.raises(RequestError) as refusal:
        StructuredOutputs(**given)
    assert sentence in str(refusal.value)


def test_sampling_params_take_nothing_else() -> None:
    """A bare schema or expression is not guessed at."""
    with pytest.raises(RequestError, match="structured_outputs must be StructuredOutputs, got"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_equal_schemas_are_equal() -> None:
    """As a mapping or as text; so that a grammar is compiled once."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    text = '{"type": "object",  "properties": {"b": {}, "a": {}}}'
    assert StructuredOutputs(json_schema=schema) == StructuredOutputs(json_schema=text)
    assert len({StructuredOutputs(json_schema=schema), StructuredOutputs(json_schema=text)}) == 1
