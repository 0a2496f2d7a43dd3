"""`kvpage allocators`: what is installed."""

from rich.console import Console
from rich.table import Table

from kvpage.plugins import installed_allocators


def allocators() -> None:
    """List the installed allocator strategies, without importing any."""
    table = Table("name", "module", "from", box=None, pad_edge=False)
    for allocator in installed_allocators():
        table.add_row(allocator.name, allocator.module, allocator.distribution)
    Console().print(table)
