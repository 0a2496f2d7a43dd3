"""`kvpage generate`: stream text for one prompt or several at once."""

import io
import sys
import time
from contextlib import redirect_stderr
from typing import Annotated, Any

import anyio
import attrs
import typer
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvpage.cli import options
from kvpage.cli.figure import block_table_figure
from kvpage.config import EngineConfig
from kvpage.engine import AsyncEngine
from kvpage.errors import KvpageError
from kvpage.request import Prompt
from kvpage.sampling import SamplingParams
from kvpage.stats import BlockMap, EngineStatistics
from kvpage.stream import Token

REFRESH_PER_SECOND = 12


def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="One prompt or more.")],
    model: options.Model = None,
    allocator: options.Allocator = "fixed",
    block_size: options.BlockSize = None,
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 64,
    max_batch_tokens: options.MaxBatchTokens = 512,
    weights: options.Weights = None,
    kv_dtype: options.KVDtype = "auto",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Among the k most likely; 0 means all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Among those that sum up to p.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop below this share of the top.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap each prompt in the model's chat template.")
    ] = False,
    figure: Annotated[
        bool, typer.Option("--figure", help="Draw the block table of the first prompt at the end.")
    ] = False,
) -> None:
    """Generate text and stream it as it comes."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    settings: dict[str, Any] = {
        "allocator": allocator,
        "block_size": block_size,
        "kv_memory": kv_memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_batch_tokens": max_batch_tokens,
        "kv_dtype": kv_dtype,
    }
    EngineConfig(**settings)  # refuses what cannot work before anything is loaded
    loading = {**settings, "weights": weights}
    failed = anyio.run(_run, model, loading, prompts, params, chat, figure)
    raise typer.Exit(2 if failed else 0)


@attrs.define(eq=False)
class _Answer:
    """One prompt and what has come of it."""

    name: str
    prompt: str
    text: str = ""
    num_tokens: int = 0
    last: Token | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        ended = self.last is not None and self.last.finish_reason is not None
        return ended or self.error is not None

    def add(self, token: Token) -> None:
        self.text += token.text
        self.num_tokens += 1
        self.last = token


@attrs.define(eq=False)
class _Peak:
    """The fullest moment seen."""

    statistics: EngineStatistics | None = None
    block_map: BlockMap | None = None

    async def observe(self, engine: AsyncEngine, *, map_blocks: bool) -> None:
        now = engine.stats()
        fullest = self.statistics
        if fullest is None or now.pool.used_blocks > fullest.pool.used_blocks:
            self.statistics = now
            if map_blocks:
                self.block_map = await engine.block_map()


async def _run(
    model: str | None,
    settings: dict[str, Any],
    prompts: list[str],
    params: SamplingParams,
    chat: bool,
    figure: bool,
) -> int:
    """Serve all prompts; returns how many failed."""
    console = Console()
    engine = await _open(console, model, settings)
    async with engine:
        answers = [_Answer(chr(ord("A") + i % 26), prompt) for i, prompt in enumerate(prompts)]
        peak = _Peak()
        started = time.perf_counter()

        async def answer_one(answer: _Answer) -> None:
            prompt: Prompt = answer.prompt
            if chat:
                prompt = [{"role": "user", "content": answer.prompt}]
            try:
                async for token in engine.generate(prompt, params, request_id=answer.name):
                    answer.add(token)
                    if len(answers) == 1:
                        console.out(token.text, end="", highlight=False)
                    await peak.observe(engine, map_blocks=figure)
            except KvpageError as error:  # the other prompts go on
                answer.error = str(error)

        if len(answers) == 1:
            await answer_one(answers[0])
            console.print()
        else:
            await _together(console, answers, answer_one)
        failed = [answer for answer in answers if answer.error is not None]
        for answer in failed:
            print(f"kvpage: {answer.name}: {answer.error}", file=sys.stderr)
        _print_note(console, _summary(answers, time.perf_counter() - started, peak))
        if peak.block_map is not None and peak.block_map.sequences:
            console.print()
            console.print(block_table_figure(peak.block_map))
    return len(failed)


async def _open(console: Console, model: str | None, settings: dict[str, Any]) -> AsyncEngine:
    """Load the model with a word on what is loaded, and without transformers' own output."""
    noise = io.StringIO()  # progress bars of the conversion, which would break the status line
    with console.status(f"loading {model or 'the default model'}"), redirect_stderr(noise):
        await anyio.to_thread.run_sync(_quiet_transformers)
        engine = await AsyncEngine.from_pretrained(model, **settings)
    geometry = engine.geometry
    _print_note(
        console,
        f"{engine.model.name}: {geometry.num_blocks} blocks of {geometry.block_size} tokens, "
        f"allocator {engine.config.allocator}, attention {engine.config.attention}",
    )
    return engine


def _print_note(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False, soft_wrap=not console.is_terminal)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()


async def _together(console: Console, answers: list[_Answer], answer_one: Any) -> None:
    """Run all prompts at once; on a terminal, show them as they grow."""
    if not console.is_terminal:
        async with anyio.create_task_group() as tasks:
            for answer in answers:
                tasks.start_soon(answer_one, answer)
        for answer in answers:
            console.out(f"[{answer.name}] {answer.prompt}{answer.text}\n", highlight=False)
        return
    with Live(_screen(answers), console=console, auto_refresh=False) as live:
        async with anyio.create_task_group() as tasks:

            async def draw() -> None:
                while not all(answer.over for answer in answers):
                    live.update(_screen(answers), refresh=True)
                    await anyio.sleep(1 / REFRESH_PER_SECOND)

            tasks.start_soon(draw)
            for answer in answers:
                tasks.start_soon(answer_one, answer)
        live.update(_screen(answers), refresh=True)


def _screen(answers: list[_Answer]) -> Table:
    grid = Table.grid(expand=True)
    for answer in answers:
        text = Text(answer.prompt, style="bold").append(answer.text, style="not bold")
        state = f"{answer.num_tokens} tokens" + (" · done" if answer.over else "")
        border = "green" if answer.over else "none"
        grid.add_row(Panel(text, title=answer.name, subtitle=state, border_style=border))
    return grid


def _summary(answers: list[_Answer], seconds: float, peak: _Peak) -> str:
    """One line of what happened."""
    tokens = sum(answer.num_tokens for answer in answers)
    firsts = [a.last.timings.first_token_s for a in answers if a.last and a.last.timings]
    parts = [
        f"{tokens} tokens in {seconds:.1f} s",
        f"{tokens / seconds:.1f} tokens/s",
        f"first token after {min(firsts, default=0.0):.2f} s",
    ]
    if peak.statistics is not None:
        pool = peak.statistics.pool
        parts += [
            f"{pool.used_blocks} of {pool.num_blocks} blocks at most",
            f"{1 - peak.statistics.internal_waste:.0%} of their slots filled",
            f"utilisation {peak.statistics.utilisation:.1%}",
        ]
    return " · ".join(parts)
