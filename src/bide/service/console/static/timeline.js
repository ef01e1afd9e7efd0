// The chart of the timeline: bars of what comes due, stacked by topic, and of the past. It zooms by drag and by keyboard.
"use strict";

(function () {
  const KEYS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  const open = new Set();
  let chart = null, data = null, cells = [], colours = [], active = -1, top = 1, dragged = false, release = 0;

  function element(id) { return document.getElementById(id); }
  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function colourOf(place) { return colour(data.others && place === data.series.length - 1 ? "--dim" : "--c" + place); }
  function number(count) { return count.toLocaleString("en-US"); }

  // --- where to go

  function go(url, keep) {
    return htmx.ajax("GET", url, { source: "#timeline", target: "#timeline", swap: "innerHTML" }).then(function () {
      if (!keep) history.pushState({}, "", url);
    });
  }

  function range(low, high) {
    return "/timeline?from=" + Math.round(low) + "&until=" + Math.round(high) + (data.keep ? "&" + data.keep : "");
  }

  function into(cell) {
    if (data.step > 60000 || (data.step > 1000 && !cell.past)) go(range(cell.low, cell.high));
    else if (!cell.past) {
      const asked = new URLSearchParams({ state: "waiting" });
      asked.set("wake_from", new Date(cell.low).toISOString());
      asked.set("wake_before", new Date(cell.high).toISOString());
      if (data.topic) asked.set("topic", data.topic);
      location.assign("/tasks?" + asked);
    }
  }

  // --- what is under the cursor

  function cellsOf() {
    const past = data.past.lows.map(function (low, place) {
      const planned = data.past.planned[place], done = data.past.done[place];
      return {
        past: true, low: low, high: data.past.highs[place], height: Math.max(planned, done),
        title: data.past.labels[place],
        lines: [data.words.planned + " " + number(planned), data.words.done + " " + number(done)],
      };
    });
    const ahead = data.lows.map(function (low, place) {
      const lines = [];
      let height = 0;
      data.series.forEach(function (one) {
        height += one.counts[place];
        if (one.counts[place]) lines.push(one.name + " " + number(one.counts[place]));
      });
      return {
        past: false, low: low, high: data.highs[place], height: height, lines: lines,
        title: data.labels[place] + ": " + data.words["{count} tasks"].replace("{count}", data.totals[place]),
      };
    });
    return past.concat(ahead);
  }

  function show(place, aloud) {
    const tip = document.querySelector(".timeline-tip"), cell = cells[place];
    active = cell ? place : -1;
    tip.hidden = !cell;
    if (cell) {
      tip.textContent = [cell.title].concat(cell.lines).join("\n");
      const holder = element("timeline-chart");
      const middle = chart.valToPos((cell.low + cell.high) / 2, "x") + chart.over.offsetLeft + holder.offsetLeft;
      const left = middle < holder.clientWidth / 2 ? middle + 14 : middle - 14 - tip.offsetWidth;
      tip.style.left = Math.max(4, Math.min(left, holder.clientWidth - tip.offsetWidth)) + "px";
      if (aloud) element("said").textContent = [cell.title].concat(cell.lines).join(", ");
    }
    chart.redraw(false, false);
  }

  function placeAt(value) {
    return cells.findIndex(function (cell) { return cell.low <= value && value < cell.high; });
  }

  // While somebody points at the chart it is not drawn anew under the pointer.
  function hold(millis) {
    const live = element("timeline-live");
    live.setAttribute("data-over", "");
    clearTimeout(release);
    release = setTimeout(function () { live.removeAttribute("data-over"); }, millis);
  }

  // --- drawing

  function bars(u) {
    const ctx = u.ctx, ratio = devicePixelRatio, floor = u.valToPos(0, "y", true);
    function x(value) { return u.valToPos(value, "x", true); }
    function y(value) { return u.valToPos(value, "y", true); }
    function box(cell, from, to, draw) {
      const left = x(cell.low), wide = x(cell.high) - left, gap = wide > 5 * ratio ? ratio : 0;
      const high = Math.max(to > from ? 1.5 * ratio : 0, y(from) - y(to));
      draw(left, y(from) - high, Math.max(ratio, wide - gap), high);
    }
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top - 16 * ratio, u.bbox.width, u.bbox.height + 16 * ratio);
    ctx.clip();
    ctx.lineWidth = ratio;
    const past = cells.filter(function (cell) { return cell.past; });
    past.forEach(function (cell, place) {
      ctx.fillStyle = ctx.strokeStyle = colour("--dim");
      box(cell, 0, data.past.planned[place], function (left, up, wide, high) {
        ctx.globalAlpha = 0.22;
        ctx.fillRect(left, up, wide, high);
        ctx.globalAlpha = 0.9;
        if (wide > 3 * ratio && high > 0) ctx.strokeRect(left + ratio / 2, up + ratio / 2, wide - ratio, high - ratio / 2);
      });
    });
    ctx.globalAlpha = 1;
    ctx.strokeStyle = colour("--good");
    ctx.lineWidth = 2 * ratio;
    ctx.beginPath();
    if (Math.max(0, ...data.past.done)) past.forEach(function (cell, place) {
      const up = Math.min(y(data.past.done[place]), floor - ratio);
      ctx.lineTo(x(cell.low), up);
      ctx.lineTo(x(cell.high), up);
    });
    ctx.stroke();
    cells.slice(past.length).forEach(function (cell, place) {
      let below = 0;
      data.series.forEach(function (one, its) {
        if (!one.counts[place]) return;
        ctx.fillStyle = colours[its];
        box(cell, below, below + one.counts[place], function (left, up, wide, high) { ctx.fillRect(left, up, wide, high); });
        below += one.counts[place];
      });
    });
    now(u, x(data.now), ratio);
    ctx.fillStyle = colour("--ink");
    ctx.textAlign = "center";
    ctx.textBaseline = "alphabetic";
    ctx.font = 12 * ratio + "px system-ui, sans-serif";
    const told = [];
    data.peaks.forEach(function (peak) { // the highest first
      const place = placeAt(peak), cell = cells[place];
      if (!cell) return;
      const middle = (x(cell.low) + x(cell.high)) / 2, up = y(cell.height) - 3 * ratio;
      ctx.beginPath();
      ctx.moveTo(middle, up);
      ctx.lineTo(middle - 4 * ratio, up - 6 * ratio);
      ctx.lineTo(middle + 4 * ratio, up - 6 * ratio);
      ctx.fill();
      const text = data.totals[place - past.length], half = ctx.measureText(text).width / 2;
      const beside = Math.min(Math.max(middle, u.bbox.left + half), u.bbox.left + u.bbox.width - half);
      const covered = told.some(function (one) {
        return Math.abs(one.beside - beside) < one.half + half && Math.abs(one.up - up) < 12 * ratio;
      });
      if (covered) return;
      ctx.fillText(text, beside, up - 9 * ratio);
      told.push({ beside, half, up });
    });
    if (active >= 0) {
      const left = x(cells[active].low);
      ctx.globalAlpha = 0.12;
      ctx.fillRect(left, u.bbox.top, Math.max(2 * ratio, x(cells[active].high) - left), u.bbox.height);
    }
    ctx.restore();
  }

  function now(u, at, ratio) {
    if (at < u.bbox.left || at > u.bbox.left + u.bbox.width || data.now <= data.first) return;
    const ctx = u.ctx;
    ctx.strokeStyle = ctx.fillStyle = colour("--ink");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(at, u.bbox.top);
    ctx.lineTo(at, u.bbox.top + u.bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.font = 12 * ratio + "px system-ui, sans-serif";
    ctx.textAlign = "center";
    ctx.textBaseline = "alphabetic";
    const half = ctx.measureText(data.words.now).width / 2;
    ctx.fillText(data.words.now, Math.max(at, u.bbox.left + half), u.bbox.top - 4 * ratio);
  }

  function draw() {
    const holder = element("timeline-chart");
    if (chart) chart.destroy();
    chart = null;
    if (!holder) return;
    data = JSON.parse(holder.dataset.chart);
    cells = cellsOf();
    active = -1;
    top = Math.max(4, ...cells.map(function (cell) { return cell.height; })) * 1.12;
    colours = data.series.map(function (_, place) { return colourOf(place); });
    const clock = new Intl.DateTimeFormat("en-GB", {
      timeZone: data.zone, hourCycle: "h23", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit",
      second: "2-digit",
    });
    function labels(u, splits, axis, space, step) {
      let before = "";
      return splits.map(function (split) {
        const part = Object.fromEntries(clock.formatToParts(split).map(function (one) { return [one.type, one.value]; }));
        const day = part.month + "-" + part.day, time = part.hour + ":" + part.minute;
        const dayTold = day === before ? "" : "\n" + day;
        before = day;
        return step >= 86400000 ? day : time + (step < 60000 ? ":" + part.second : "") + dayTold;
      });
    }
    const axis = {
      stroke: function () { return colour("--dim"); }, font: "12px system-ui, sans-serif",
      grid: { stroke: function () { return colour("--line"); }, width: 1 }, ticks: { show: false },
    };
    chart = new uPlot({
      width: holder.clientWidth, height: heightOf(holder), ms: 1, padding: [20, 22, 0, 0],
      tzDate: function (at) { return uPlot.tzDate(new Date(at), data.zone); },
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 5 } },
      scales: {
        x: { time: true, range: function () { return [data.first, data.until]; } },
        y: { range: function () { return [0, top]; } },
      },
      axes: [
        Object.assign({ space: 64, values: labels, size: 44 }, axis),
        Object.assign({
          size: 12 + 8 * number(Math.round(top)).length, incrs: whole(),
          values: function (u, splits) { return splits.map(number); },
        }, axis),
      ],
      series: [{}, { paths: function () { return null; }, points: { show: false } }],
      hooks: {
        draw: [bars],
        setCursor: [function (u) {
          if (u.cursor.left >= 0) show(placeAt(u.posToVal(u.cursor.left, "x")), false);
        }],
        setSelect: [function (u) {
          if (u.select.width < 5) return;
          dragged = true;
          const low = u.posToVal(u.select.left, "x");
          go(range(low, u.posToVal(u.select.left + u.select.width, "x")));
        }],
      },
    }, [[data.first, data.until], [null, null]], holder);
    chart.over.addEventListener("mouseleave", function () { if (holder !== document.activeElement) show(-1, false); });
    chart.over.addEventListener("mousemove", function () { hold(4000); });
    chart.over.addEventListener("mousedown", function () { dragged = false; hold(30000); });
    chart.over.addEventListener("click", function () { if (!dragged && active >= 0) into(cells[active]); });
    holder.addEventListener("keydown", press);
    holder.addEventListener("blur", function () { if (chart) show(-1, false); });
    new ResizeObserver(function () {
      if (chart && chart.root.parentNode === holder && holder.clientWidth !== chart.width) {
        chart.setSize({ width: holder.clientWidth, height: heightOf(holder) });
      }
    }).observe(holder);
  }

  function heightOf(holder) { return holder.clientWidth < 500 ? 260 : 340; }

  function whole() {
    const steps = [];
    for (let power = 1; power < 1e12; power *= 10) steps.push(power, 2 * power, 5 * power);
    return steps;
  }

  function press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in KEYS) {
      const start = Math.max(0, placeAt(data.now));
      const next = active < 0 ? start : active + KEYS[event.key];
      show(Math.max(0, Math.min(cells.length - 1, next)), true);
    } else if (event.key === "Enter" && active >= 0) into(cells[active]);
    else if (event.key === "Escape" && element("timeline-out")) go(element("timeline-out").href);
    else return;
    event.preventDefault();
  }

  // --- the page

  document.addEventListener("DOMContentLoaded", draw);
  document.addEventListener("click", function (event) {
    const link = event.target.closest("#timeline a[data-go]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(link.href);
  });
  document.addEventListener("htmx:beforeSwap", function (event) {
    if (!event.target.id.startsWith("timeline")) return;
    event.target.querySelectorAll("details").forEach(function (one) { open[one.open ? "add" : "delete"](one.id); });
  });
  document.addEventListener("htmx:afterSwap", function (event) {
    if (!event.target.id.startsWith("timeline")) return;
    event.target.querySelectorAll("details").forEach(function (one) { one.open = open.has(one.id); });
    draw();
  });
  window.addEventListener("popstate", function () { go(location.pathname + location.search, true); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () {
    if (!chart) return;
    colours = data.series.map(function (_, place) { return colourOf(place); });
    chart.redraw();
  });
})();
