// The part of a contestant of node.js that is not its own: what tasks.py and produce.py are to those of Python.
"use strict";

const fs = require("node:fs");
const readline = require("node:readline");

const CALLERS = 256;
const BATCH = 1000;
const PAYLOAD = 100;
const SECONDS = Number(process.env.BENCH_SECONDS || "0");

const nanoseconds = () => BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const say = (what) => fs.writeSync(1, JSON.stringify(what) + "\n");

function text(number, due) {
  return `${String(number).padStart(7, "0")}:${String(due).padStart(13, "0")}:`.padEnd(PAYLOAD, "x");
}

/** A handler of tasks, which writes its lines to the log of its worker. */
function handler() {
  const log = fs.openSync(process.env.BENCH_LOG, "a");
  const write = (kind, payload) =>
    fs.writeSync(log, `${kind} ${payload.slice(0, 7)} ${payload.slice(8, 21)} ${nanoseconds()}\n`);
  return async (payload) => {
    write("start", payload);
    if (SECONDS && !payload.startsWith("0000000:")) {
      await sleep(SECONDS * 1000);
      write("end", payload);
    }
  };
}

/**
 * Obey the orders that produce.py describes, until the input ends. `schedule(payload, due)` is the call for one task,
 * `scheduleMany(items)` the one for many, each item a payload and when it is due.
 */
async function produce(schedule, scheduleMany) {
  const orders = {
    warm: async ({ count }) => {
      const items = Array.from({ length: count }, () => [text(0, 0), Date.now()]);
      const half = Math.floor(count / 2);
      await orders.concurrent(items.slice(0, half));
      await orders.bulk(items.slice(half));
      return {};
    },
    concurrent: async (items) => {
      let next = 0;
      const caller = async () => {
        while (next < items.length) await schedule(...items[next++]);
      };
      await Promise.all(Array.from({ length: CALLERS }, caller));
    },
    bulk: async (items) => {
      for (let first = 0; first < items.length; first += BATCH) await scheduleMany(items.slice(first, first + BATCH));
    },
    pace: async ({ count, rate, ahead }) => {
      const calls = [];
      const begun = performance.now();
      for (let number = 0; number < count; number++) {
        const pause = begun + (number * 1000) / rate - performance.now();
        if (pause > 0) await sleep(pause);
        const due = Date.now() + ahead;
        calls.push(schedule(text(number + 1, due), due));
      }
      await Promise.all(calls);
      return { ended: Number(nanoseconds()) };
    },
  };

  say({ ready: true, bulk: true });
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const order = JSON.parse(line);
    if (order.do === "warm" || order.do === "pace") {
      say(await orders[order.do](order));
      continue;
    }
    const items = Array.from({ length: order.count }, (_, number) => {
      const due = order.due + Math.floor((number * order.spread) / order.count);
      return [text(number + 1, due), due];
    });
    const began = performance.now();
    await orders[order.do](items);
    say({ seconds: (performance.now() - began) / 1000, ended: Number(nanoseconds()) });
  }
}

module.exports = { handler, produce };
