"""Input that nobody meant, thrown at everything that reads: text, URLs, requests, answers, stored rows, damaged stores.

    python -m bide_proofs.fuzz --list
    python -m bide_proofs.fuzz --seconds 60 --seed 7
    python -m bide_proofs.fuzz --target requests --seed 7 --case 4711       one case again, told in words

Each *target* makes cases out of a seed: valid input, input that is nearly valid (a few bytes or characters of a valid
one changed), and noise. Each case has an oracle: what is accepted is right (by a second, simpler reading, or since it
can be read back), and what is refused is refused by an error of bide's that says what would be accepted, or where the
damage is. Another exception, a case that does not end, or a task that is silently gone is a bug.

Cases are numbered, and each has a seed of its own: (seed, target, number) names it for good, so one that failed can be
run alone. The generators know the grammar of what they make, which finds more here than watching which branches are
taken: most of the reading is done by C (msgspec, `re`, `fromisoformat`), where a coverage-guided fuzzer sees nothing.
"""
