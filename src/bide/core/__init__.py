"""The delayed task: records, the lifecycle, outcomes, instants, retry policies, errors. No I/O, no clock."""
