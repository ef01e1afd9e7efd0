// Pages that change many tasks: a form goes out once, a progress ends, all boxes of a list are ticked together.
"use strict";

(function () {
  function say(text) {
    const said = document.getElementById("said");
    if (said) said.textContent = text.trim().replace(/\s+/g, " ");
  }

  document.addEventListener("submit", function (event) {
    if (!event.target.matches("[data-once]")) return;
    if (event.target.dataset.sent) event.preventDefault();
    else event.target.dataset.sent = "yes";
  });
  // a page that comes back out of the browser's memory may be sent again: the server knows its id
  window.addEventListener("pageshow", function () {
    document.querySelectorAll("[data-sent]").forEach(function (form) { delete form.dataset.sent; });
  });

  document.addEventListener("htmx:afterSwap", function (event) {
    const part = event.target.closest("[data-live]");
    if (!part || part.hasAttribute("data-over") || !part.querySelector("[data-is-over]")) return;
    part.setAttribute("data-over", "");
    document.querySelectorAll("[data-until-over]").forEach(function (one) { one.remove(); });
    const state = part.querySelector("[data-state]");
    const cards = Array.from(part.querySelectorAll(".card"), function (card) { return card.textContent.trim(); });
    say([state ? state.textContent.trim() : ""].concat(cards).join(". "));
  });

  document.addEventListener("DOMContentLoaded", function () {
    document.querySelectorAll("[data-tick-all]").forEach(function (box) {
      box.closest("[hidden]")?.removeAttribute("hidden");
      box.addEventListener("change", function () {
        document.querySelectorAll(box.dataset.tickAll).forEach(function (one) { one.checked = box.checked; });
      });
    });
  });
})();
