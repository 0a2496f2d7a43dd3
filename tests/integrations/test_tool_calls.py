"""Tool calls in what a model writes, however it is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage.integrations.openai.tool_calls import (
    FunctionCall,
    HermesReader,
    LlamaReader,
    Piece,
    ToolCallReader,
    reader_for,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F = FunctionCall("f", '{"x": 1}')
G = FunctionCall("g", "{}")


def read(reader: ToolCallReader, parts: list[str]) -> list[Piece]:
    """What a reader makes of a text in parts, neighbouring texts joined."""
    pieces: list[Piece] = []
    for piece in [p for part in parts for p in reader.push(part)] + reader.finish():
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


HERMES: list[tuple[str, list[Piece]]] = [
    ("", []),
    ("Hello\n", ["Hello\n"]),
    (CALL, [F]),
    (f"Let me see.\n{CALL}\n", ["Let me see.", F]),
    (f"{CALL}\n{CALL}", [F, F]),
    (f'{CALL}<tool_call>{{"name": "g"}}</tool_call> done', [F, G, "done"]),
    (CALL.removesuffix("</tool_call>"), [F]),
    ("<tool_call>no JSON</tool_call>", ["<tool_call>no JSON</tool_call>"]),
    ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    ('<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
    ("a <tool b < c", ["a <tool b < c"]),
    ("ends with <tool_cal", ["ends with <tool_cal"]),
    (
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        ["<tool_call>" + "[" * 100_000 + "</tool_call>"],
    ),
]

LLAMA: list[tuple[str, list[Piece]]] = [
    ("", []),
    ("Hello", ["Hello"]),
    ('{"name": "f", "parameters": {"x": 1}}', [F]),
    ('\n {"name": "f", "parameters": {"x": 1}}\n', [F]),
    ('{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', [F, G]),
    ('{"answer": 42}', ['{"answer": 42}']),
    (
        '{"name": "f", "parameters": {"x": 1}} and more',
        ['{"name": "f", "parameters": {"x": 1}} and more'],
    ),
    ('{"name": "f", "param', ['{"name": "f", "param']),
    ("{" * 100_000, ["{" * 100_000]),
]


@pytest.mark.parametrize(("text", "pieces"), HERMES, ids=lambda value: str(value)[:20])
def test_hermes(text: str, pieces: list[Piece]) -> None:
    """Calls between tags; what is none is text."""
    assert read(HermesReader(), [text]) == pieces


@pytest.mark.parametrize(("text", "pieces"), LLAMA, ids=lambda value: str(value)[:20])
def test_llama(text: str, pieces: list[Piece]) -> None:
    """An answer that is nothing but calls; what is none is text."""
    assert read(LlamaReader(), [text]) == pieces


@given(
    st.lists(
        st.sampled_from(
            [CALL, "<tool", "_call>", "</tool_call>", "\n", " ", "word", '{"name": "g"}']
        )
    ),
    st.data(),
)
def test_the_cut_does_not_matter(words: list[str], data: st.DataObject) -> None:
    """One reading of a text, whatever its tokens."""
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for new_reader in (HermesReader, LlamaReader):
        assert read(new_reader(), parts) == read(new_reader(), [text])


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    """Only what may be the beginning of a call waits."""
    reader = HermesReader()
    assert [reader.push(part) for part in ("one", " two", " <to", "day")] == [
        ["one"],
        [" two"],
        [],
        [" <today"],
    ]


@pytest.mark.parametrize(
    ("template", "reader"),
    [
        ("{{ tools }} <tool_call>", HermesReader),
        ('{{ tools }} <|start_header_id|> "parameters"', LlamaReader),
        ("{{ tools }} [TOOL_CALLS]", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_a_template_tells_its_form(template: str, reader: type[ToolCallReader] | None) -> None:
    """None, if it is none that is known, or has no place for tools."""
    assert reader_for(template) is reader
