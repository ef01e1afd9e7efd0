"""Kills instances of `bide serve` that share a store, in turn and under load, and checks what they had promised.

    python -m bide_proofs.serving redis://127.0.0.1:6379/0 --seconds 120 --rate 500 --kill-every 3

Two real instances post the tasks of one topic to a receiver of this process. Load schedules, moves, replaces and
cancels over HTTP at both; a call that gets no answer is sent again to the other instance. Every few seconds one of the
two dies by SIGKILL, in turn, and is started again at once. The receiver checks signatures, applies an effect for each
`webhook-id` once, and refuses a token that is older than one it has seen for the key; sometimes it answers 500, hangs
up after it has applied the effect, or is slow. Then killing ends, and once nothing waits any more it is judged what the
answers and the deliveries say. Wrong is

- lost: acknowledged, not cancelled, and without an effect of the life that was acknowledged last (P2)
- early: arrived before the time that was acknowledged last, or asked for by an unanswered move since (P1, P5)
- fired_after_cancel: arrived after the answer `cancelled`, or leased after either answer of a cancel (P4)
- fired_after_move: arrived after the answer `moved`, and leased before it; fired_after_replace: a life that was leased
  after another had replaced it (P5)
- applied_twice, stale_applied: the effect of one id twice, or with an older token than one seen before (P12)
- strange_life: an id that no answer named, though every call about its key was answered (P12)
- redelivered_unkilled: answered with 200, and within a lease delivered again though the instance had not been killed
  (P3)
- not_rising: delivered again without a higher token and a later attempt, but for the one repetition of what was sent
  on a connection that had broken (P12)
- bad_delivery: a signature, a header or a payload that is not as it was scheduled
- left: at the end still waiting or leased, or dead (P10)
- failed_call: refused, or without an answer for too long; instance_ended: by itself, or not when it was told to
- logged: an error in the log of an instance

What comes back a lease later since its instance stood still for as long is allowed (P2), and counted apart, as
`leases_lost_alive`. An unanswered call may have been done or not, so only what was answered counts. What was leased
before or after a change is told by tokens, which rise with every change of a key. Answers and arrivals are compared by
the monotonic clock of this process, arrivals and planned times by the wall clock: run it on the machine that the store
is on.
"""
