"""Ends a text where a stop string begins, without showing any of it.

The text that has a stop string in it ends where the stop string begins that was complete first; of
several that end in the same place, the longest. So the output depends on the text alone, not on how
it was cut into tokens.
"""

from collections.abc import Sequence

from kvpage.detokenizer import Detokenizer


class StopStrings:
    """Decodes one sequence's output and looks for its stop strings, across tokens.

    Args:
        detokenizer: of this output; owned by the stop strings from now on.
        stops: texts that end the output; none is empty.
        min_tokens: a stop string counts if it is complete after so many tokens only.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._immune = 0  # characters of `_held` that came too early to end anything

    def push(self, token_id: int, *, last: bool = False) -> tuple[str, bool]:
        """Add a token.

        Args:
            token_id: the token.
            last: no token will follow, so nothing need be held back.

        Returns:
            The text that can be shown now, and whether a stop string ends it here.
        """
        self._num_tokens += 1
        self._held += self._detokenizer.push(token_id)
        if last:
            self._held += self._detokenizer.finish()
        if self._num_tokens <= self._min_tokens:
            self._immune = len(self._held)
        begins = self._first_stop()
        if begins is not None:
            return self._release(begins), True
        held_back = 0 if last else self._possible_beginning()
        return self._release(len(self._held) - held_back), False

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._immune = max(0, self._immune - length)
        return text

    def _first_stop(self) -> int | None:
        """Where the first complete stop string of the held text begins."""
        found = []
        for stop in self._stops:
            begins = self._held.find(stop, max(0, self._immune - len(stop) + 1))
            if begins >= 0:
                found.append((begins + len(stop), begins))
        return min(found)[1] if found else None

    def _possible_beginning(self) -> int:
        """Length of the longest tail of the held text that could become a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
