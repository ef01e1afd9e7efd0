"""Kill instances of `bide serve` that share a store, in turn and under load, and check bide's promises.

    python -m bide_proofs.kill_service redis://127.0.0.1:6379/0 --seconds 120 --rate 200

This is a torture run whose workers are two instances. They post the tasks of all topics to a receiver in this process,
and clients reach the store through them. Instances are killed by SIGKILL repeatedly and restarted. Instances record
their leases, settles and posts, and clients record their calls and answers; `bide.testing.history.check` judges this
history. The receiver checks signatures, applies the effect of each `webhook-id` once, and refuses a token that is older
than one it has seen for the key. Sometimes it answers 500 or 410, hangs up after it has applied the effect, or is slow.
The deliveries that it received are compared with the history. These are failures, too:

- bad_delivery: a signature, header or payload differs from what was scheduled
- unknown_delivery: of no lease, or before the instance began it, or with another id or attempt (P12)
- not_applied: settled as done, though no delivery of that life had its effect, nor came after a later life's (P2)
- unacknowledged: settled as done, though the receiver answered no delivery of that lease with 200 (P2)
- unheard: answered with 200, and not settled as done within a lease, though the instance lived to settle it (P12)
- applied_twice, stale_applied: the effect of one id twice, or with an older token than one seen before (P12)

Run it on the store's machine: times are compared by its monotonic clock.
"""
