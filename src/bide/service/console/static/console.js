// What every page does: tell the server the viewer's zone, and keep open parts fresh while somebody looks.
"use strict";

(function () {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (zone && zone !== document.documentElement.dataset.zone && !document.cookie.includes("bide_zone=" + zone)) {
    document.cookie = "bide_zone=" + zone + "; path=/; max-age=31536000; samesite=lax";
    if (document.cookie.includes("bide_zone=" + zone)) location.reload();
  }

  // A silence of the service is announced once, in words, on the screen and to screen readers.
  let answered = new Date();
  function tellSilence(part) {
    part.classList.add("away");
    const said = document.getElementById("silence");
    if (said && !said.textContent) {
      said.textContent = said.dataset.words.replace("{time}", answered.toTimeString().slice(0, 8));
    }
  }
  function tellAnswer(part) {
    answered = new Date();
    part.classList.remove("away");
    const said = document.getElementById("silence");
    if (said && !document.querySelector(".away")) said.textContent = "";
  }

  // <div data-live="/path" data-every="2000">: its inside is asked for again and again, not while the page is hidden,
  // the pointer holds a button, or somebody is inside it with the keyboard.
  function keepFresh(part) {
    const every = Number(part.dataset.every) || 2000;
    let waiting = false;
    async function look() {
      if (waiting || document.hidden || part.contains(document.activeElement)) return;
      waiting = true;
      const open = Array.from(part.querySelectorAll("details[id][open]"), function (one) { return one.id; });
      delete part.dataset.silent;
      try {
        await htmx.ajax("GET", part.dataset.live, { target: part, swap: "innerHTML" });
        part.querySelectorAll("details").forEach(function (one) { one.open = one.open || open.includes(one.id); });
        if (!part.dataset.silent) tellAnswer(part);
      } catch {
        tellSilence(part);
      } finally {
        waiting = false;
      }
    }
    const timer = setInterval(function () {
      if (!part.isConnected) clearInterval(timer);
      else if (!part.hasAttribute("data-over")) look();
    }, every);
    document.addEventListener("visibilitychange", look);
  }

  function begin(root) {
    root.querySelectorAll("[data-live]").forEach(function (part) {
      if (!part.dataset.begun) {
        part.dataset.begun = "yes";
        keepFresh(part);
      }
    });
  }

  document.addEventListener("DOMContentLoaded", function () { begin(document); });
  document.addEventListener("htmx:load", function (event) { begin(event.target); });
  // the server's word for an error is shown where the answer would have been
  document.addEventListener("htmx:beforeSwap", function (event) {
    if (event.detail.xhr.status >= 400 && event.detail.xhr.status !== 401) event.detail.shouldSwap = true;
  });
  document.addEventListener("htmx:sendError", function (event) {
    const part = event.target.closest && event.target.closest("[data-live]");
    if (part) {
      part.dataset.silent = "yes";
      tellSilence(part);
    }
  });
})();
