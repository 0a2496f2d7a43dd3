"""A request on its way through the engine."""

from enum import Enum
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvpage.blocks import SequenceId
from kvpage.grammar import Matcher
from kvpage.logits import TokenRules
from kvpage.prefix import PrefixKeys
from kvpage.sampling import Logprobs, SamplingParams

NO_ADAPTER = -1

FinishReason = Literal["stop", "length"]


class SequenceState(Enum):
    """Where a sequence is. WAITING and RUNNING may alternate (preemption); FINISHED is final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@attrs.define(eq=False)
class Sequence:
    """One request's tokens and state, owned by the scheduler.

    While it runs, its tokens and counters live in a row of the `RunningBatch`; while it waits,
    `tokens` holds all that is known: the prompt and, after a preemption, what was generated.

    Attributes:
        id: unique in the engine.
        tokens: `int32[n]`, known tokens while not running.
        prompt_tokens: length of the prompt.
        max_total_tokens: prompt and output together end here at the latest.
        params: how tokens are chosen.
        seed: the effective seed.
        rules: what its parameters allow, forbid and favour; None where they have no such rules.
        matcher: follows its output through the grammar that it must have; None without one.
        adapter: the number of its adapter among the model's; `NO_ADAPTER` means none.
        stop_token_ids: the tokens that end it (the model's own and the request's).
        fork_of: a sequence of the same prompt, whose blocks it shares if that one runs when it is
            admitted.
        prefix_keys: names its blocks for prefix reuse; None shares nothing.
        request: whatever its owner wants back with its tokens; the scheduler never looks at it.
        priority: lower runs first.
        state: see `SequenceState`.
        row: its row in the running batch; -1 when it does not run.
        num_preemptions: how often it lost its blocks.
        cached_tokens: prompt tokens that the prefix cache gave at the first admission.
        prompt_logprobs: of the prompt's second token, its third, and so on, as far as they are
            known and its parameters ask for them.
    """

    id: SequenceId
    tokens: npt.NDArray[np.int32]
    prompt_tokens: int
    max_total_tokens: int
    params: SamplingParams = attrs.field(factory=SamplingParams)
    seed: int = 0
    rules: TokenRules | None = None
    matcher: Matcher | None = None
    adapter: int = NO_ADAPTER
    stop_token_ids: tuple[int, ...] = ()
    fork_of: "Sequence | None" = None
    prefix_keys: PrefixKeys | None = None
    request: Any = None
    priority: int = 0
    state: SequenceState = SequenceState.WAITING
    row: int = -1
    num_preemptions: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = attrs.field(factory=list)

    @property
    def scored_tokens(self) -> int:
        """The first so many tokens need not be computed for the sake of prompt log-probabilities.

        (A token's logits score the token after it, so the prompt's last never need be.)
        """
        if self.params.prompt_logprobs is None:
            return self.prompt_tokens - 1
        return len(self.prompt_logprobs)

    @property
    def urgency(self) -> tuple[int, int]:
        """Sort key: lower is served first and preempted last."""
        return (self.priority, self.id)
