// BullMQ: a sorted set of delayed jobs with a marker that says when the next is due; node.js.
//
// Settings: `concurrency` 50, as in its guide; `removeOnComplete` and
// `removeOnFail`, since nobody reads results; `addBulk` is its call for many. After a crash a job comes back when its
// lock (`lockDuration`) has ended and the check for stalled jobs (`stalledInterval`) has come round; both are set to the
// lease for `crash`.
//
// `produce` obeys the orders that produce.py describes; `work` runs a worker.
"use strict";

const fs = require("node:fs");
const readline = require("node:readline");
const { Queue, Worker } = require("bullmq");

const NAME = "bench";
const CALLERS = 256;
const BATCH = 1000;
const PAYLOAD = 100;
const SECONDS = Number(process.env.BENCH_SECONDS || "0");
const url = new URL(process.env.BENCH_URL);
const connection = {
  host: url.hostname,
  port: Number(url.port || 6379),
  db: Number(url.pathname.slice(1) || 0),
  username: decodeURIComponent(url.username) || undefined,
  password: decodeURIComponent(url.password) || undefined,
  maxRetriesPerRequest: null,
};

const nanoseconds = () => BigInt(Math.round((performance.timeOrigin + performance.now()) * 1000)) * 1000n;
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

function text(number, due) {
  return `${String(number).padStart(7, "0")}:${String(due).padStart(13, "0")}:`.padEnd(PAYLOAD, "x");
}

function work() {
  const log = fs.openSync(process.env.BENCH_LOG, "a");
  const write = (kind, payload) =>
    fs.writeSync(log, `${kind} ${payload.slice(0, 7)} ${payload.slice(8, 21)} ${nanoseconds()}\n`);
  const lease = process.env.BENCH_LEASE ? Number(process.env.BENCH_LEASE) * 1000 : undefined;
  const worker = new Worker(
    NAME,
    async (job) => {
      write("start", job.data);
      if (SECONDS && !job.data.startsWith("0000000:")) {
        await sleep(SECONDS * 1000);
        write("end", job.data);
      }
    },
    { connection, concurrency: 50, ...(lease && { lockDuration: lease, stalledInterval: lease }) },
  );
  worker.on("error", (error) => console.error(error));
  process.on("SIGTERM", () => worker.close().then(() => process.exit(0)));
}

async function produce() {
  const queue = new Queue(NAME, { connection, defaultJobOptions: { removeOnComplete: true, removeOnFail: true } });
  await queue.waitUntilReady();
  const say = (what) => fs.writeSync(1, JSON.stringify(what) + "\n");
  const schedule = (data, due) => queue.add("task", data, { delay: Math.max(0, due - Date.now()) });

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
        const now = Date.now();
        await queue.addBulk(
          items
            .slice(first, first + BATCH)
            .map(([data, due]) => ({ name: "task", data, opts: { delay: Math.max(0, due - now) } })),
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
  await queue.close();
  process.exit(0);
}

if (process.argv[2] === "work") work();
else produce();
