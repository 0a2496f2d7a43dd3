"""kvpage inside other people's programs. Each module needs the extra that its docstring names."""
