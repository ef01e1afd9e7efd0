"""Recurring tasks: rules that name the instants at which a task is due again."""

from bide.core.recurrence.rules import At, AtRule, Cron, CronRule, Every, EveryRule, RRule, RRuleRule, Rule
from bide.core.recurrence.rules import refresh_zones as refresh_zones
from bide.core.recurrence.rules import rule_of as rule_of

__all__ = ("At", "AtRule", "Cron", "CronRule", "Every", "EveryRule", "RRule", "RRuleRule", "Rule")
