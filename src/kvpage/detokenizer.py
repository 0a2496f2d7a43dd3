"""Text from tokens, as they come.

A token is not a piece of text: the bytes of one character may be spread over several tokens, and
some tokenizers drop or add spaces by context. So text is shown when it can no longer change: a
window of tokens is decoded again with each new one, and what it adds is held back while it ends in
an incomplete character. Joined pieces equal the decoding of all tokens at once.

Tokenizers with byte fallback (SentencePiece's) need more care: one broken byte turns the whole run
of bytes around it into replacement characters, complete ones before it included. So text is also
held back while a broken byte behind it would change it.
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens skipped."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes one sequence's output token by token.

    Args:
        decode: the tokenizer's own decoding.
        broken_byte: a token that is one byte from inside a character, where the tokenizer falls
            back to such bytes.
    """

    def __init__(self, decode: Decode, broken_byte: int | None = None) -> None:
        self._decode = decode
        self._broken_byte = broken_byte
        self._ids: list[int] = []
        self._shown = ""
        self._window = 0  # first token of the window that is decoded again
        self._window_shown = 0  # tokens of the window whose text has been shown, counted from 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be shown now, often empty.

        Cost: decodes the tokens since the last but one point at which text was complete.
        """
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window : self._window_shown])
        text = self._decode(self._ids[self._window :])
        if len(text) <= len(before) or text.endswith(_INCOMPLETE) or self._may_change(text):
            return ""
        self._window, self._window_shown = self._window_shown, len(self._ids)
        piece = text[len(before) :]
        self._shown += piece
        return piece

    def finish(self) -> str:
        """The text held back so far, once no token will follow."""
        text = self._decode(self._ids)
        return text[len(self._shown) :] if text.startswith(self._shown) else ""

    def _may_change(self, text: str) -> bool:
        """Would a broken byte right behind the window change `text`, its decoding?"""
        if self._broken_byte is None:
            return False
        return not self._decode([*self._ids[self._window :], self._broken_byte]).startswith(text)
