"""One client of the model: it asks for something, and hears the answer, late, or never."""

from __future__ import annotations

from collections.abc import Iterator

from bide_proofs.model.records import AWAITED, SPENT, Client, Loose, Move, Shared, Verb
from bide_proofs.model.store import Answer, Store

_TWICE = "P5: a request that was sent twice was carried out twice"
_OLD = "P5: a request was carried out after a newer one of the same caller"


class Asking:
    """The steps of a client. It asks one thing at a time; what it gave up may still arrive."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rules = store.rules
        self.bounds = store.bounds

    def moves(self, shared: Shared, client: Client) -> Iterator[Move]:
        """Everything that may come next of this client, or of what it has sent."""
        loose = client.loose
        if client.adding is not None:
            put = self.store.ask(shared, Verb("schedule replace", client.adding))
            yield Move("{me}'s move, second half: the task is put back", put.shared, client._replace(adding=None),
                       put.effect, True)  # fmt: skip
            return
        if loose is not None:
            yield from self._astray(shared, client, loose)
            if loose.awaited:
                return  # it waits for this answer
        if client.left:
            for verb in self.bounds.may:
                yield from self._asks(shared, client, verb)

    def _asks(self, shared: Shared, client: Client, verb: Verb) -> Iterator[Move]:
        less = client._replace(left=client.left - 1)
        if verb.name == "move" and self.rules.move_in_two_steps and shared.state == "waiting":
            yield Move("{me}'s move, first half: the task is taken out", self.store.take_out(shared),
                       less._replace(adding=verb.delay))  # fmt: skip
            return
        answer = self.store.ask(shared, verb)
        told, broken = f"{{me}} asks: {verb}; answer: {answer.word}", answer.broken
        if answer.word in ("not_found", "finished") and shared.owed:
            broken = f"P4: {answer.word} was answered of a task that was acknowledged and has not ended"
        goal = answer.word in ("cancelled", "cancelled_while_leased")
        heard = less._replace(loose=self._overtaken(client.loose, verb))
        yield Move(told, answer.shared, heard, answer.effect, goal=goal, broken=broken)
        if client.loose is None and shared.loose < self.bounds.loose:
            astray = answer.shared._replace(loose=shared.loose + 1)
            lost = AWAITED if self.rules.journal else Loose(verb.name, verb.delay, done=True, awaited=True)
            yield Move(f"{told}, which is lost", astray, less._replace(loose=lost), answer.effect, broken=broken)
            unsent = Loose(verb.name, verb.delay)
            yield Move(f"{{me}} asks: {verb}; it is delayed, and given up", shared._replace(loose=shared.loose + 1),
                       less._replace(loose=unsent))  # fmt: skip
            if not self.rules.journal:  # with it, a copy changes nothing
                copy = Loose(verb.name, verb.delay, done=True)
                yield Move(f"{told}; a copy is still on its way", astray, less._replace(loose=copy), answer.effect,
                           broken=broken)  # fmt: skip

    def _astray(self, shared: Shared, client: Client, loose: Loose) -> Iterator[Move]:
        bare, calm = client._replace(loose=None), shared._replace(loose=shared.loose - 1)
        if loose == AWAITED:
            yield Move("{me} sends its verb again, and is answered as before", calm, bare)
            return
        verb = Verb(loose.what, loose.delay)
        if loose.awaited:
            again = self.store.ask(calm, verb)
            yield self._late(f"{{me}} sends its {verb} again; answer: {again.word}", bare, again, _TWICE)
            return
        yield Move(f"a delayed {verb} of {{me}} never arrives", calm, bare)
        if loose == SPENT:
            return
        answer = self.store.ask(calm, verb)
        wrong = _TWICE if loose.done else _OLD if loose.old else ""
        yield self._late(f"a delayed {verb} of {{me}} arrives: {answer.word}", bare, answer, wrong)

    def _overtaken(self, loose: Loose | None, verb: Verb) -> Loose | None:
        """What is astray, now that `verb` was carried out: an older call of the same caller may not follow it.

        Schedules are one caller, and changes another, as they are on Redis.
        """
        if loose is None or loose.done:
            return loose
        if loose.what.startswith("schedule") != verb.name.startswith("schedule"):
            return loose
        return SPENT if self.rules.numbers_rise else loose._replace(old=True)

    @staticmethod
    def _late(told: str, client: Client, answer: Answer, wrong: str) -> Move:
        broken = wrong if answer.effect.touched else answer.broken
        return Move(told, answer.shared, client, answer.effect, broken=broken)
