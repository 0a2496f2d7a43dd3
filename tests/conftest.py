"""Set-up of all tests."""

# Loading a model freezes what the garbage collector tracks (`kvpage.imports`). hypothesis asks it
# who refers to trio's random numbers, so both are imported before that.
import hypothesis  # noqa: F401
