"""What a delayed task is: records, the lifecycle, outcomes, instants, retry policies, errors. No I/O, no clock."""
