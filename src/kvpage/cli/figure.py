"""The block table of a sequence, drawn as text: logical blocks, physical blocks, their owners."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpage.blocks import BlockId
from kvpage.stats import BlockMap, SequenceBlocks

OWNER_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
PHYSICAL_SHOWN = 48
PHYSICAL_A_ROW = 16


def block_table_figure(block_map: BlockMap, index: int = 0) -> RenderableType:
    """Draw sequence `index`: its table on top, the physical blocks around it below."""
    sequence = block_map.sequences[index]
    return Group(
        Text(f"block table of {sequence.request_id}", style="bold"),
        _table(sequence, block_map.geometry.block_size),
        Text(),
        Text("physical blocks: the letter is the owner, '-' is free, '*' is cached", style="bold"),
        _physical(block_map),
        _legend(block_map),
    )


def owner_letter(index: int) -> str:
    """The letter that stands for sequence `index` in the figure."""
    return chr(ord("A") + index % 26)


def _table(sequence: SequenceBlocks, block_size: int) -> Table:
    table = Table("logical block", "tokens", "physical block", "filled", box=None, pad_edge=False)
    for logical, physical in enumerate(sequence.blocks):
        first = logical * block_size
        filled = min(max(sequence.num_tokens - first, 0), block_size)
        tokens = f"{first}..{first + filled - 1}" if filled else "none yet"
        bar = "█" * filled + "·" * (block_size - filled)
        table.add_row(str(logical), tokens, f"→ {physical}", bar)
    return table


def _physical(block_map: BlockMap) -> Table:
    """A grid of the first blocks, at least up to the last one in use where that is near."""
    owners: dict[BlockId, int] = {}
    for index, sequence in enumerate(block_map.sequences):
        for block in sequence.blocks:
            owners.setdefault(block, index)
    shown = min(block_map.geometry.num_blocks, PHYSICAL_SHOWN)
    grid = Table.grid(padding=(0, 1))
    for start in range(0, shown, PHYSICAL_A_ROW):
        row = range(start, min(start + PHYSICAL_A_ROW, shown))
        cells = [_cell(BlockId(block), owners, block_map.cached) for block in row]
        grid.add_row(Text(f"{start:>4}", style="dim"), *cells)
    return grid


def _cell(block: BlockId, owners: dict[BlockId, int], cached: tuple[BlockId, ...]) -> Text:
    if block in owners:
        index = owners[block]
        return Text(owner_letter(index), style=OWNER_STYLES[index % len(OWNER_STYLES)])
    return Text("*" if block in cached else "-", style="dim")


def _legend(block_map: BlockMap) -> Text:
    legend = Text()
    for index, sequence in enumerate(block_map.sequences):
        style = OWNER_STYLES[index % len(OWNER_STYLES)]
        legend.append(f"{owner_letter(index)} {sequence.request_id}  ", style=style)
    hidden = block_map.geometry.num_blocks - min(block_map.geometry.num_blocks, PHYSICAL_SHOWN)
    if hidden:
        legend.append(f"({hidden} more blocks not shown)", style="dim")
    return legend
