"""What a replay is asked: the pool, the batch, and how time passes."""

from typing import Protocol

import attrs

from kvpage.blocks import PoolGeometry
from kvpage.errors import ConfigError
from kvpage.plan import StepPlan


def _at_least_one(_instance: object, attribute: "attrs.Attribute[int]", value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{attribute.name} must be at least 1, got {value}")


def _share(_instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{attribute.name} must be between 0 and 1, got {value}")


class StepClock(Protocol):
    """Says how long a step takes."""

    def of(self, plan: StepPlan) -> float:
        """Seconds that `plan` takes."""
        ...


@attrs.frozen
class StepTime:
    """How long a step takes: `base + per_token * tokens + per_kv_token * tokens in the cache`.

    The defaults are arithmetic for 8 billion parameters in bf16 with 128 KiB of K and V a token on
    one H100: weights read at 3.3 TB/s and a millisecond around them; 2 operations a parameter at
    half of 990 TFLOP/s; K and V read at 80 % of 3.3 TB/s.

    Attributes:
        base_s: seconds of any step.
        per_token_s: seconds for each token that is computed.
        per_kv_token_s: seconds for each token that is attended to.
    """

    base_s: float = 6e-3
    per_token_s: float = 3.2e-5
    per_kv_token_s: float = 5e-8

    @classmethod
    def parse(cls, numbers: str) -> "StepTime":
        """Read the three numbers, separated by commas.

        Raises:
            ConfigError: they are not three numbers, or no such times.
        """
        try:
            base_s, per_token_s, per_kv_token_s = map(float, numbers.split(","))
        except ValueError as error:
            raise ConfigError(
                f"a step time is three numbers of seconds, base,per_token,per_kv_token, "
                f"got {numbers!r}"
            ) from error
        return cls(base_s, per_token_s, per_kv_token_s)

    def __attrs_post_init__(self) -> None:
        if not self.base_s > 0 or not min(self.per_token_s, self.per_kv_token_s) >= 0:
            raise ConfigError(
                f"a step takes time above 0 s, got {self.base_s:g}, {self.per_token_s:g}, "
                f"{self.per_kv_token_s:g}"
            )

    def of(self, plan: StepPlan) -> float:
        """Seconds that `plan` takes."""
        return (
            self.base_s
            + self.per_token_s * len(plan.token_ids)
            + self.per_kv_token_s * int(plan.kv_lens.sum())
        )


@attrs.frozen(kw_only=True)
class ReplaySettings:
    """The pool and the batch, and how time passes.

    Attributes:
        slots: token slots in the pool.
        max_model_len: longest sequence in tokens; longer requests are left out and counted.
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens that one step computes at most; None lets a prompt of any length
            through in one step.
        prefix_cache: share the prompts' blocks by the trace's hash ids.
        step_time: None replays saturated, without a clock.
        cancel_rate: share of the requests that are cancelled, each after a random part of its
            output.
        seed: of the cancellations.
    """

    slots: int = attrs.field(default=100_000, validator=_at_least_one)
    max_model_len: int = attrs.field(default=2048, validator=_at_least_one)
    max_num_seqs: int = attrs.field(default=4096, validator=_at_least_one)
    max_batch_tokens: int | None = attrs.field(default=None, validator=_at_least_one)
    prefix_cache: bool = False
    step_time: StepClock | None = None
    cancel_rate: float = attrs.field(default=0.0, validator=_share)
    seed: int = 0

    def geometry(self, block_size: int) -> PoolGeometry:
        """The pool in blocks of `block_size` tokens.

        Raises:
            ConfigError: not even one block fits.
        """
        if self.slots < block_size:
            raise ConfigError(f"{self.slots} slots hold no block of {block_size} tokens")
        return PoolGeometry(self.slots // block_size, block_size, self.max_model_len)
