"""`bide demo`: a small town's traffic in real time, for the console to show, for as long as it runs.

Read a story first (`orders`, `payments`, `posts`, `coupons`, `subscriptions`, `reviews`, `reminders`, `meals`,
`heartbeats`): each declares handlers as any app does, and plays the people who schedule, cancel and change their minds.
`story` is what they have in common, `notebook` what survives a restart, `town` runs them all, `words` is what the
terminal says.
"""
