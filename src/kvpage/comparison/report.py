"""A comparison as one HTML page that needs nothing else: no script, no network, no font."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files

from kvpage.comparison.bitmap import film_png
from kvpage.comparison.charts import Axis, Line, line_chart
from kvpage.comparison.figures import FIGURES, TableFigure, rate, seconds, size, throughput
from kvpage.comparison.records import (
    CandidateResult,
    CandidateRun,
    Comparison,
    Distribution,
    fastest,
)
from kvpage.comparison.verdict import verdict

STRATEGY_COLOURS = 6
CURVE_POINTS = 100
FIRST_SHOWN = 2
"""The curves of a logarithmic axis begin with this point: the very first may be next to 0."""


def html_report(comparison: Comparison, *, command: str = "") -> str:
    """The page, whole.

    Args:
        comparison: what was measured; it may be under way.
        command: what made it, shown at the end.
    """
    style = files("kvpage.comparison").joinpath("report.css").read_text("utf-8")
    title = f"{', '.join(comparison.strategies)} on {comparison.model}"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{style}</style>",
        f"<h1>{escape(title)}</h1>",
        *_sections(comparison),
        *_conditions(comparison, command),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _sections(comparison: Comparison) -> Iterator[str]:
    yield f'<p class="soft">{escape(_one_line(comparison))}</p>'
    if comparison.state != "complete":
        yield f'<p class="state">{escape(_state(comparison))}</p>'
    sentences = verdict(comparison).sentences
    yield f'<div class="verdict">{"".join(f"<p>{escape(s)}</p>" for s in sentences)}</div>'
    if comparison.measured:
        yield from _throughputs(comparison)
        yield from _utilisations(comparison)
        yield from _films(comparison)
        yield from _latencies(comparison)
    yield from _table(comparison)


def _one_line(comparison: Comparison) -> str:
    workload, settings = comparison.workload, comparison.settings
    arrival = "all at once" if settings.rate is None else f"{settings.rate:g} a second"
    return (
        f"{len(workload.requests)} requests of “{workload.name}”, {arrival}: "
        f"{workload.prompt_tokens:,} prompt tokens and {workload.output_tokens:,} output tokens. "
        f"A pool of {comparison.slots:,} tokens "
        f"({size(comparison.slots * comparison.token_bytes)}) for each candidate."
    )


def _state(comparison: Comparison) -> str:
    runs = sum(len(result.runs) for result in comparison.results)
    whole = len(comparison.results) * comparison.settings.rounds
    why = {
        "running": "The comparison is under way",
        "out of time": "The comparison ended when its time was over",
        "interrupted": "The comparison was interrupted",
    }[comparison.state]
    return f"{why}: {runs} of {whole} runs are measured."


# -- throughput --------------------------------------------------------------------------------


def _throughputs(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Throughput</h2>"
    yield (
        '<p class="note">Output tokens a second, end to end. Bars are medians, dots single runs. '
        "Strong: the fastest block size of its strategy.</p>"
    )
    most = max(value for r in comparison.measured for value in r.values(throughput))
    yield '<div class="bars">'
    for place, strategy in enumerate(comparison.strategies):
        results = [r for r in comparison.measured if r.candidate.strategy == strategy]
        if results:
            yield f'<h3 class="name s{_colour(place)}">{escape(strategy)}</h3>'
        for result in results:
            yield _bar(result, place, most, best=result is fastest(results))
    yield "</div>"


def _bar(result: CandidateResult, place: int, most: float, *, best: bool) -> str:
    classes = f"s{_colour(place)}" + (" best" if best else "")
    median = result.throughput or 0.0
    dots = "".join(
        f'<span class="run" style="left:{value / most:.2%}" title="{rate(value)} tokens/s"></span>'
        for value in result.values(throughput)
    )
    return (
        f'<span class="size">blocks of {result.candidate.block_size}</span>'
        f'<span class="track {classes}"><span class="bar" style="width:{median / most:.2%}"></span>'
        f'{dots}</span><span class="{"best" if best else ""}">{rate(median)}</span>'
    )


# -- over time ---------------------------------------------------------------------------------


def _utilisations(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Utilisation over time</h2>"
    yield (
        '<p class="note">Slots that hold a live token, of all slots. Strong: the fastest block '
        "size of the strategy; pale: the others. A line ends where its run ends.</p>"
    )
    x = Axis(0, _longest(comparison), "seconds", _plain)
    y = Axis(0, 1, "", lambda value: f"{value:.0%}")
    yield '<div class="grid">'
    for place, strategy in enumerate(comparison.strategies):
        lines = [
            Line(_filled(run, comparison.slots), style, result.label)
            for result, run, style in _drawn(comparison, [strategy])
        ]
        if lines:
            chart = line_chart(lines, x, y, title=f"utilisation over time, {strategy}")
            best = comparison.fastest_of(strategy)
            size_of_best = f" · blocks of {best.candidate.block_size}" if best else ""
            yield (
                f'<figure><h3><span class="name s{_colour(place)}">{escape(strategy)}</span>'
                f'<span class="soft">{size_of_best}</span></h3>{chart}</figure>'
            )
    yield "</div>"


def _filled(run: CandidateRun, slots: int) -> list[tuple[float, float]]:
    return [(time, sample.live_slots / slots) for time, sample in run.series]


def _films(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Who holds which block</h2>"
    yield (
        '<p class="note">Time to the right, the pool’s blocks downwards, one colour for each '
        "request (eight colours in turn). All pictures have the same time scale.</p>"
        '<p class="legend"><span><i class="key filled"></i>holds tokens</span>'
        '<span><i class="key reserved"></i>reserved, holds no token</span>'
        '<span><i class="key cached"></i>cached for reuse</span>'
        '<span><i class="key free"></i>free</span></p>'
    )
    fastest_ones = [comparison.fastest_of(strategy) for strategy in comparison.strategies]
    shown = [result for result in fastest_ones if result is not None]
    yield from (_film(comparison, result) for result in shown)
    others = [result for result in comparison.measured if result not in shown]
    if others:
        yield "<details><summary>The other block sizes</summary>"
        yield from (_film(comparison, result) for result in others)
        yield "</details>"


def _film(comparison: Comparison, result: CandidateResult) -> str:
    run = result.middle_run
    if run is None or not run.film.times:
        return ""
    width = run.film.times[-1] / _longest(comparison)
    every = f", every {run.film.stride}th is shown" if run.film.stride > 1 else ""
    place = comparison.strategies.index(result.candidate.strategy)
    return (
        f'<figure class="film"><h3><span class="name s{_colour(place)}">{escape(result.label)}'
        f'</span> <span class="soft">{result.num_blocks:,} blocks{every} · '
        f"{run.running:.1f} requests at once · {run.utilisation:.0%} utilisation</span></h3>"
        f'<div class="frame"><img alt="block owners over time, {escape(result.label)}" '
        f'style="width:{width:.2%}" src="{film_png(run.film)}"></div>'
        f'<div class="ends"><span>0 s</span><span>{_longest(comparison):.1f} s</span></div>'
        "</figure>"
    )


def _longest(comparison: Comparison) -> float:
    """Seconds of the longest run that is drawn."""
    runs = [result.middle_run for result in comparison.measured]
    return max(run.duration_s for run in runs if run is not None)


# -- latencies ---------------------------------------------------------------------------------


def _latencies(comparison: Comparison) -> Iterator[str]:
    yield "<h2>Latency</h2>"
    yield (
        '<p class="note">Which share of the requests, or of the tokens, waited no longer than '
        "this. Higher and further left is better.</p>"
    )
    yield f'<p class="legend">{_legend(comparison)}</p><div class="grid">'
    curves: tuple[tuple[str, str, Callable[[CandidateRun], Distribution]], ...] = (
        ("Time to first token", "seconds", lambda run: run.first_token),
        ("Between two tokens", "milliseconds", lambda run: run.inter_token),
    )
    for name, unit, read in curves:
        yield f"<figure><h3>{name}</h3>{_curves(comparison, name, unit, read)}</figure>"
    yield "</div>"


def _legend(comparison: Comparison) -> str:
    return "".join(
        f'<span class="name s{_colour(place)}">{escape(strategy)}</span>'
        for place, strategy in enumerate(comparison.strategies)
    )


def _curves(
    comparison: Comparison, name: str, unit: str, read: Callable[[CandidateRun], Distribution]
) -> str:
    factor = 1000 if unit == "milliseconds" else 1
    lines = []
    for result, _, style in _drawn(comparison, comparison.strategies):
        points = _cumulative([read(run) for run in result.runs], factor)
        if points:
            lines.append(Line(points, style, result.label))
    if not lines:
        return '<p class="soft">no observations</p>'
    ends = [line.points[place][0] for line in lines for place in (FIRST_SHOWN, -1)]
    low, high = max(min(ends), 1e-3), max(ends)
    if factor > 1 and high > low:
        x = Axis(low, high, f"{unit}, logarithmic", _plain, "log")
    else:
        x = Axis(0, high or 1.0, unit, _plain)
    return line_chart(lines, x, Axis(0, 1, "", lambda v: f"{v:.0%}"), title=name)


def _cumulative(observed: Sequence[Distribution], factor: float) -> list[tuple[float, float]]:
    """Points of the distribution function of all runs together."""
    together = Distribution(tuple(s for of_run in observed for s in of_run.seconds))
    if not together.seconds:
        return []
    shares = [number / CURVE_POINTS for number in range(CURVE_POINTS + 1)]
    return [((together.quantile(share) or 0.0) * factor, share) for share in shares]


def _drawn(
    comparison: Comparison, strategies: Sequence[str]
) -> list[tuple[CandidateResult, CandidateRun, str]]:
    """Results with the run to draw and its style, the fastest of each strategy last, on top."""
    drawn = []
    for result in comparison.measured:
        strategy, run = result.candidate.strategy, result.middle_run
        if strategy in strategies and run is not None:
            best = result is comparison.fastest_of(strategy)
            colour = f"s{_colour(comparison.strategies.index(strategy))}"
            drawn.append((best, (result, run, f"{colour} best" if best else colour)))
    return [entry for _, entry in sorted(drawn, key=lambda pair: pair[0])]


# -- the table ---------------------------------------------------------------------------------


def _table(comparison: Comparison) -> Iterator[str]:
    yield "<h2>All figures</h2>"
    yield (
        '<p class="note">Medians of the runs; point at one for its smallest and largest. Bold: the '
        "best of its column.</p>"
    )
    heads = "".join(f'<th title="{escape(f.meaning)}">{escape(f.name)}</th>' for f in FIGURES)
    yield f'<div class="scroll" tabindex="0"><table><thead><tr><th></th>{heads}</tr></thead><tbody>'
    tops = [_top(comparison, figure) for figure in FIGURES]
    for result in comparison.results:
        yield f"<tr><th>{escape(result.label)}</th>{_cells(result, tops)}</tr>"
    yield "</tbody></table></div><details><summary>What the figures mean</summary><dl>"
    yield from (f"<dt>{escape(f.name)}</dt><dd>{escape(f.meaning)}</dd>" for f in FIGURES)
    yield "</dl></details>"


def _cells(result: CandidateResult, tops: Sequence[float | None]) -> str:
    if result.failure is not None:
        return f'<td class="failed" colspan="{len(FIGURES)}">failed: {escape(result.failure)}</td>'
    cells = []
    for figure, top in zip(FIGURES, tops, strict=True):
        at_top = top is not None and result.median(figure.read) == top
        cells.append(
            f'<td{" class=top" if at_top else ""} title="{escape(figure.spread(result))}">'
            f"{escape(figure.median(result))}</td>"
        )
    return "".join(cells)


def _top(comparison: Comparison, figure: TableFigure) -> float | None:
    """The best median of a column; None where several share it."""
    medians = [result.median(figure.read) for result in comparison.measured]
    values = [value for value in medians if value is not None]
    if figure.better is None or not values:
        return None
    top = max(values) if figure.better == "more" else min(values)
    return top if values.count(top) == 1 and len(values) > 1 else None


# -- conditions --------------------------------------------------------------------------------


def _conditions(comparison: Comparison, command: str) -> Iterator[str]:
    yield "<h2>Conditions</h2>"
    entries = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in _facts(comparison)
    )
    yield f"<dl>{entries}</dl>"
    if command:
        yield f"<pre>{escape(command)}</pre>"
    yield (
        '<p class="note">Candidates took turns, each round beginning with another one, every run '
        "with an engine of its own over the same weights. Two candidates are told apart if their "
        "medians differ by more than the noise. "
        "Utilisation, waste and running requests are means over the time in which requests waited "
        "for room.</p>"
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    machine, settings, workload = comparison.machine, comparison.settings, comparison.workload
    return [
        ("model", f"{comparison.model}, {size(comparison.token_bytes)} of K and V a token"),
        (
            "machine",
            f"{machine.processor}, {machine.cores} cores, {size(machine.memory_bytes)}, computing "
            f"on {machine.device}",
        ),
        ("system", machine.system),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.versions)),
        (
            "workload",
            f"{workload.name}, lengths × {workload.scale:.3g}, {workload.left_out} longer than "
            f"{comparison.max_model_len} tokens left out",
        ),
        (
            "engine",
            f"max_model_len {comparison.max_model_len}, max_num_seqs {settings.max_num_seqs}, "
            f"max_batch_tokens {settings.max_batch_tokens}, "
            f"prefix cache {'on' if settings.prefix_cache else 'off'}",
        ),
        ("rounds", f"at most {settings.rounds}; {seconds(comparison.elapsed_s)} in all"),
        (
            "noise",
            f"{verdict(comparison).noise:.1%}: the largest spread of any candidate, its fastest "
            "run less its slowest, as a share of its median",
        ),
    ]


def _colour(place: int) -> int:
    return place % STRATEGY_COLOURS


def _plain(value: float) -> str:
    return f"{value:g}" if value < 1000 else f"{value:,.0f}"
