"""How a due task is leased, delivered, extended and settled: workers, the long poll, and watched tables."""
