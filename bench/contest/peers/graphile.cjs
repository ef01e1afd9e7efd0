// graphile-worker: a table, polled; a NOTIFY tells of new jobs that are due; node.js.
//
// Settings: what its page on performance gives for throughput: `concurrentJobs` 24, `maxPoolSize` 25, `localQueue` of 500,
// and completions in batches without delay; `pollInterval`, of which its lateness consists, at 10 ms instead of 2 s; no
// log line for each job. `addJobs` is its call for many. After a crash a job comes back after four hours, which cannot be
// set.
//
// `produce` obeys the orders that produce.py describes; `work` runs a worker; `setup` makes its tables.
"use strict";

const fs = require("node:fs");
const readline = require("node:readline");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const CALLERS = 256;
const BATCH = 1000;
const PAYLOAD = 100;
const SECONDS = Number(process.env.BENCH_SECONDS || "0");
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});
const preset = {
  worker: {
    connectionString: process.env.BENCH_URL,
    concurrentJobs: 24,
    maxPoolSize: 25,
    pollInterval: 10,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger,
  },
};

const nanoseconds = () => BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

function text(number, due) {
  return `${String(number).padStart(7, "0")}:${String(due).padStart(13, "0")}:`.padEnd(PAYLOAD, "x");
}

async function setUp() {
  const utils = await makeWorkerUtils({ preset });
  await utils.migrate();
  await utils.release();
}

async function work() {
  const log = fs.openSync(process.env.BENCH_LOG, "a");
  const write = (kind, payload) =>
    fs.writeSync(log, `${kind} ${payload.slice(0, 7)} ${payload.slice(8, 21)} ${nanoseconds()}\n`);
  const task = async ({ data }) => {
    write("start", data);
    if (SECONDS && !data.startsWith("0000000:")) {
      await sleep(SECONDS * 1000);
      write("end", data);
    }
  };
  const runner = await run({ preset, taskList: { task } });
  await runner.promise;
}

async function produce() {
  const utils = await makeWorkerUtils({ preset });
  const say = (what) => fs.writeSync(1, JSON.stringify(what) + "\n");
  const schedule = (data, due) => utils.addJob("task", { data }, { runAt: new Date(due) });

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
        while (next < items.length) {
          const [data, due] = items[next++];
          await schedule(data, due);
        }
      };
      await Promise.all(Array.from({ length: CALLERS }, caller));
    },
    bulk: async (items) => {
      for (let first = 0; first < items.length; first += BATCH) {
        await utils.addJobs(
          items
            .slice(first, first + BATCH)
            .map(([data, due]) => ({ identifier: "task", payload: { data }, runAt: new Date(due) })),
        );
      }
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
  await utils.release();
  process.exit(0);
}

const done = { work, setup: setUp }[process.argv[2]] ?? produce;
done().catch((error) => {
  console.error(error);
  process.exit(1);
});
