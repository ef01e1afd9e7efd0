"""Kills instances of `bide serve` that share a store, in turn and under load, and checks what they had promised.

    python -m bide_proofs.kill_service redis://127.0.0.1:6379/0 --seconds 120 --rate 200

This is torture whose workers are two instances, which post the tasks of all topics to a receiver of this process, and
whose clients reach the store through them. Instances die by SIGKILL again and again and are started anew. They write
down what they lease, settle and post, clients what they ask and are answered; `bide.testing.history.check` is the judge
of that. The receiver checks signatures, applies an effect for each `webhook-id` once, and refuses a token that is older
than one it has seen for the key; sometimes it answers 500 or 410, hangs up after it has applied the effect, or is slow.
What it saw is compared with the history. Wrong is also

- bad_delivery: a signature, a header or a payload that is not as it was scheduled
- unknown_delivery: of no lease, or before the instance began it, or with another id or attempt (P12)
- not_applied: settled as done, though no delivery of that life had its effect, nor came after a later life's (P2)
- unacknowledged: settled as done, though the receiver answered no delivery of that lease with 200 (P2)
- unheard: answered with 200, and not settled as done within a lease, though the instance lived to settle it (P12)
- applied_twice, stale_applied: the effect of one id twice, or with an older token than one seen before (P12)

Run it on the machine that the store is on: times are compared by its monotonic clock.
"""
