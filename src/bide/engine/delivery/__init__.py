"""The leasing, delivery, extension and settlement of due tasks: workers, the long poll, and watched tables."""
