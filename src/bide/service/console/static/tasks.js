// Lists: choose all, say how many are ticked. Forms: Enter in a field does what the button beside it does.
"use strict";

(function () {
  const form = document.getElementById("act");
  if (!form) return;
  const boxes = Array.from(form.querySelectorAll("input[name=ref][type=checkbox]"));
  const shown = form.querySelector("[data-chosen]");
  const link = form.querySelector("[data-all]");
  let all = null;

  function tell() {
    const count = boxes.filter(function (box) { return box.checked; }).length;
    if (shown) shown.textContent = shown.dataset.chosen.replace("{count}", count);
    if (all) {
      all.checked = count === boxes.length;
      all.indeterminate = count > 0 && count < boxes.length;
    }
  }

  if (link) {
    all = document.createElement("input");
    all.type = "checkbox";
    all.setAttribute("aria-label", link.dataset.all);
    all.title = link.dataset.all;
    all.addEventListener("change", function () {
      boxes.forEach(function (box) { box.checked = all.checked; });
      tell();
    });
    link.replaceWith(all);
  }
  form.addEventListener("change", function (event) {
    if (!boxes.includes(event.target)) return;
    const chosen = form.querySelector("input[name=scope][value=chosen]");
    if (chosen) chosen.checked = true;
    tell();
  });
  form.querySelectorAll(".pair input").forEach(function (field) {
    field.addEventListener("keydown", function (event) {
      if (event.key !== "Enter") return;
      event.preventDefault();
      field.parentElement.querySelector("button").click();
    });
  });
  addEventListener("pageshow", tell); // a browser that goes back ticks again what was ticked
})();
