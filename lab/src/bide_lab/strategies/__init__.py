"""The strategies, one file each: S1 to S19, and bide itself. What a file has to hold says `bide_lab.card`."""
