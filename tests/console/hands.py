"""How somebody uses a page with the keyboard alone."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect
from tests.console.browser import stop_of

_FAR = 400
"""Times Tab, after which something counts as out of reach."""


class Keyboard:
    """Tab, Enter, Space, the arrows, and writing; and looks at every step where it is."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._keys = page.keyboard

    def reach(self, what: Locator) -> None:
        """By Tab. It fails where one does not see where one is, or never gets there."""
        expect(what).to_be_visible()
        stop = stop_of(self._page, what)
        for _ in range(_FAR):
            if stop is not None and stop.reached:
                return
            self._keys.press("Tab")
            stop = stop_of(self._page, what)
            assert stop is None or stop.marked, f"focus is not to be seen on {stop.what}"
            assert stop is None or stop.seen, f"focus is outside of the window, or below something, on {stop.what}"
        raise AssertionError(f"Tab does not lead to {what}")

    def press(self, what: Locator) -> None:
        """A link, a button, the summary of what is folded."""
        self.reach(what)
        self._keys.press("Enter")

    def write(self, where: Locator, text: str) -> None:
        """In the place of what stands there."""
        self.reach(where)
        self._keys.press("ControlOrMeta+a")
        self._keys.type(text)

    def tick(self, what: Locator) -> None:
        """A box that is not ticked, or one of several choices."""
        if what.get_attribute("type") == "radio":
            self._reach_radio(what)
        else:
            self.reach(what)
            self._keys.press("Space")
        expect(what).to_be_checked()

    def _reach_radio(self, what: Locator) -> None:
        """Tab leads to one of a name; arrows to the others."""
        name = what.get_attribute("name")
        for _ in range(_FAR):
            if what.evaluate("one => one === document.activeElement"):
                if not what.is_checked():
                    self._keys.press("Space")
                return
            among = self._page.evaluate("name => document.activeElement.name === name", name)
            self._keys.press("ArrowDown" if among else "Tab")
        raise AssertionError(f"the keyboard does not lead to {what}")
