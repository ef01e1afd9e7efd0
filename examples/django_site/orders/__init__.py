"""Orders that close by themselves if nobody pays."""
